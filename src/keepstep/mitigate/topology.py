"""Which nodes should exchange their ranks so that slow links carry little (remedy S3; GREYHOUND §5.3, FALCON §5).

The places of ranks in the job's layout fix what these send to each other; which node plays which place decides which
link carries it. So two nodes exchange all their ranks: the traffic between places stays the same on other links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.core.errors import UsageError

_MOST_LOOKED_AT = 100_000  # partial assignments after which the search ends; before, it is exact
_MOST_PLACES = 64  # places that are tried for a node, those with the least traffic
_ALIKE = 1.01  # times that differ by a smaller factor count as equal, so that fewer nodes move


@dataclass(frozen=True, slots=True)
class Exchange:
    """Which nodes take each other's places, and what that does to the slowest link, or to the iteration."""

    swaps: tuple[tuple[int, int], ...]  # pairs of node ranks; no node is in two
    # Time of the slowest link for the traffic of an iteration; where nodes are slow, of the iteration.
    before_s: float
    after_s: float  # what `before_s` becomes with these swaps
    bound_s: float  # no disjoint swaps lead to a time more than 2 % below this one


def best_exchange(
    nodes: int,
    traffic: Mapping[tuple[int, int], float],
    seconds_per_byte: float,
    slow_links: Mapping[tuple[int, int], float],
) -> Exchange | None:
    """The fewest swaps after which the slowest link takes the least time, to within 2 %; None when none helps.

    All sets of disjoint swaps are searched, by branch and bound over the nodes that have slow links. With more than 64
    nodes, only the 64 places with the least traffic and a node's own place are tried. After 100,000 partial assignments
    (tens of slow links) the search ends with the best one so far; then ``bound_s`` says how much better another set
    could be.

    ``traffic``: bytes in an iteration by pair of node ranks; the two directions are summed. ``seconds_per_byte``: of a
    healthy link. ``slow_links``: the same by pair of node ranks. Raises UsageError where a number is negative or not
    finite, or a pair is none of two of the job's ``nodes``.
    """
    load = _by_pair(nodes, traffic, "traffic")
    links = _by_pair(nodes, slow_links, "slow links")
    if not 0 <= seconds_per_byte < math.inf:
        raise UsageError(f"seconds for a byte: {seconds_per_byte} is no time")
    search = _Search(nodes, load, seconds_per_byte, links)
    before_s = search.best_s
    search.assign(0, {}, search.healthy_s, [])
    if not search.best:
        return None
    bound_s = search.best_s if search.is_exact else min(search.floor_s(), search.best_s)
    return Exchange(tuple(search.best), before_s, search.best_s, bound_s)


def _by_pair(nodes: int, given: Mapping[tuple[int, int], float], what: str) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for (one, other), value in given.items():
        if not (0 <= one < nodes and 0 <= other < nodes and one != other and 0 <= value < math.inf):
            raise UsageError(
                f"{what}: ({one}, {other}): {value} is no number of two of the node ranks 0 to {nodes - 1}"
            )
        pair = (min(one, other), max(one, other))
        found[pair] = found.get(pair, 0.0) + value if what == "traffic" else max(found.get(pair, 0.0), value)
    return found


class _Search:
    """The search: gives each node with slow links its own place or another's, beginning with the worst nodes."""

    def __init__(
        self,
        count: int,
        load: Mapping[tuple[int, int], float],
        healthy: float,
        links: Mapping[tuple[int, int], float],
    ) -> None:
        self._load, self._links = load, links
        # Time of the slowest link if all were healthy.
        self.healthy_s = max(load.values(), default=0.0) * healthy
        self._heaviest = dict.fromkeys(range(count), 0.0)  # traffic of each place's busiest link
        for pair, carried in load.items():
            for place in pair:
                self._heaviest[place] = max(self._heaviest[place], carried)
        self._mine: dict[int, dict[int, float]] = {}  # seconds for a byte by node and other end
        for (one, other), seconds in links.items():
            self._mine.setdefault(one, {})[other] = seconds
            self._mine.setdefault(other, {})[one] = seconds
        self._order = sorted(self._mine, key=lambda node: (-sum(self._mine[node].values()), node))
        self._places = sorted(range(count), key=lambda place: (self._heaviest[place], place))[:_MOST_PLACES]
        self.is_exact = count <= _MOST_PLACES
        self.best: list[tuple[int, int]] = []
        self.best_s = self.healthy_s
        for node in self._order:
            self.best_s = self._rise(node, node, {one: one for one in self._order}, self.best_s)
        self._least_s = self.best_s
        self._looked_at = 0

    def floor_s(self) -> float:
        """A time that no exchange can come below: that of the slowest link with the least traffic."""
        count = len(self._heaviest)
        least = min(self._load.values(), default=0.0) if 2 * len(self._load) == count * (count - 1) else 0.0
        return max(self.healthy_s, max(self._links.values(), default=0.0) * least)

    def assign(self, depth: int, at: dict[int, int], so_far_s: float, swaps: list[tuple[int, int]]) -> None:
        """Try all places for the remaining nodes. ``at``: decided places by node; ``so_far_s``: the time with these."""
        if depth == len(self._order):
            if self._is_better(so_far_s, len(swaps)):
                self.best, self.best_s = list(swaps), so_far_s
                self._least_s = min(self._least_s, so_far_s)
            return
        node = self._order[depth]
        if node in at:  # another node has taken its place
            self.assign(depth + 1, at, so_far_s, swaps)
            return
        for cost_s, place in sorted(self._options(node, at, so_far_s)):
            self._looked_at += 1
            if self._looked_at > _MOST_LOOKED_AT:
                self.is_exact = False
                return
            if place == node:
                if cost_s <= self.best_s * _ALIKE:
                    self.assign(depth + 1, {**at, node: node}, cost_s, swaps)
                continue
            then = {**at, node: place, place: node}
            if place in self._mine:  # the slow links of that place's node move with it
                cost_s = self._rise(place, node, then, cost_s)
            if self._is_better(cost_s, len(swaps) + 1):
                self.assign(depth + 1, then, cost_s, [*swaps, (min(node, place), max(node, place))])

    def _is_better(self, cost_s: float, swaps: int) -> bool:
        fewer = swaps < len(self.best) and cost_s <= self._least_s * _ALIKE
        return fewer or cost_s * _ALIKE < self.best_s

    def _options(self, node: int, at: Mapping[int, int], so_far_s: float) -> list[tuple[float, int]]:
        free = [place for place in {node: 0, **dict.fromkeys(self._places, 0)} if place not in at]
        return [(self._rise(node, place, at, so_far_s), place) for place in free]

    def _rise(self, node: int, place: int, at: Mapping[int, int], so_far_s: float) -> float:
        """The time of the slowest decided link, once this node is at that place."""
        worst = so_far_s
        for other, seconds in self._mine[node].items():
            if other in at and at[other] != place:
                there = at[other]
                worst = max(worst, self._load.get((min(place, there), max(place, there)), 0.0) * seconds)
        return worst
