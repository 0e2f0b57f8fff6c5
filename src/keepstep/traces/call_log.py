"""MegaTrace call logs: when each rank's host called which communication function, one file a rank.

[save_count 11] [1755590149.366929580] [Rank 0] Fun AllReduce Data 25165824 stream 0x55919d298060 opCount 3239
[1746686438.086068203] [Rank 0] Fun AllReduce Data 1 stream 0x55f615683660
[10.0.0.1] [n1] [save_count 9] [1768121799.082548236] [Rank 0] [PCI 0000:18:00.0] [Func ncclAllGather] [Data 33] …
"""

from __future__ import annotations

import contextlib
import itertools
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from keepstep.core.errors import TraceError
from keepstep.core.ranges import fold_ranks
from keepstep.core.traced_operations import Call
from keepstep.traces.log_text import text_lines

MOST_CALLS = 20_000_000
_MOST_RANKS = 1 << 20
_LINE = re.compile(
    rb"\[(\d{1,12})\.(\d{1,9})\] \[Rank (\d{1,8})\](?: \[PCI [^\]]{0,40}\])? "
    rb"\[?Func? (?:nccl)?(\w{1,64})\]? \[?Data (\d{1,18})(?=[\]\s]|$)"
)
_LONGEST_LINE = 4096
_HEAD_LINES = 64  # lines that are searched to recognise a log


@dataclass(frozen=True, slots=True)
class CallLog:
    """The calls of every rank in order of time, and what could not be used."""

    calls: Mapping[int, tuple[Call, ...]]
    missing: tuple[str, ...] = ()


def looks_like_call_log(path: Path) -> bool:
    """Whether a call is among the first lines of a file, or of a file in a tar archive."""
    with contextlib.suppress(OSError, EOFError, zlib.error, tarfile.TarError):
        return any(
            _LINE.search(line) for _, lines in _files(path) for line in itertools.islice(lines, _HEAD_LINES)
        )
    return False


def read_call_log(paths: Iterable[Path]) -> CallLog:
    """Read the logs of one job: files or tar archives, in any order. The calls of a rank may be in several.

    Raises:
        TraceError: no call is in them.
    """
    found: dict[int, list[Call]] = {}
    read = list(paths)
    missing: list[str] = []
    impossible: dict[int, None] = {}
    bad = total = 0
    for path in read:
        try:
            for name, lines in _files(path):
                ranks_here: set[int] = set()
                others = 0
                for line in lines:
                    parsed = _LINE.search(line)
                    if parsed is None:
                        others += bool(line.strip())
                        continue
                    if int(parsed[3]) >= _MOST_RANKS:
                        impossible.setdefault(int(parsed[3]))
                        continue
                    if total == MOST_CALLS:
                        raise TraceError(f"{path}: more than {MOST_CALLS} calls; give fewer steps")
                    total += 1
                    seconds, fraction, rank, function, nbytes = parsed.groups()
                    at_s = int(seconds) + int(fraction.ljust(9, b"0")) * 1e-9
                    ranks_here.add(int(rank))
                    found.setdefault(int(rank), []).append(Call(at_s, function.decode(), int(nbytes)))
                if not ranks_here:
                    missing.append(f"{name}: no call in it, not used")
                    continue
                bad += others
                if len(ranks_here) > 1:
                    missing.append(f"{name}: holds calls of ranks {fold_ranks(ranks_here)}")
        except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
            missing.append(f"{path.name}: ends early or cannot be read: {error}")
    if not found:
        raise TraceError(
            f"{', '.join(path.name for path in read)}: no line '[sec.nsec] [Rank r] Fun … Data …' as of MegaTrace"
        )
    if bad:
        missing.append("1 line is no call" if bad == 1 else f"{bad} lines are no calls")
    if impossible:
        some = ", ".join(map(str, list(impossible)[:3])) + (", …" if len(impossible) > 3 else "")
        missing.append(f"calls of rank {some}: no job has so many ranks, not used")
    absent = sorted(set(range(max(found) + 1)) - set(found))
    if absent:
        missing.append(f"ranks {fold_ranks(absent)}: no calls")
    ordered = {rank: sorted(set(calls), key=lambda call: call.at_s) for rank, calls in sorted(found.items())}
    return CallLog({rank: tuple(calls) for rank, calls in ordered.items()}, tuple(missing))


def _files(path: Path) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The names and lines of log files: of an archive all its members, else the file at ``path`` itself."""
    if tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    with file:
                        yield member.name, _lines(file)
        return
    yield path.name, (line[:_LONGEST_LINE] for line in text_lines(path))


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(_LONGEST_LINE):
        yield line
