"""Which nodes should exchange their ranks so that slow ones delay little (remedy S3; GREYHOUND §5.2, FALCON §5.3).

The time of an iteration is modelled like this. A rank of stage *s* on a node that is *f* times slow takes
``stages[s] * f`` for a micro-batch, and a stage of a replica is as slow as its slowest rank. A pipeline is filled once,
by a micro-batch that passes all stages; each further one takes as long as the slowest stage. Replicas run in parallel,
with the shares that `allocate_microbatches` gives them (S2); so slow nodes should be in few replicas, and there in few
stages. Where replicas synchronise in each micro-batch, shares are equal and a stage is as slow as its slowest rank in
any replica: then slow nodes should be in few stages, as in the papers. These prefer inner stages, because the first and
the last have more to do; here that follows from ``stages``, and it decides between equally good exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from keepstep.core.errors import UsageError
from keepstep.core.microbatch_shares import Split, objection
from keepstep.mitigate.allocation import allocate_microbatches
from keepstep.mitigate.topology import Exchange

_MOST_LOOKED_AT = 120_000  # places of slow nodes after which each search ends; before, it is exact
_ALIKE = 1.01  # times that differ by a smaller factor count as equal, so that fewer nodes move

_Seconds = npt.NDArray[np.float64]
_Part = tuple[int, int]  # a replica and a stage in it
_Mark = tuple[float, int]  # the slowness of the node at a place, and whether that is decided (1) or not (0)
_State = tuple[tuple[int, _Mark], ...]  # of a block: the kinds of its places that are taken, and their marks


def consolidation_of(
    seconds: Mapping[int, float], splits: Mapping[int, Split], stage_of: Mapping[int, int],
    ranks_of: Mapping[int, Sequence[int]], slow: Mapping[int, float],
) -> Exchange | None:  # fmt: skip
    """The `best_consolidation` of a measured job; None, too, where something of it is not known.

    The time of a stage on a healthy node is the median of its ranks, each divided by the slowness of its node.
    ``seconds``: measured for a micro-batch, by rank (`rank_seconds`). ``stage_of``: pipeline stages 0, 1, … by rank;
    empty where there is no pipeline. ``slow``: how many times as long a node takes, by node rank.
    """
    stage_of = stage_of or dict.fromkeys(splits, 0)
    node_of = {rank: node for node, ranks in ranks_of.items() for rank in ranks}
    known = splits.keys() & stage_of.keys() & seconds.keys()
    if not node_of or node_of.keys() - known or sorted(ranks_of) != list(range(len(ranks_of))):
        return None
    times: dict[int, list[float]] = {}
    for rank, node in node_of.items():
        times.setdefault(stage_of[rank], []).append(seconds[rank] / slow.get(node, 1.0))
    if sorted(times) != list(range(len(times))):
        return None
    by_node = [ranks_of[node] for node in sorted(ranks_of)]
    places = [[(splits[rank].replica, stage_of[rank]) for rank in ranks] for ranks in by_node]
    stages = [median(times[stage]) for stage in sorted(times)]
    exchange = best_consolidation(places, stages, slow, splits[next(iter(node_of))])
    if exchange is None:
        return None
    # A node blamed for one device has others that are fast, and a node may have become fast again.
    devices = [[seconds[rank] / stages[stage_of[rank]] for rank in ranks] for ranks in by_node]
    before_s = _measured_s(places, stages, devices, splits)
    for one, other in exchange.swaps:
        devices[one], devices[other] = devices[other], devices[one]
    if any(len(there) != len(parts) for there, parts in zip(devices, places, strict=True)):
        return None
    after_s = _measured_s(places, stages, devices, splits)
    if after_s * _ALIKE >= before_s:
        return None
    return Exchange(exchange.swaps, before_s, after_s, min(exchange.bound_s, after_s))


def _measured_s(
    places: Sequence[Sequence[_Part]], stages: Sequence[float], devices: Sequence[Sequence[float]],
    splits: Mapping[int, Split],
) -> float:  # fmt: skip
    """The time of an iteration. ``devices``: how many times as long each device of each node takes."""
    split = next(iter(splits.values()))
    times = np.zeros((split.replicas if split.movable else 1, len(stages)), np.float64)
    for parts, factors in zip(places, devices, strict=True):
        for (replica, stage), factor in zip(parts, factors, strict=True):
            row = replica if split.movable else 0
            times[row, stage] = max(times[row, stage], stages[stage] * factor)
    slowest: _Seconds = times.max(axis=1)
    return _dealt(slowest, times.sum(axis=1) - slowest, split)


def _dealt(slowest: _Seconds, rest: _Seconds, split: Split) -> float:
    """The time of an iteration with fitting shares. Of each replica: seconds for a micro-batch, and besides."""
    if split.movable:
        bounds = split.count, split.multiple_of, split.at_most or None
        shares = np.array(allocate_microbatches(slowest.tolist(), *bounds, fixed_seconds=rest.tolist()))
    else:
        units = -(-split.count // (split.multiple_of * split.replicas))  # the largest of equal shares
        shares = np.array([units * split.multiple_of])
    return float((rest + shares * slowest).max())


def best_consolidation(
    places: Sequence[Collection[_Part]], stages: Sequence[float], slow: Mapping[int, float], split: Split
) -> Exchange | None:
    """The fewest swaps after which an iteration takes the least time, to within 1 %; None when less is saved.

    All sets of disjoint swaps with a slow node in each are searched, by branch and bound; those that differ only by
    like replicas, places or nodes are looked at once. After 120,000 places of slow nodes (20,000 partial assignments of
    six) the search ends with the best one so far; then ``bound_s`` is a time that no exchange comes below.

    Args:
        places: by node rank, the replica and stage of each of its ranks; a tensor group may be named once or often.
        stages: seconds for a micro-batch of each stage on a healthy node.
        slow: how many times as long a node takes, by node rank; above 1.
        split: from any rank.

    Raises UsageError: a number is impossible, a node has no rank, or a stage of a replica is on no node.
    """
    _check(places, stages, slow, split)
    search = _Search(places, stages, slow, split)
    before_s = search.least_s
    search.find_least()
    if search.least_s * _ALIKE >= before_s:
        return None
    is_exact = search.is_exact
    search.find_fewest()
    if not search.swaps:
        return None
    return Exchange(search.swaps, before_s, search.after_s, search.least_s if is_exact else search.floor_s)


def _check(
    places: Sequence[Collection[_Part]], stages: Sequence[float], slow: Mapping[int, float], split: Split
) -> None:
    if why := objection(split.count, split.replicas, split.multiple_of, split.at_most):
        raise UsageError(why)
    if not stages or not all(0 < seconds < math.inf for seconds in stages):
        raise UsageError(f"seconds for a micro-batch of each stage: {list(stages)} are none")
    for node, factor in slow.items():
        if not (0 <= node < len(places) and 1 <= factor < math.inf):
            raise UsageError(
                f"slow node {node}, {factor} times: the job has node ranks 0 to {len(places) - 1}, "
                "factors are 1 or more"
            )
    told: set[_Part] = set()
    for node, parts in enumerate(places):
        if not parts:
            raise UsageError(f"node {node} has no rank")
        told.update(parts)
    for replica, stage in told:
        if not (0 <= replica < split.replicas and 0 <= stage < len(stages)):
            raise UsageError(
                f"replica {replica}, stage {stage}: there are {split.replicas} and {len(stages)}"
            )
    if len(told) < split.replicas * len(stages):
        raise UsageError(f"{split.replicas} replicas of {len(stages)} stages: no node has some of these")


@dataclass(frozen=True, slots=True)
class _Shape:
    """The shape of a block, which is replicas that share nodes. ``kinds``: the parts on each kind of place."""

    replicas: int
    kinds: tuple[tuple[_Part, ...], ...]
    many: tuple[int, ...]  # number of places of each kind


class _Blocks:
    """Which replicas share nodes, and which of these blocks are alike."""

    def __init__(self, places: Sequence[Collection[_Part]], replicas: int) -> None:
        leader = list(range(replicas))

        def first_of(one: int) -> int:
            while leader[one] != one:
                leader[one] = one = leader[leader[one]]
            return one

        parts = [sorted(set(one)) for one in places]
        for one in parts:
            for replica, _ in one:
                low, high = sorted((first_of(one[0][0]), first_of(replica)))
                leader[high] = low
        number: dict[int, int] = {}  # by replica, its number within the block
        members: dict[int, list[int]] = {}
        for replica in range(replicas):
            mates = members.setdefault(first_of(replica), [])
            number[replica] = len(mates)
            mates.append(replica)
        by_kind: dict[int, dict[tuple[_Part, ...], list[int]]] = {}
        for place, one in enumerate(parts):
            kind = tuple((number[replica], stage) for replica, stage in one)
            by_kind.setdefault(first_of(one[0][0]), {}).setdefault(kind, []).append(place)
        known: dict[_Shape, int] = {}
        self.shape_of: list[int] = []  # number of the shape, by block
        self.places: list[list[list[int]]] = []  # places by block and kind
        self.home: dict[int, _Part] = {}  # block and kind by place
        for block, (first, kinds) in enumerate(sorted(by_kind.items())):
            ordered = sorted(kinds.items())
            shape = _Shape(
                len(members[first]), tuple(k for k, _ in ordered), tuple(len(p) for _, p in ordered)
            )
            self.shape_of.append(known.setdefault(shape, len(known)))
            self.places.append([at for _, at in ordered])
            for kind, (_, at) in enumerate(ordered):
                self.home.update(dict.fromkeys(at, (block, kind)))
        self.shapes = list(known)
        self.of_shape = [[b for b, s in enumerate(self.shape_of) if s == one] for one in range(len(known))]


class _Iteration:
    """The time of an iteration, depending on where the slow nodes are."""

    def __init__(self, blocks: _Blocks, stages: Sequence[float], split: Split) -> None:
        self._blocks, self._stages, self._split = blocks, stages, split
        first = 0
        self._first: list[int] = []  # index of the first replica of each block of equal pipelines
        for shape in blocks.shape_of:
            self._first.append(first)
            first += blocks.shapes[shape].replicas
        self._slowest: _Seconds = np.full(first, max(stages), np.float64)
        self._rest: _Seconds = np.full(first, sum(stages) - max(stages), np.float64)
        self._known: dict[tuple[tuple[int, _State], ...], float] = {}

    def seconds(self, at: tuple[tuple[int, _State], ...]) -> float:
        """The time of an iteration. ``at``: shapes and states of the blocks that have slow nodes."""
        if at in self._known:
            return self._known[at]
        slowest, rest = np.array(self._slowest, np.float64), np.array(self._rest, np.float64)
        used: dict[int, int] = {}
        for shape, state in at:
            block = self._blocks.of_shape[shape][used.get(shape, 0)]
            used[shape] = used.get(shape, 0) + 1
            for place, times in enumerate(self._of_block(self._blocks.shapes[shape], state)):
                slowest[self._first[block] + place] = max(times)
                rest[self._first[block] + place] = sum(times) - max(times)
        self._known[at] = _dealt(slowest, rest, self._split)
        return self._known[at]

    def floor_s(self, factors: Sequence[float]) -> float:
        """The least time of an iteration with these factors, each in a block of its own."""
        slowest = np.array(self._slowest, np.float64)
        slowest[: len(factors)] = np.maximum(slowest[: len(factors)], np.array(factors) * min(self._stages))
        return _dealt(slowest, self._rest, self._split)

    def _of_block(self, shape: _Shape, state: _State) -> list[list[float]]:
        """The seconds of each stage, for each replica of a block."""
        factors = [[1.0] * len(self._stages) for _ in range(shape.replicas)]
        for kind, (factor, _) in state:
            for replica, stage in shape.kinds[kind]:
                factors[replica][stage] = max(factors[replica][stage], factor)
        return [[a * b for a, b in zip(one, self._stages, strict=True)] for one in factors]


class _Search:
    """The search: gives each slow node its own place or another's, beginning with the slowest."""

    def __init__(
        self, places: Sequence[Collection[_Part]], stages: Sequence[float], slow: Mapping[int, float], split: Split
    ) -> None:  # fmt: skip
        if not split.movable:  # each stage is as slow as its slowest rank, as with a single replica
            places = [{(0, stage) for _, stage in parts} for parts in places]
        self._slow = {node: factor for node, factor in slow.items() if factor > 1}
        self._blocks = _Blocks(places, split.replicas if split.movable else 1)
        self._iteration = _Iteration(self._blocks, stages, split)
        self._order = sorted(self._slow, key=lambda node: (-self._slow[node], node))
        ends = {0, len(stages) - 1}
        self._outer = [any(stage in ends for _, stage in parts) for parts in places]
        self.swaps: tuple[tuple[int, int], ...] = ()
        self.least_s = self.after_s = self._cost_s(dict(self._slow))
        most = max(sum(shape.many) for shape in self._blocks.shapes)
        crowded = [self._slow[node] for node in self._order[::most]]  # a block has at most ``most`` places
        self.floor_s = max([self._iteration.floor_s(crowded), *map(self._floor_of, self._order)])

    def find_least(self) -> None:
        """Search for the least time, ``least_s``."""
        self._search(math.inf, None)

    def find_fewest(self) -> None:
        """Search for the fewest swaps close to the least time; of these, the fewest slow nodes in outer stages."""
        self._search(self.least_s * _ALIKE, (len(self._order) + 1, 0, 0.0))

    def _search(self, limit_s: float, best: tuple[int, int, float] | None) -> None:
        self._limit_s, self._best = limit_s, best
        self.is_exact, self._looked_at = True, 0
        self._seen: dict[object, int] = {}
        self._descend(0, {}, [], 0)

    def _floor_of(self, node: int) -> float:
        """The least time of an iteration with this slow node alone, over all places for it."""
        factor = self._slow[node]
        every = (at[0] for kinds in self._representative(set()) for at in kinds)
        return min(self._cost_s({place: factor}) for place in every)

    def _descend(self, depth: int, at: dict[int, float], swaps: list[tuple[int, int]], outer: int) -> None:
        """Try all places for the remaining nodes. ``at``: decided factors by place; 1: a slow node has left it."""
        while depth < len(self._order) and any(self._order[depth] in pair for pair in swaps):
            depth += 1
        slow_at = {place: factor for place, factor in at.items() if factor > 1}
        if depth == len(self._order):
            self._arrived(self._cost_s(slow_at), swaps, outer)
            return
        node = self._order[depth]
        options: list[tuple[float, bool, int, int]] = []
        for place in self._options(node, at, depth):
            then = {**slow_at, place: self._slow[node]}
            if place in self._slow and place != node:
                then[node] = self._slow[place]
            self._looked_at += len(self._order)
            options.append((self._cost_s(then), place != node, self._outer[place], place))
        for cost_s, _, _, place in sorted(options):
            then_swaps, then_outer = swaps, outer + self._outer[place]
            then = {**at, place: self._slow[node]}
            if place != node:
                then_swaps = [*swaps, (min(node, place), max(node, place))]
                then[node] = self._slow.get(place, 1.0)
                then_outer += self._outer[node] if place in self._slow else 0
            if not self._may_be_best(cost_s, len(then_swaps), then_outer):
                continue
            key = self._states({**self._undecided(depth + 1, then_swaps), **self._decided(then)})
            if self._seen.get(key, math.inf) <= len(then_swaps):
                continue
            self._seen[key] = len(then_swaps)
            if self._looked_at > _MOST_LOOKED_AT:
                self.is_exact = False
                return
            self._descend(depth + 1, then, then_swaps, then_outer)

    def _may_be_best(self, cost_s: float, swaps: int, outer: int) -> bool:
        if self._best is None:
            return max(cost_s, self.floor_s) < self.least_s * (1 - 1e-9)
        return cost_s <= self._limit_s and (swaps, outer, cost_s) < self._best

    def _arrived(self, cost_s: float, swaps: list[tuple[int, int]], outer: int) -> None:
        if not self._may_be_best(cost_s, len(swaps), outer):
            return
        if self._best is None:
            self.least_s = cost_s
        else:
            self._best = len(swaps), outer, cost_s
        self.swaps, self.after_s = tuple(sorted(swaps)), cost_s

    def _options(self, node: int, at: Mapping[int, float], depth: int) -> list[int]:
        """The places to try: its own, those of undecided slow nodes, and one of each set of like others."""
        others = [one for one in self._order[depth:] if one not in at and self._slow[one] < self._slow[node]]
        taken = {**{one: (self._slow[one], 0) for one in self._order[depth:]}, **self._decided(at)}
        touched = {self._blocks.home[place][0] for place in taken}
        found: dict[object, int] = {}
        states = self._by_block(taken)
        for block in sorted(touched):
            like = self._blocks.shape_of[block], states[block]
            for kind, places in enumerate(self._blocks.places[block]):
                free = next((place for place in places if place not in taken), None)
                if free is not None:
                    found.setdefault((like, kind), free)
        free_ones = [places[0] for kinds in self._representative(touched) for places in kinds]
        return [node, *others, *found.values(), *free_ones]

    def _representative(self, touched: Collection[int]) -> list[list[list[int]]]:
        """For each shape, the places by kind of the first block that is not touched."""
        firsts = (
            next((block for block in alike if block not in touched), None) for alike in self._blocks.of_shape
        )
        return [self._blocks.places[block] for block in firsts if block is not None]

    def _decided(self, at: Mapping[int, float]) -> dict[int, _Mark]:
        return {place: (factor, 1) for place, factor in at.items()}

    def _undecided(self, depth: int, swaps: list[tuple[int, int]]) -> dict[int, _Mark]:
        gone = {node for pair in swaps for node in pair}
        return {node: (self._slow[node], 0) for node in self._order[depth:] if node not in gone}

    def _by_block(self, marks: Mapping[int, _Mark]) -> dict[int, _State]:
        found: dict[int, list[tuple[int, _Mark]]] = {}
        for place, mark in marks.items():
            block, kind = self._blocks.home[place]
            found.setdefault(block, []).append((kind, mark))
        return {block: tuple(sorted(state)) for block, state in found.items()}

    def _states(self, marks: Mapping[int, _Mark]) -> tuple[tuple[int, _State], ...]:
        """A key that is equal for situations that differ only by like blocks, places and nodes."""
        shape_of = self._blocks.shape_of
        return tuple(sorted((shape_of[block], state) for block, state in self._by_block(marks).items()))

    def _cost_s(self, slow_at: Mapping[int, float]) -> float:
        return self._iteration.seconds(self._states(self._decided(slow_at)))
