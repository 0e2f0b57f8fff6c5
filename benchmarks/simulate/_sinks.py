"""What is kept of a replay: sums for summaries, records as the ring has them, or where every rank is at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulate._replay import Role
from keepstep.core.events import Flag, Kind, Op, Phase
from keepstep.core.summary import IterationSummary, StreamSummary

Floats = NDArray[np.float64]
Stream = tuple[Role, Op, int]  # role, operation, peer's stage (-1 for collectives)


@dataclass(slots=True)
class StreamSums:
    """Of one stream of a stage; arrays of shape (steps, dp, tp), seconds. ``count``: the same, or one for all."""

    count: int | NDArray[np.int64]
    start: Floats
    end: Floats
    busy: Floats
    blocked: Floats
    fastest: Floats


@dataclass(slots=True)
class StageSums:
    """Of one stage, as an agent sums them up."""

    streams: dict[Stream, StreamSums] = field(default_factory=dict[Stream, StreamSums])
    phases: dict[Phase, Floats] = field(default_factory=dict[Phase, Floats])
    blocked: Floats | float = 0.0


class Sums:
    """Sums per stage. For steps that end."""

    def __init__(self, stages: int) -> None:
        self.stages = [StageSums() for _ in range(stages)]

    def operation(
        self, stage: int, ticket: int, role: Role, op: Op, peer: int, flags: int,
        start: Floats, wait: Floats | None, end: Floats,
    ) -> None:  # fmt: skip
        sums = self.stages[stage]
        ran = np.isfinite(start)
        all_ran = bool(ran.all())
        if not all_ran:  # some replicas have fewer micro-batches
            wait = np.where(ran, start if wait is None else wait, 0.0)
            start, end = np.where(ran, start, 0.0), np.where(ran, end, 0.0)
        busy = end - start
        blocked = busy if wait is None or wait is start else end - wait
        sums.blocked = sums.blocked + blocked
        known = sums.streams.get((role, op, peer))
        if known is None:
            sums.streams[role, op, peer] = StreamSums(
                1 if all_ran else ran.astype(np.int64),
                np.array(start), np.array(end), np.array(busy), np.array(blocked),
                np.where(ran, busy, np.inf),
            )  # fmt: skip
            return
        known.count = known.count + (1 if all_ran else ran)
        known.start += start
        known.end += end
        known.busy += busy
        known.blocked += blocked
        np.minimum(known.fastest, busy if all_ran else np.where(ran, busy, np.inf), out=known.fastest)

    def phase(self, stage: int, ticket: int, phase: Phase, start: Floats, end: Floats, own: Floats) -> None:
        if phase is not Phase.MODEL:
            phases = self.stages[stage].phases
            phases[phase] = phases[phase] + own if phase in phases else own


@dataclass(frozen=True, slots=True)
class Record:
    """One record of every rank of a stage; times in seconds, shape (steps, dp, tp) or as their sink says."""

    ticket: int
    kind: Kind
    op: int
    role: Role | None
    peer: int
    flags: int
    start: Floats
    wait: Floats | None  # None: no wait was seen
    end: Floats

    def at(self, *place: int) -> RecordAt:
        """Of one rank in one step."""
        wait = None if self.wait is None else float(self.wait[place])
        start, end = float(self.start[place]), float(self.end[place])
        return RecordAt(self.kind, self.op, self.role, self.peer, start, wait, end)


class RecordAt(NamedTuple):
    """A record of one rank in one step; seconds."""

    kind: Kind
    op: int
    role: Role | None
    peer: int
    start: float
    wait: float | None
    end: float


class Log:
    """Every record. For jobs of a few hundred ranks."""

    def __init__(self, stages: int) -> None:
        self._records: list[list[Record]] = [[] for _ in range(stages)]

    def operation(
        self, stage: int, ticket: int, role: Role, op: Op, peer: int, flags: int,
        start: Floats, wait: Floats | None, end: Floats,
    ) -> None:  # fmt: skip
        kind = Kind.P2P if op in (Op.SEND, Op.RECV) else Kind.COLLECTIVE
        self._records[stage].append(Record(ticket, kind, op, role, peer, flags, start, wait, end))

    def phase(self, stage: int, ticket: int, phase: Phase, start: Floats, end: Floats, own: Floats) -> None:
        record = Record(ticket, Kind.PHASE, phase, None, -1, int(Flag.NONE), start, None, end)
        self._records[stage].append(record)

    def of_stage(self, stage: int) -> list[Record]:
        """In the order in which they began."""
        return sorted(self._records[stage], key=lambda record: record.ticket)


class Blocks:
    """The passes and messages of some ranks. ``places``: (dp, tp) of those ranks by stage."""

    def __init__(self, places: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        self._places = {stage: tuple(np.transpose(here)) for stage, here in places.items()}
        self._records: dict[int, list[Record]] = {stage: [] for stage in places}

    def operation(
        self, stage: int, ticket: int, role: Role, op: Op, peer: int, flags: int,
        start: Floats, wait: Floats | None, end: Floats,
    ) -> None:  # fmt: skip
        if stage in self._places:
            kind = Kind.P2P if op in (Op.SEND, Op.RECV) else Kind.COLLECTIVE
            times = (
                self._of(stage, start),
                None if wait is None else self._of(stage, wait),
                self._of(stage, end),
            )
            self._records[stage].append(Record(ticket, kind, op, role, peer, flags, *times))

    def phase(self, stage: int, ticket: int, phase: Phase, start: Floats, end: Floats, own: Floats) -> None:
        if stage in self._places and phase in (Phase.MODEL, Phase.BACKWARD):
            times = self._of(stage, start), None, self._of(stage, end)
            self._records[stage].append(Record(ticket, Kind.PHASE, phase, None, -1, int(Flag.NONE), *times))

    def of_stage(self, stage: int) -> list[Record]:
        """In the order in which they began; times of shape (steps, places)."""
        return sorted(self._records[stage], key=lambda record: record.ticket)

    def _of(self, stage: int, times: Floats) -> Floats:
        d, t = self._places[stage]
        return np.array(times[:, d, t])


@dataclass(slots=True)
class StreamEnd:
    """How far a stream came in each step; shape (steps, dp, tp). ``since``: start of what is in flight, else -inf."""

    started: NDArray[np.int64]
    completed: NDArray[np.int64]
    since: Floats
    waits: NDArray[np.bool_]  # for what is in flight


@dataclass(slots=True)
class StageEnd:
    """Where the ranks of a stage came in each step; shape (steps, dp, tp)."""

    streams: dict[Stream, StreamEnd]
    phase: NDArray[np.int64]  # open, -1 for none
    phase_since: Floats
    phase_ended: Floats
    last_ended: NDArray[np.int64]  # the phase that ended then; -1 for none
    steps_done: NDArray[np.int64]
    newest: Floats  # start or end
    records: NDArray[np.int64]  # starts and ends


class Progress:
    """Where every rank is when nothing moves any more."""

    def __init__(self, stages: int, shape: tuple[int, int, int]) -> None:
        self._shape = shape
        self.stages = [
            StageEnd(
                {}, np.full(shape, -1), np.full(shape, -np.inf), np.full(shape, -np.inf), np.full(shape, -1),
                np.zeros(shape, np.int64), np.full(shape, -np.inf), np.zeros(shape, np.int64),
            )
            for _ in range(stages)
        ]  # fmt: skip

    def operation(
        self, stage: int, ticket: int, role: Role, op: Op, peer: int, flags: int,
        start: Floats, wait: Floats | None, end: Floats,
    ) -> None:  # fmt: skip
        began, ended = self._note(self.stages[stage], start, end)
        streams = self.stages[stage].streams
        known = streams.get((role, op, peer))
        if known is None:
            zeros = np.zeros(self._shape, np.int64)
            never = np.full(self._shape, -np.inf)
            known = streams[role, op, peer] = StreamEnd(
                zeros, np.array(zeros), never, np.zeros(self._shape, np.bool_)
            )
        known.started += began
        known.completed += ended
        flying = began & ~ended
        known.since[flying] = start[flying]
        if wait is not None:
            known.waits |= flying & np.isfinite(wait)

    def phase(self, stage: int, ticket: int, phase: Phase, start: Floats, end: Floats, own: Floats) -> None:
        here = self.stages[stage]
        began, ended = self._note(here, start, end)
        inside = began & ~ended & (start >= here.phase_since)
        here.phase[inside] = int(phase)
        here.phase_since[inside] = start[inside]
        here.last_ended[ended & (end >= here.phase_ended)] = int(phase)
        here.phase_ended[ended] = np.maximum(here.phase_ended, end)[ended]
        if phase is Phase.OPTIMIZER:
            here.steps_done += ended

    @staticmethod
    def _note(here: StageEnd, start: Floats, end: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        began = np.isfinite(start)
        ended = began & np.isfinite(end)
        here.newest[began] = np.maximum(here.newest, start)[began]
        here.newest[ended] = np.maximum(here.newest, end)[ended]
        here.records += began
        here.records += ended
        return began, ended


def joined(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Their union, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def per_rank(arrays: list[Floats]) -> Iterator[list[list[float]]]:
    """The arrays' values rank by rank: [step][array]; all of shape (steps, dp, tp)."""
    steps = len(arrays[0])
    table: Floats = np.stack([np.reshape(array, (steps, -1)) for array in arrays], axis=-1)
    for place in range(table.shape[1]):
        yield table[:, place].tolist()


def summary_of_row(
    rank: int, step: int, row: Sequence[float], heads: Sequence[tuple[str, int, int, int]]
) -> IterationSummary:
    """An iteration summary of sums as `StageSums` gives them; ``heads``: group, operation, peer, bytes by stream."""
    start, duration, own, blocked, data, backward, optimizer = row[:7]
    return IterationSummary(
        rank, step, start, duration, own, blocked, data, backward, optimizer,
        streams=tuple(
            StreamSummary(group, op, peer, count, count * nbytes, step * count + 1, *row[place + 1 : place + 6])
            for (group, op, peer, nbytes), place in zip(heads, range(7, len(row), 6), strict=True)
            for count in (round(row[place]),)
        ),
    )  # fmt: skip
