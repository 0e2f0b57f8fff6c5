"""Iteration summaries of many ranks as columns: what a large job's controller can hold and look through in seconds."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from keepstep.core.events import MESSAGES
from keepstep.core.summary import COMMUNICATORS, GroupInfo, IterationSummary, StreamSummary

Rows = NDArray[Any]  # structured
_SUMS = tuple(
    field.name for field in fields(IterationSummary) if field.name not in ("rank", "step", "streams")
)
_TIMES = ("start_s", "end_s", "busy_s", "blocked_s", "fastest_s")
ROW = np.dtype([
    ("rank", "<i4"), ("step", "<i4"), ("streams", "<i4"),
    *((name, "<f8" if name == "start_s" else "<f4") for name in _SUMS),
])  # fmt: skip
"""One iteration; ``streams``: how many rows of STREAM belong to it. Durations have seven digits."""

STREAM = np.dtype([
    ("group", "<i4"), ("op", "<i4"), ("peer", "<i4"), ("count", "<i4"), ("bytes", "<i8"), ("first_seq", "<u4"),
    *((name, "<f4") for name in _TIMES),
])  # fmt: skip
"""One stream of one iteration; ``group`` is an index into the names of groups."""

NO_NAME = "?"
_MANY = 100_000  # iterations: a job with more is large
_STREAM_FIELDS = tuple(field.name for field in fields(StreamSummary))[1:]


@dataclass(frozen=True, slots=True, eq=False)
class IterationTable(Sequence[IterationSummary]):
    """A sequence of summaries that makes an object only of what is looked at, and copies streams only then.

    All attributes but ``rows``, ``part`` and ``first`` are shared with the tables cut from this one.

    Attributes:
        rows: the iterations (ROW).
        part: for each row, the index of its sender in ``parts``.
        first: for each row, the place of its first stream in its sender's streams.
        parts: the streams of each sender (STREAM, as bytes).
        bases: for each sender, where its group names begin in ``numbers``.
        sizes: for each sender, how many group names it has.
        numbers: indices into ``names`` of the group names of all senders, one sender after the other.
        names: the distinct group names; the last one, NO_NAME, stands for an index that its sender gave no name.
    """

    rows: Rows
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
        """A table of what several senders sent.

        ``rows`` holds the iterations of all senders, one sender after the other; for each sender ``counts`` says how
        many, ``streams`` holds its streams as bytes, ``names`` its group names. Senders whose rows announce more or
        fewer streams than they sent are left out.
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
        """The rows that a mask or an array of places selects."""
        places = np.flatnonzero(which) if which.dtype == np.bool_ else which
        # `take` is many times faster than indexing structured arrays.
        rows, part, first = (values.take(places) for values in (self.rows, self.part, self.first))
        return replace(self, rows=rows, part=part, first=first)

    def of_ranks(self, ranks: Collection[int]) -> IterationTable:
        """The rows of some ranks."""
        return self.where(np.isin(self.rows["rank"], np.fromiter(ranks, np.int64)))

    def with_ranks_of_the_job(self, communicators: Mapping[str, GroupInfo]) -> IterationTable:
        """The table with ranks of the job as peers of messages in these groups, where they are places in the group.

        Messages to and from peers that are not known are left out.
        """
        owners, streams = self.flat()
        known = np.ones(len(streams), np.bool_)
        messages = np.isin(streams["op"], [int(op) for op in MESSAGES])
        for number, name in enumerate(self.names):
            here = messages & (streams["group"] == number) & name.startswith(COMMUNICATORS)
            if not here.any():
                continue
            members = np.array(communicators[name].members if name in communicators else (), np.int64)
            peers = streams["peer"][here]
            there = (peers >= 0) & (peers < len(members))
            known[here] = there
            streams["peer"][here] = members[np.where(there, peers, 0)] if len(members) else -1
        rows: Rows = np.array(self.rows)
        rows["streams"] = np.bincount(owners[known], minlength=len(rows))
        return IterationTable.of(rows, [len(rows)], [streams[known].tobytes()], [tuple(self.names)])

    def newest_steps(self) -> IterationTable:
        """The rows of the newest two steps, or of the newest one in a large job: enough to tell what groups are for.

        Of steps with streams, if there are any: on a GPU few have them.
        """
        newest = 2 if len(self) < _MANY else 1
        told = self.rows["step"][self.rows["streams"] > 0]
        steps = distinct(told if len(told) else self.rows["step"])[-newest:]
        return self.where(np.isin(self.rows["step"], steps))

    def flat(self) -> tuple[NDArray[np.int64], Rows]:
        """For every stream of the rows the place of its row, and all streams; ``group`` is an index into ``names``."""
        counts = self.rows["streams"].astype(np.int64)
        ends = self.first + counts
        breaks = np.flatnonzero((self.part[1:] != self.part[:-1]) | (self.first[1:] != ends[:-1])) + 1
        begins = np.concatenate(([0], breaks))[: len(counts)]
        lasts = np.concatenate((breaks, [len(counts)]))[: len(begins)] - 1
        part, size = self.part[begins], STREAM.itemsize
        low, high = self.first[begins] * size, ends[lasts] * size
        runs: list[list[int]] = [values.tolist() for values in (part, low, high)]
        # Joining bytes is many times faster than concatenating structured arrays.
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
    """The summaries as a table; a table is returned as it is."""
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
    """One field of all summaries."""
    return table_of(summaries).column(name)


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """Each whole number once, ascending; takes a fraction of ``numpy.unique``'s time on a large job's columns."""
    ordered = np.sort(values)
    return ordered[np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))]


def between(summaries: Sequence[IterationSummary], first_step: int, until_step: int) -> IterationTable:
    """The summaries of the steps from ``first_step`` up to, but not including, ``until_step``."""
    table = table_of(summaries)
    steps = table.column("step")
    return table.where((steps >= first_step) & (steps < until_step))


def medians(summaries: Sequence[IterationSummary], name: str) -> dict[int, float]:
    """The median of one field for each rank."""
    table = table_of(summaries)
    return medians_of(table.column("rank"), table.column(name))


def medians_of(ranks: NDArray[Any], values: NDArray[Any]) -> dict[int, float]:
    """The median of the values of each rank, in any order."""
    order = np.lexsort((values, ranks))
    known, first, counts = np.unique(ranks[order], return_index=True, return_counts=True)
    values = values[order].astype(np.float64)
    middle = (values[first + (counts - 1) // 2] + values[first + counts // 2]) / 2
    return dict(zip(known.tolist(), middle.tolist(), strict=True))
