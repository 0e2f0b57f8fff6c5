"""Megatron-LM training logs: the time of every iteration, as its last rank prints it."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.errors import TraceError

_LINE = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\): ([0-9.eE+-]+)")
_LONGEST_LINE = 1 << 16
_HEAD_LINES = 2000  # lines that are searched to recognise a log


@dataclass(frozen=True, slots=True)
class TrainingLog:
    """The numbers of iterations with their seconds, ascending, and what could not be used."""

    iterations: tuple[tuple[int, float], ...]
    missing: tuple[str, ...] = ()


def looks_like_training_log(path: Path) -> bool:
    """Whether an iteration of Megatron-LM is among the first lines of a file, plain or gzipped."""
    with contextlib.suppress(OSError, EOFError):
        return any(_LINE.search(line) for line in itertools.islice(_lines(path), _HEAD_LINES))
    return False


def read_training_log(path: Path) -> TrainingLog:
    """Read a log, plain or gzipped. Of iterations that a restart has repeated, the last run counts.

    Raises:
        TraceError: the file cannot be read, or has no iteration in it.
    """
    seen: dict[int, float] = {}
    repeated = 0
    missing: list[str] = []
    try:
        for line in _lines(path):
            found = _LINE.search(line)
            if found is None:
                continue
            number, seconds = int(found[1]), float(found[2]) / 1e3
            if number in seen:
                repeated += 1
                for later in [known for known in seen if known >= number]:
                    del seen[later]
            seen[number] = seconds
    except (OSError, EOFError) as error:
        if not seen:
            raise TraceError(f"{path}: cannot be read: {error}") from error
        missing.append(f"{path.name}: ends early ({error})")
    except ValueError as error:
        raise TraceError(f"{path}: an elapsed time is no number: {error}") from error
    if not seen:
        raise TraceError(f"{path}: has no line 'iteration N/M | … elapsed time per iteration (ms): T'")
    if repeated:
        missing.append(
            f"{path.name}: the job began anew {repeated} times; of iterations run again the last run counts"
        )
    numbers = sorted(seen)
    steps = [second - first for first, second in itertools.pairwise(numbers)]
    usual = max(set(steps), key=steps.count, default=1)  # a log may hold every n-th iteration only
    holes = sum(step != usual for step in steps)
    if holes:
        missing.append(f"{path.name}: {holes} gaps between iterations")
    return TrainingLog(tuple((number, seen[number]) for number in numbers), tuple(missing))


def _lines(path: Path) -> Iterator[str]:
    with open(path, "rb") as raw:
        magic = raw.read(2)
    with gzip.open(path) if magic == b"\x1f\x8b" else open(path, "rb") as file:
        while line := file.readline(_LONGEST_LINE):
            yield line.decode(errors="replace")
