"""Follows the files of iterations that one node's agent writes, also while they grow and are rotated."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from keepstep.core.regular_files import open_regular
from keepstep.view.samples import MOST_RANKS

_PIECE_BYTES = 256 << 10  # Read and decoded at once; no line of a node is nearly as long.
_LONGEST_LINE = 4 << 20
_PIECES = 384  # of a file that is too long to be read whole: as many pieces, evenly spaced
_MOST_RANK = (1 << 31) - 1


class _Cells(msgspec.Struct, gc=False):
    t: float
    d: float
    own_s: float = msgspec.field(name="self", default=0.0)


class _Line(msgspec.Struct, gc=False):
    step: int
    ranks: dict[int, _Cells]
    inc: int = -1


_decoder = msgspec.json.Decoder(_Line)


@dataclass(frozen=True, slots=True)
class Iterations:
    """Iterations of one incarnation as columns of one length: times in seconds, starts in Unix seconds."""

    incarnation: int
    rank: npt.NDArray[np.int32]
    step: npt.NDArray[np.int64]
    own_s: npt.NDArray[np.float32]
    iteration_s: npt.NDArray[np.float32]
    start_unix_s: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SeenFile:
    """A file as the folder's listing showed it."""

    path: Path
    inode: int
    size: int


class StepFiles:
    """What has been read of one node's ``iterations*.jsonl``, and what comes next.

    Lines of earlier versions do not name the incarnation: there it is how often the steps have gone back, at
    most the true one, as a restart that lost no step does not show.
    """

    __slots__ = ("_back", "_newest", "_read", "broken")

    def __init__(self) -> None:
        self._read: dict[int, int] = {}  # bytes of each file, by inode
        self._back = 0  # how often the steps have gone back
        self._newest: dict[int, int] = {}  # step by rank
        self.broken = 0  # lines that could not be read

    def has_news(self, files: Sequence[SeenFile]) -> bool:
        return any(self._read.get(one.inode, 0) != one.size for one in files)

    def read(self, files: Sequence[SeenFile], most_bytes: int) -> Iterator[list[Iterations]]:
        """What has been written since the last call, a piece after another; the caller may stop in between.

        Of a file with more than ``most_bytes`` of news only pieces are read, evenly spaced. Raises OSError.
        """
        known = {one.inode for one in files}
        for inode in [inode for inode in self._read if inode not in known]:
            del self._read[inode]
        for seen in _in_order(files):
            offset = self._read.get(seen.inode, 0)
            if offset > seen.size:  # another file, which has the number of one that was removed
                offset = 0
            if offset < seen.size:
                yield from self._pieces(seen, offset, most_bytes)

    def _pieces(self, seen: SeenFile, offset: int, most_bytes: int) -> Iterator[list[Iterations]]:
        news = seen.size - offset
        piece, distance = _PIECE_BYTES, 0
        if news > most_bytes:
            pieces = min(_PIECES, max(most_bytes // 4096, 1))
            piece = min(max(most_bytes // pieces, 1), _PIECE_BYTES)
            distance = news // pieces
        with open_regular(seen.path) as file:
            while offset < seen.size:
                lines, end = _whole_lines(file.fileno(), offset, min(piece, seen.size - offset), seen.size)
                if end == offset:  # the last line is not whole yet
                    break
                following = end
                if offset + distance > end:
                    following = _next_line(file.fileno(), offset + distance, seen.size)
                offset = self._read[seen.inode] = following
                yield self._decoded(lines)
            self._read.setdefault(seen.inode, offset)

    def _decoded(self, text: bytes) -> list[Iterations]:
        try:
            lines = _decoder.decode_lines(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            lines = self._line_by_line(text)
        rows: dict[int, list[tuple[int, int, float, float, float]]] = {}
        for line in lines:
            newest, step = self._newest, line.step
            if any(step <= newest.get(rank, -1) for rank in line.ranks):
                self._back += 1
                newest.clear()
            newest.update(dict.fromkeys(line.ranks, step))
            if len(newest) > MOST_RANKS:  # no job has so many: the file is hostile
                newest.clear()
            incarnation = line.inc if 0 <= line.inc <= _MOST_RANK else self._back
            self._back = max(self._back, incarnation)
            rows.setdefault(incarnation, []).extend(
                (rank, step, one.own_s, one.d, one.t)
                for rank, one in line.ranks.items()
                if 0 <= rank <= _MOST_RANK
            )
        return [_columns(incarnation, found) for incarnation, found in sorted(rows.items()) if found]

    def _line_by_line(self, text: bytes) -> list[_Line]:
        found: list[_Line] = []
        for line in text.splitlines():
            try:
                found.append(_decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # noqa: PERF203
                self.broken += 1
        return found


def joined(parts: Sequence[Iterations]) -> list[Iterations]:
    """The same as few of them, one for each incarnation, the oldest first."""
    by_incarnation: dict[int, list[Iterations]] = {}
    for one in parts:
        by_incarnation.setdefault(one.incarnation, []).append(one)
    return [
        Iterations(
            incarnation,
            np.concatenate([one.rank for one in found]),
            np.concatenate([one.step for one in found]),
            np.concatenate([one.own_s for one in found]),
            np.concatenate([one.iteration_s for one in found]),
            np.concatenate([one.start_unix_s for one in found]),
        )
        for incarnation, found in sorted(by_incarnation.items())
    ]


def files_of_iterations(files: Mapping[str, SeenFile]) -> list[SeenFile]:
    """The files of iterations in a node's folder."""
    return [one for name, one in files.items() if name.startswith("iterations") and ".jsonl" in name]


def _in_order(files: Sequence[SeenFile]) -> list[SeenFile]:
    """``iterations.1.jsonl``, the predecessor, before ``iterations.jsonl``."""
    return sorted(files, key=lambda one: (one.path.name == "iterations.jsonl", one.path.name))


def _columns(incarnation: int, rows: list[tuple[int, int, float, float, float]]) -> Iterations:
    rank, step, own_s, iteration_s, start = zip(*rows, strict=True)
    return Iterations(
        incarnation,
        np.array(rank, np.int32),
        np.array([one if 0 <= one < 1 << 62 else -1 for one in step], np.int64),
        np.array(own_s, np.float32),
        np.array(iteration_s, np.float32),
        np.array(start, np.float64),
    )


def _whole_lines(descriptor: int, offset: int, wanted: int, size: int) -> tuple[bytes, int]:
    """Whole lines from ``offset`` on, at least one, about ``wanted`` bytes; and where they end.

    Nothing where the last line is not whole. A line that is longer than any of keepstep's is left out.
    """
    length = wanted
    while True:
        text = os.pread(descriptor, min(length, size - offset), offset)
        end = text.rfind(b"\n") + 1
        if end:
            return text[:end], offset + end
        if offset + len(text) >= size or not text:
            return b"", offset
        if len(text) >= _LONGEST_LINE:
            return b"too long\n", _next_line(descriptor, offset + len(text), size)
        length = max(2 * length, 4096)


def _next_line(descriptor: int, offset: int, size: int) -> int:
    """Where the next line after ``offset`` begins; ``size`` where there is none."""
    while offset < size:
        text = os.pread(descriptor, min(4096, size - offset), offset)
        if not text:
            break
        end = text.find(b"\n") + 1
        if end:
            return offset + end
        offset += len(text)
    return size
