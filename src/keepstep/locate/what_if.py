"""What a step would have taken had an operation, rank or stage been as fast as the others.

The dependency graph of a step is rebuilt from what each rank did and in which order: blocks of forward and backward
wait for the block before them on their rank and for the message from the neighbouring stage; collectives wait for their
last member. Replaying it with other durations answers the question (the "what-if" of straggler analysis; MegaTrace
§III-C uses the same graph for its critical path). All steps of one shape are replayed at once.
"""

from __future__ import annotations

import graphlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import TraceError
from keepstep.core.traced_operations import Operation, OperationKind

Floats = NDArray[np.float64]
Key = tuple[int, OperationKind, int]  # rank, kind, index

COMPUTE: tuple[OperationKind, ...] = ("forward", "backward")
_SENDS: Mapping[OperationKind, tuple[OperationKind, int]] = {
    "forward-recv": ("forward-send", -1),
    "backward-recv": ("backward-send", 1),
}


class Placing:
    """The pipeline stage and the replica of each rank, which decide who takes part in its operations."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        self.stage_of: dict[int, int] = {}
        self._rank_at: dict[tuple[int, int], int] = {}  # rank by replica and stage
        self._replica_of: dict[int, int] = {}
        for one in operations:
            self.stage_of[one.rank], self._replica_of[one.rank] = one.stage, one.replica
            self._rank_at[one.replica, one.stage] = one.rank
        self._last_stage = max(self.stage_of.values())

    def source(self, rank: int, kind: OperationKind) -> int | None:
        """The rank whose message an operation receives; None when it receives none, or from nobody known."""
        if kind not in _SENDS:
            return None
        # With interleaved stages the last one sends to the first.
        stage = (self.stage_of[rank] + _SENDS[kind][1]) % (self._last_stage + 1)
        return self._rank_at.get((self._replica_of[rank], stage))

    def members(self, rank: int, kind: OperationKind) -> list[int]:
        """The ranks of a collective at an end of the step; of any other operation the rank itself."""
        if not kind.endswith("-sync"):
            return [rank]
        if kind == "norm-sync":
            return list(self.stage_of)
        stages = (0, self._last_stage) if kind == "embedding-sync" else (self.stage_of[rank],)
        return [other for other, stage in self.stage_of.items() if stage in stages]


@dataclass(frozen=True, slots=True)
class _Node:
    """One operation of the graph, in all of its steps."""

    key: Key
    after: tuple[int, ...]  # positions of the nodes that end before it starts


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The steps of one shape. ``durations`` has the shape (nodes, steps), seconds, waiting for others taken out."""

    steps: tuple[int, ...]
    nodes: tuple[_Node, ...]
    durations: Floats
    placing: Placing

    @property
    def stage_of(self) -> Mapping[int, int]:
        """Pipeline stage by rank, of all ranks in the graph."""
        return self.placing.stage_of

    def replay(self, durations: Floats) -> Floats:
        """Seconds of every step with these durations; shape (steps,)."""
        ends = np.empty_like(durations)
        for place, node in enumerate(self.nodes):
            begin = ends[list(node.after)].max(axis=0) if node.after else 0.0
            ends[place] = begin + durations[place]
        return ends.max(axis=0)

    def ideal(self) -> Floats:
        """Durations as they usually are: the mean of each kind of computation, the median of each kind of transfer."""
        found: Floats = np.array(self.durations)
        alike: dict[tuple[OperationKind, int], list[int]] = defaultdict(list)
        for place, node in enumerate(self.nodes):
            _, kind, index = node.key
            alike[kind, index if kind == "local" else 0].append(place)
        for (kind, _), places in alike.items():
            rows = self.durations[places]
            found[places] = rows.mean() if kind in (*COMPUTE, "local") else np.median(rows)
        return found

    def places(self, ranks: Iterable[int]) -> list[int]:
        """Positions of the nodes of these ranks."""
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
    rank_ratio: Mapping[int, float]  # time of a rank's blocks over that of usual blocks of the same kind

    @property
    def slowdown(self) -> float:
        """The step's time over its ideal."""
        return self.actual_s / self.ideal_s


def step_graphs(operations: Sequence[Operation]) -> list[StepGraph]:
    """Graphs of all steps, one for each shape; the shape that most steps have comes first.

    Raises:
        TraceError: no step has a block of computation.
    """
    by_step: dict[int, dict[Key, Operation]] = defaultdict(dict)
    for one in operations:
        by_step[one.step][one.rank, one.kind, one.index] = one
    shapes: dict[frozenset[Key], list[int]] = defaultdict(list)
    for step, rows in by_step.items():
        if any(kind in COMPUTE for _, kind, _ in rows):
            shapes[frozenset(rows)].append(step)
    if not shapes:
        raise TraceError("the table has no forward or backward computation")
    order = sorted(shapes.values(), key=lambda steps: (-len(steps), steps))
    return [_Recorded([by_step[step] for step in sorted(steps)]).graph(sorted(steps)) for steps in order]


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
        places = [place for place in graph.places([rank]) if graph.nodes[place].key[1] in COMPUTE]
        if places:
            ratio[rank] = float(graph.durations[places].sum() / max(ideal_durations[places].sum(), 1e-12))
    by_rank = {rank: recovered([rank]) for rank in sorted(graph.stage_of)}
    by_stage = {stage: recovered(ranks) for stage, ranks in sorted(stages.items())}
    return WhatIf(actual, ideal, by_rank, by_stage, ratio)


class _Recorded:
    """The operations of the steps of one shape as they were recorded, from which their graph is made."""

    def __init__(self, steps: Sequence[Mapping[Key, Operation]]) -> None:
        first = steps[0]
        self._placing = Placing(first.values())
        self._starts = {key: np.array([step[key].start_s for step in steps]) for key in first}
        self._lasts = {key: np.array([step[key].duration_s for step in steps]) for key in first}

    def graph(self, steps: Sequence[int]) -> StepGraph:
        """The graph. Raises TraceError when operations wait for each other in a circle."""
        before = self._before()
        try:
            order = list(graphlib.TopologicalSorter(before).static_order())
        except graphlib.CycleError as error:
            rank, kind, index = error.args[1][0]
            raise TraceError(
                f"the operations wait for each other in a circle, e.g. {kind} {index} of rank {rank}: "
                "numbering or start times are wrong"
            ) from None
        places = {key: place for place, key in enumerate(order)}
        nodes = tuple(_Node(key, tuple(sorted(places[other] for other in before[key]))) for key in order)
        durations = np.array([self._without_waiting(key) for key in order])
        return StepGraph(tuple(steps), nodes, durations, self._placing)

    def _sides(self, key: Key) -> list[Key]:
        """The keys under which all sides of an operation recorded it, ``key`` included."""
        rank, kind, index = key
        if kind in _SENDS:
            source = self._placing.source(rank, kind)
            keys: list[Key] = [key] if source is None else [key, (source, _SENDS[kind][0], index)]
        else:
            keys = [(other, kind, index) for other in self._placing.members(rank, kind)]
        return [one for one in keys if one in self._starts]

    def _without_waiting(self, key: Key) -> Floats:
        """The time of an operation after the last of its sides had entered."""
        starts, lasts = self._starts[key], self._lasts[key]
        if key[1].endswith("-send"):
            return np.zeros_like(lasts)  # the receiver's time shows the transfer
        there = np.max([self._starts[one] for one in self._sides(key)], axis=0)
        return np.maximum(starts + lasts - np.maximum(there, starts), 0.0)

    def _before(self) -> dict[Key, set[Key]]:
        """For every operation, the operations that must have ended before it starts."""
        before: dict[Key, set[Key]] = {key: set() for key in self._starts}
        chains: dict[int, list[Key]] = defaultdict(list)
        for key in before:
            if not key[1].endswith(("-send", "-recv")):
                chains[key[0]].append(key)
        blocks = _Blocks(self._starts, self._lasts)
        previous: dict[Key, Key] = {}
        for chain in chains.values():
            chain.sort(key=lambda key: float(np.median(self._starts[key])))
            for first, second in itertools.pairwise(chain):
                before[second].add(first)
                previous[second] = first
        for key in before:
            kind = key[1]
            if kind in _SENDS:
                for sent in self._sides(key)[1:]:
                    before[key] |= blocks.that_sends(sent)
                for block in blocks.that_takes(key):
                    before[block].add(key)
            elif kind not in (*COMPUTE, "local"):
                for other in self._sides(key):
                    if other in previous:
                        before[key].add(previous[other])
        return before


class _Blocks:
    """Which block of computation a message comes from and goes to.

    They are matched by number where every block has a message; else (first and last stage of interleaved schedules) by
    time.
    """

    def __init__(self, starts: Mapping[Key, Floats], lasts: Mapping[Key, Floats]) -> None:
        self._blocks: dict[tuple[int, OperationKind], list[Key]] = defaultdict(list)
        for key in starts:
            if key[1] in COMPUTE:
                self._blocks[key[0], key[1]].append(key)
        self._counts = Counter((rank, kind) for rank, kind, _ in starts)
        self._start = {key: float(np.median(values)) for key, values in starts.items()}
        self._end = {key: float(np.median(starts[key] + lasts[key])) for key in starts}

    def that_sends(self, message: Key) -> set[Key]:
        """The block whose result is sent: the one that ends nearest to the send's start."""
        at = self._start[message]
        return self._first(message, lambda block: abs(self._end[block] - at))

    def that_takes(self, message: Key) -> set[Key]:
        """The block that begins next after the message has come."""
        least = self._end[message] - 1e-4
        return self._first(
            message, lambda block: self._start[block] if self._start[block] >= least else math.inf
        )

    def _first(self, message: Key, order: Callable[[Key], float]) -> set[Key]:
        """The block with the message's number where each block has a message; else the first in a finite order."""
        rank, kind, index = message
        blocks = self._blocks[rank, "forward" if kind.startswith("forward") else "backward"]
        if self._counts[rank, kind] == len(blocks):
            return {block for block in blocks if block[2] == index}
        first = min(blocks, key=order, default=None)
        return {first} if first is not None and math.isfinite(order(first)) else set()
