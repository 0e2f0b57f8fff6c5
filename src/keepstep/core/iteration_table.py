"""Iteration summaries of many ranks as columns: what a large job's controller can hold and look through in seconds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from keepstep.core.summary import IterationSummary, StreamSummary

Rows = NDArray[Any]  # structured
_SUMS = tuple(
    field.name for field in fields(IterationSummary) if field.name not in ("rank", "step", "streams")
)
_TIMES = ("start_s", "end_s", "busy_s", "blocked_s", "fastest_s")
ROW = np.dtype([
    ("rank", "<i4"), ("step", "<i4"), ("streams", "<i4"),
    *((name, "<f8" if name == "start_s" else "<f4") for name in _SUMS),
])  # fmt: skip
"""One iteration; ``streams``: how many rows of STREAM are its own. Durations to seven digits."""

STREAM = np.dtype([
    ("group", "<i4"), ("op", "<i4"), ("peer", "<i4"), ("count", "<i4"), ("bytes", "<i8"), ("first_seq", "<u4"),
    *((name, "<f4") for name in _TIMES),
])  # fmt: skip
"""One stream of one iteration; ``group`` counts in the table's names."""

NO_NAME = "?"
_MANY = 100_000  # iterations
_STREAM_FIELDS = tuple(field.name for field in fields(StreamSummary))[1:]


@dataclass(frozen=True, slots=True, eq=False)
class IterationTable(Sequence[IterationSummary]):
    """A sequence of summaries that makes an object only of what is looked at, and copies streams only then.

    ``parts``: the streams of each sender (STREAM, as bytes). ``numbers``: the places in ``names`` of all that senders
    named, one after the other; ``bases`` and ``sizes``: where a sender's begin there, and how many they are. All these
    are shared with the tables cut from this one. ``part`` and ``first``: which part holds a row's streams, and from
    which place on. The last name stands for what is none.
    """

    rows: Rows  # ROW
    part: NDArray[np.int64]
    first: NDArray[np.int64]
    parts: Sequence[memoryview]
    bases: NDArray[np.int64]
    sizes: NDArray[np.int64]
    numbers: NDArray[np.int64]
    names: Sequence[str]

    @classmethod
    def of(
        cls, rows: Rows, counts: Sequence[int], streams: Sequence[bytes], names: Sequence[Sequence[str]]
    ) -> IterationTable:
        """Of several senders: ``counts`` rows of each, one after the other, the bytes of its streams and its names.

        Left out is who tells of more or fewer streams than there are.
        """
        told = rows["streams"].astype(np.int64)
        part = np.repeat(np.arange(len(counts)), counts)
        sums = np.bincount(part, told, len(counts))
        good = (sums * STREAM.itemsize == [len(one) for one in streams]) & (
            np.bincount(part, told < 0, len(counts)) == 0
        )
        first = np.cumsum(told) - told
        begin = np.cumsum(sums).astype(np.int64) - sums.astype(np.int64)
        sizes = np.fromiter(map(len, names), np.int64)
        every = list(itertools.chain.from_iterable(names))
        number_of = {name: number for number, name in enumerate(dict.fromkeys(every))}
        numbers = np.array([*map(number_of.__getitem__, every), len(number_of)])
        table = cls(
            rows, part, first - begin[part], [memoryview(one) for one in streams], np.cumsum(sizes) - sizes, sizes,
            numbers, [*number_of, NO_NAME],
        )  # fmt: skip
        return table if good.all() else table.where(good[part])

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> IterationSummary: ...
    @overload
    def __getitem__(self, index: slice) -> IterationTable: ...
    def __getitem__(self, index: int | slice) -> IterationSummary | IterationTable:
        places = np.arange(len(self))[index]
        if isinstance(index, slice):
            return self.where(places)
        return next(iter(self.where(np.array([places]))))

    def __iter__(self) -> Iterator[IterationSummary]:
        _, streams = self.flat()
        place = 0
        for row in self.rows:
            rank, step, count, *sums = row.item()
            yield IterationSummary(
                rank, step, *sums,
                streams=tuple(
                    StreamSummary(self.names[int(group)], *rest)
                    for group, *rest in streams[place : place + count].tolist()
                ),
            )  # fmt: skip
            place += count

    def column(self, name: str) -> NDArray[Any]:
        """One field of all rows."""
        return self.rows[name]

    def where(self, which: NDArray[Any]) -> IterationTable:
        """The rows of a mask or at places."""
        places = np.flatnonzero(which) if which.dtype == np.bool_ else which
        # many times faster than indexing structured arrays
        rows, part, first = (values.take(places) for values in (self.rows, self.part, self.first))
        return replace(self, rows=rows, part=part, first=first)

    def of_ranks(self, ranks: Sequence[int] | NDArray[np.int64]) -> IterationTable:
        """The rows of some ranks."""
        return self.where(np.isin(self.rows["rank"], ranks))

    def flat(self) -> tuple[NDArray[np.int64], Rows]:
        """All streams of the rows, and for each the place of its row; ``group`` counts in ``names``."""
        counts = self.rows["streams"].astype(np.int64)
        ends = self.first + counts
        breaks = np.flatnonzero((self.part[1:] != self.part[:-1]) | (self.first[1:] != ends[:-1])) + 1
        begins = np.concatenate(([0], breaks))[: len(counts)]
        lasts = np.concatenate((breaks, [len(counts)]))[: len(begins)] - 1
        part, size = self.part[begins], STREAM.itemsize
        low, high = self.first[begins] * size, ends[lasts] * size
        runs: list[list[int]] = [values.tolist() for values in (part, low, high)]
        # many times faster than concatenating structured arrays
        pieces = (
            self.parts[which][begin:end] for which, begin, end in zip(runs[0], runs[1], runs[2], strict=True)
        )
        found: Rows = np.frombuffer(bytearray().join(pieces), STREAM)
        part = np.repeat(part, (high - low) // size)
        group: NDArray[np.int64] = found["group"].astype(np.int64)
        named = (group >= 0) & (group < self.sizes[part])
        found["group"] = self.numbers[np.where(named, group + self.bases[part], -1)]
        return np.repeat(np.arange(len(counts)), counts), found


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
    return IterationTable.of(
        np.array(rows, ROW), [len(rows)], [np.array(streams, STREAM).tobytes()], [tuple(names)]
    )


def column(summaries: Sequence[IterationSummary], name: str) -> NDArray[Any]:
    """One field of all summaries, whatever they are kept in."""
    if isinstance(summaries, IterationTable):
        return summaries.column(name)
    return np.array([getattr(one, name) for one in summaries])


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """Each whole number once, ascending; of the columns of a large job in a fraction of numpy's time."""
    ordered = np.sort(values)
    return ordered[np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))]


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


def newest_steps(summaries: Sequence[IterationSummary]) -> Sequence[IterationSummary]:
    """Those of the newest two steps, one of a large job: enough to tell what groups are for."""
    newest = 2 if len(summaries) < _MANY else 1
    return at_steps(summaries, distinct(column(summaries, "step"))[-newest:].tolist())


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
