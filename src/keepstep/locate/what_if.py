"""What a step would have taken had an operation, rank or stage been as fast as the others.

The dependency graph of a step is rebuilt from what each rank did and in which order: blocks of forward and backward
wait for the block before them on their rank and for the message from the neighbouring stage; collectives wait for their
last member. Replaying it with other durations answers the question (the "what-if" of straggler analysis; MegaTrace
§III-C uses the same graph for its critical path). All steps of one shape are replayed at once.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import TraceError
from keepstep.core.operations import Operation, OperationKind

Floats = NDArray[np.float64]
_Key = tuple[int, OperationKind, int]  # rank, kind, index

_COMPUTE: tuple[OperationKind, ...] = ("forward", "backward")
_SENDS: Mapping[OperationKind, tuple[OperationKind, int]] = {
    "forward-recv": ("forward-send", -1),
    "backward-recv": ("backward-send", 1),
}


@dataclass(frozen=True, slots=True)
class _Node:
    """One operation in all steps: its duration without waiting, and what it comes after."""

    key: _Key
    after: tuple[int, ...]  # positions of nodes that end before it starts


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The steps of one shape. ``durations`` has the shape (nodes, steps), seconds, waiting for others taken out."""

    steps: tuple[int, ...]
    nodes: tuple[_Node, ...]
    durations: Floats
    stage_of: Mapping[int, int]
    replica_of: Mapping[int, int]

    def replay(self, durations: Floats) -> Floats:
        """Seconds of every step with these durations; shape (steps,)."""
        ends = np.empty_like(durations)
        for place, node in enumerate(self.nodes):
            begin = ends[list(node.after)].max(axis=0) if node.after else 0.0
            ends[place] = begin + durations[place]
        return ends.max(axis=0)

    def ideal(self) -> Floats:
        """Every operation as its kind usually is: the mean of what ranks do for themselves, the median of transfers."""
        found: Floats = np.array(self.durations)
        alike: dict[tuple[OperationKind, int], list[int]] = defaultdict(list)
        for place, node in enumerate(self.nodes):
            _, kind, index = node.key
            alike[kind, index if kind == "local" else 0].append(place)
        for (kind, _), places in alike.items():
            rows = self.durations[places]
            found[places] = rows.mean() if kind in (*_COMPUTE, "local") else np.median(rows)
        return found

    def places(self, ranks: Iterable[int]) -> list[int]:
        """Nodes of these ranks."""
        wanted = set(ranks)
        return [place for place, node in enumerate(self.nodes) if node.key[0] in wanted]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Mean seconds of a step: as it was, with nobody slow, and what each cause alone accounts for.

    ``by_rank`` and ``by_stage``: the share of the lost time that comes back when only this one is as fast as the others
    (may exceed 1 or fall below 0 where the others are not alike).
    """

    actual_s: float
    ideal_s: float
    by_rank: Mapping[int, float]
    by_stage: Mapping[int, float]
    rank_ratio: Mapping[int, float]  # of a rank's blocks to the usual ones of the same kind

    @property
    def slowdown(self) -> float:
        """The step's time over its ideal."""
        return self.actual_s / self.ideal_s


def step_graphs(operations: Sequence[Operation]) -> list[StepGraph]:
    """Graphs of all steps, one for each shape; those that most steps have first.

    Raises:
        TraceError: no step has a block of computation.
    """
    by_step: dict[int, dict[_Key, Operation]] = defaultdict(dict)
    for one in operations:
        by_step[one.step][one.rank, one.kind, one.index] = one
    shapes: dict[frozenset[_Key], list[int]] = defaultdict(list)
    for step, rows in by_step.items():
        if any(kind in _COMPUTE for _, kind, _ in rows):
            shapes[frozenset(rows)].append(step)
    if not shapes:
        raise TraceError("the table has no forward or backward computation")
    order = sorted(shapes.values(), key=lambda steps: (-len(steps), steps))
    return [_graph([by_step[step] for step in sorted(steps)], sorted(steps)) for steps in order]


def what_if(graph: StepGraph) -> WhatIf:
    """Replay the steps with every rank, and every stage, as fast as the others."""
    actual = float(graph.replay(graph.durations).mean())
    ideal_durations = graph.ideal()
    ideal = float(graph.replay(ideal_durations).mean())
    lost = max(actual - ideal, 1e-12)

    def recovered(ranks: Iterable[int]) -> float:
        places = graph.places(ranks)
        durations: Floats = np.array(graph.durations)
        durations[places] = ideal_durations[places]
        return (actual - float(graph.replay(durations).mean())) / lost

    stages: dict[int, list[int]] = defaultdict(list)
    for rank, stage in graph.stage_of.items():
        stages[stage].append(rank)
    ratio: dict[int, float] = {}
    for rank in graph.stage_of:
        places = [place for place in graph.places([rank]) if graph.nodes[place].key[1] in _COMPUTE]
        if places:
            ratio[rank] = float(graph.durations[places].sum() / max(ideal_durations[places].sum(), 1e-12))
    return WhatIf(
        actual,
        ideal,
        {rank: recovered([rank]) for rank in sorted(graph.stage_of)},
        {stage: recovered(ranks) for stage, ranks in sorted(stages.items())},
        ratio,
    )


def _graph(rows: Sequence[Mapping[_Key, Operation]], steps: Sequence[int]) -> StepGraph:
    first = rows[0]
    stage_of = {one.rank: one.stage for one in first.values()}
    replica_of = {one.rank: one.replica for one in first.values()}
    rank_at = {(replica_of[rank], stage): rank for rank, stage in stage_of.items()}
    starts = {key: np.array([row[key].start_s for row in rows]) for key in first}
    lasts = {key: np.array([row[key].duration_s for row in rows]) for key in first}
    last_stage = max(stage_of.values())
    members = _Members(stage_of, replica_of, last_stage)
    durations = {key: _without_waiting(key, starts, lasts, members, rank_at) for key in first}
    before = _before(first, starts, lasts, members, rank_at)
    order = _in_order(before)
    places = {key: place for place, key in enumerate(order)}
    nodes = tuple(_Node(key, tuple(sorted(places[other] for other in before[key]))) for key in order)
    return StepGraph(tuple(steps), nodes, np.array([durations[key] for key in order]), stage_of, replica_of)


@dataclass(frozen=True, slots=True)
class _Members:
    """Who takes part in the collectives at the ends of a step."""

    stage_of: Mapping[int, int]
    replica_of: Mapping[int, int]
    last_stage: int

    def of(self, rank: int, kind: OperationKind) -> list[int]:
        if kind in ("params-sync", "grads-sync"):
            return [r for r, stage in self.stage_of.items() if stage == self.stage_of[rank]]
        if kind == "embedding-sync":
            ends = (0, self.last_stage)
            return [r for r, stage in self.stage_of.items() if stage in ends]
        return list(self.stage_of) if kind == "norm-sync" else [rank]


def _peers(
    key: _Key, known: Mapping[_Key, object], members: _Members, rank_at: Mapping[tuple[int, int], int]
) -> list[_Key]:
    """The same operation as its other sides recorded it, its own included."""
    rank, kind, index = key
    if kind in _SENDS:
        other, toward = _SENDS[kind]
        # with interleaved stages the last one sends to the first
        stage = (members.stage_of[rank] + toward) % (members.last_stage + 1)
        source = rank_at.get((members.replica_of[rank], stage))
        keys: list[_Key] = [key] if source is None else [key, (source, other, index)]
    else:
        keys = [(r, kind, index) for r in members.of(rank, kind)]
    return [one for one in keys if one in known]


def _without_waiting(
    key: _Key,
    starts: Mapping[_Key, Floats],
    lasts: Mapping[_Key, Floats],
    members: _Members,
    rank_at: Mapping[tuple[int, int], int],
) -> Floats:
    """An operation's time after the last of its sides was there."""
    if key[1].endswith("-send"):
        return np.zeros_like(lasts[key])  # the receiver's tells the transfer
    there = np.max([starts[one] for one in _peers(key, starts, members, rank_at)], axis=0)
    return np.maximum(starts[key] + lasts[key] - np.maximum(there, starts[key]), 0.0)


class _Blocks:
    """Which block of computation a message comes from and goes to.

    By number where every block has a message; else (first and last stage of interleaved schedules) by time.
    """

    def __init__(
        self,
        chains: Mapping[int, Sequence[_Key]],
        starts: Mapping[_Key, Floats],
        lasts: Mapping[_Key, Floats],
    ) -> None:
        self._blocks: dict[tuple[int, OperationKind], list[_Key]] = defaultdict(list)
        for chain in chains.values():
            for key in chain:
                if key[1] in _COMPUTE:
                    self._blocks[key[0], key[1]].append(key)
        self._counts: dict[tuple[int, OperationKind], int] = defaultdict(int)
        for rank, kind, _ in starts:
            self._counts[rank, kind] += 1
        self._start = {key: float(np.median(values)) for key, values in starts.items()}
        self._end = {key: float(np.median(starts[key] + lasts[key])) for key in starts}

    def that_sends(self, message: _Key) -> set[_Key]:
        """The block whose result is sent: the one that ends nearest to the send's start."""
        blocks = self._of(message)
        if self._counts[message[0], message[1]] == len(blocks):
            return {block for block in blocks if block[2] == message[2]}
        at = self._start[message]
        return {min(blocks, key=lambda block: abs(self._end[block] - at))} if blocks else set()

    def that_takes(self, message: _Key) -> set[_Key]:
        """The block that begins next after the message has come."""
        blocks = self._of(message)
        if self._counts[message[0], message[1]] == len(blocks):
            return {block for block in blocks if block[2] == message[2]}
        at = self._end[message]
        after = [block for block in blocks if self._start[block] >= at - 1e-4]
        return {min(after, key=lambda block: self._start[block])} if after else set()

    def _of(self, message: _Key) -> list[_Key]:
        rank, kind, _ = message
        return self._blocks[rank, "forward" if kind.startswith("forward") else "backward"]


def _before(
    keys: Iterable[_Key],
    starts: Mapping[_Key, Floats],
    lasts: Mapping[_Key, Floats],
    members: _Members,
    rank_at: Mapping[tuple[int, int], int],
) -> dict[_Key, set[_Key]]:
    """For every operation those that must have ended before it starts."""
    before: dict[_Key, set[_Key]] = {key: set() for key in keys}
    chains: dict[int, list[_Key]] = defaultdict(list)
    for key in before:
        if not key[1].endswith(("-send", "-recv")):
            chains[key[0]].append(key)
    blocks = _Blocks(chains, starts, lasts)
    previous: dict[_Key, _Key] = {}
    for chain in chains.values():
        chain.sort(key=lambda key: float(np.median(starts[key])))
        for first, second in itertools.pairwise(chain):
            before[second].add(first)
            previous[second] = first
    for key in before:
        kind = key[1]
        if kind in _SENDS:
            for sent in _peers(key, starts, members, rank_at)[1:]:
                before[key] |= blocks.that_sends(sent)
            for block in blocks.that_takes(key):
                before[block].add(key)
        elif kind not in (*_COMPUTE, "local"):
            for other in _peers(key, starts, members, rank_at):
                if other in previous:
                    before[key].add(previous[other])
    return before


def _in_order(before: Mapping[_Key, set[_Key]]) -> list[_Key]:
    """The operations so that each comes after those it waits for."""
    waiting = {key: len(others) for key, others in before.items()}
    after: dict[_Key, list[_Key]] = defaultdict(list)
    for key, others in before.items():
        for other in others:
            after[other].append(key)
    ready = [key for key, count in waiting.items() if count == 0]
    order: list[_Key] = []
    while ready:
        key = ready.pop()
        order.append(key)
        for other in after[key]:
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
    if len(order) < len(before):
        stuck = next(key for key, count in waiting.items() if count > 0)
        raise TraceError(
            f"the operations wait for each other in a circle, e.g. {stuck[1]} {stuck[2]} of rank {stuck[0]}: "
            "numbering or start times are wrong"
        )
    return order
