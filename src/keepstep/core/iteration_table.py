"""Iteration summaries of many ranks as columns: what a large job's controller can hold and look through in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from keepstep.core.summary import IterationSummary, StreamSummary

Rows = NDArray[Any]  # structured
_SUMS = tuple(field.name for field in fields(IterationSummary) if field.name not in ("rank", "step", "streams"))
_TIMES = ("start_s", "end_s", "busy_s", "blocked_s", "fastest_s")
ROW = np.dtype([("rank", "<i4"), ("step", "<i4"), ("streams", "<i4"), *((name, "<f8") for name in _SUMS)])
"""One iteration; ``streams``: how many rows of STREAM are its own."""

STREAM = np.dtype([
    ("group", "<i4"), ("op", "<i4"), ("peer", "<i4"), ("count", "<i4"), ("bytes", "<i8"), ("first_seq", "<i8"),
    *((name, "<f8") for name in _TIMES),
])  # fmt: skip
"""One stream of one iteration; ``group`` counts in the table's names."""

_STREAM_FIELDS = tuple(field.name for field in fields(StreamSummary))[1:]


@dataclass(frozen=True, slots=True, eq=False)
class IterationTable(Sequence[IterationSummary]):
    """A sequence of summaries that makes an object only of what is looked at.

    ``first``: place of each row's first stream in ``streams``, which several tables may share. A name may occur twice.
    """

    rows: Rows  # ROW
    streams: Rows  # STREAM
    first: NDArray[np.int64]
    names: tuple[str, ...]

    @classmethod
    def of(cls, rows: Rows, streams: Rows, names: Sequence[str]) -> IterationTable:
        """The table of rows whose streams lie one after the other."""
        first = np.cumsum(rows["streams"], dtype=np.int64) - rows["streams"]
        return cls(rows, streams, first, tuple(names))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> IterationSummary: ...
    @overload
    def __getitem__(self, index: slice) -> IterationTable: ...
    def __getitem__(self, index: int | slice) -> IterationSummary | IterationTable:
        if isinstance(index, slice):
            return IterationTable(self.rows[index], self.streams, self.first[index], self.names)
        return next(iter(self.where(np.array([range(len(self))[index]]))))

    def __iter__(self) -> Iterator[IterationSummary]:
        for row, first in zip(self.rows, self.first.tolist(), strict=True):
            rank, step, count, *sums = row.item()
            streams = self.streams[first : first + count].tolist()
            yield IterationSummary(
                rank, step, *sums,
                streams=tuple(StreamSummary(self.names[group], *rest) for group, *rest in streams),
            )  # fmt: skip

    def column(self, name: str) -> NDArray[Any]:
        """One field of all rows."""
        return self.rows[name]

    def where(self, which: NDArray[np.bool_] | NDArray[np.int64]) -> IterationTable:
        """The rows of a mask or at places."""
        return IterationTable(self.rows[which], self.streams, self.first[which], self.names)

    def of_ranks(self, ranks: Sequence[int]) -> IterationTable:
        """The rows of some ranks."""
        return self.where(np.isin(self.rows["rank"], list(ranks)))

    def flat(self) -> tuple[NDArray[np.int64], Rows]:
        """All streams of the rows, and for each the place of its row."""
        counts = self.rows["streams"]
        row = np.repeat(np.arange(len(counts)), counts)
        inside = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        return row, self.streams[self.first[row] + inside]


def table_of(summaries: Sequence[IterationSummary]) -> IterationTable:
    """The same as a table."""
    if isinstance(summaries, IterationTable):
        return summaries
    names: dict[str, int] = {}
    streams = [
        (names.setdefault(stream.group, len(names)), *(getattr(stream, name) for name in _STREAM_FIELDS))
        for one in summaries
        for stream in one.streams
    ]
    rows = [
        (one.rank, one.step, len(one.streams), *(getattr(one, name) for name in _SUMS)) for one in summaries
    ]
    return IterationTable.of(np.array(rows, ROW), np.array(streams, STREAM), tuple(names))


def column(summaries: Sequence[IterationSummary], name: str) -> NDArray[Any]:
    """One field of all summaries, whatever they are kept in."""
    if isinstance(summaries, IterationTable):
        return summaries.column(name)
    return np.array([getattr(one, name) for one in summaries])


def at_steps(summaries: Sequence[IterationSummary], steps: Sequence[int]) -> Sequence[IterationSummary]:
    """Those of some steps."""
    if isinstance(summaries, IterationTable):
        return summaries.where(np.isin(summaries.column("step"), list(steps)))
    wanted = set(steps)
    return [one for one in summaries if one.step in wanted]


def between(
    summaries: Sequence[IterationSummary], first_step: int, until_step: int
) -> Sequence[IterationSummary]:
    """Those of steps ``first_step`` to ``until_step``, the last one not included."""
    if isinstance(summaries, IterationTable):
        steps = summaries.column("step")
        return summaries.where((steps >= first_step) & (steps < until_step))
    return [one for one in summaries if first_step <= one.step < until_step]


def medians(summaries: Sequence[IterationSummary], name: str) -> dict[int, float]:
    """By rank the median of one field."""
    ranks = column(summaries, "rank")
    order = np.lexsort((column(summaries, name), ranks))
    known, first, counts = np.unique(ranks[order], return_index=True, return_counts=True)
    values = column(summaries, name)[order].astype(np.float64)
    middle = (values[first + (counts - 1) // 2] + values[first + counts // 2]) / 2
    return dict(zip(known.tolist(), middle.tolist(), strict=True))


def of_ranks(summaries: Sequence[IterationSummary], ranks: Sequence[int]) -> Sequence[IterationSummary]:
    """Those of some ranks."""
    if isinstance(summaries, IterationTable):
        return summaries.of_ranks(ranks)
    wanted = set(ranks)
    return [one for one in summaries if one.rank in wanted]
