"""Remedy S3: nodes exchange their ranks, so that a slow link carries little.

What goes over which link, and how fast, is what agents read from the kernel's TCP counters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from keepstep.control.desk import Desk
from keepstep.core.summary import PeerTraffic

if TYPE_CHECKING:
    from keepstep.control.slow_case import SlowCase
    from keepstep.mitigate import Exchange, Remedy

TOPOLOGY = "S3, exchange of nodes"

_PAUSE_S = 5.0  # what it costs, before one was measured
_LEAST_BYTES = 65536  # less tells no speed
_ABOUT = 0.25  # of the bytes: as much as another pair sends, about
_SLOW = 1.5  # times as long for a byte as on a healthy link
_ORDERED_S = 180.0  # an order that has had no effect for so long has none

_Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Paths:
    """What nodes (by rank) send to each other: bytes a second and seconds for a byte, the busier way of each pair."""

    rates: Mapping[_Pair, float]
    costs: Mapping[_Pair, float]

    def healthy(self, pair: _Pair) -> float:
        """Seconds for a byte of the middle one of the other pairs that send about as much; 0: there is none.

        Who sends little sends short messages, whose time is mostly that of the way there and back.
        """
        least = _ABOUT * self.rates.get(pair, 0.0)
        return median(
            [cost for one, cost in self.costs.items() if one != pair and self.rates[one] >= least] or [0.0]
        )


def paths_of(traffic: Sequence[PeerTraffic], rank_of: Mapping[str, int]) -> Paths:
    """From what agents tell; ``rank_of``: node ranks by name."""
    node_of = {one.source: one.node for one in traffic}
    sums: dict[_Pair, list[float]] = {}
    for one in traffic:
        ends = rank_of.get(one.node), rank_of.get(node_of.get(one.target, ""))
        if ends[0] is None or ends[1] is None or ends[0] == ends[1] or one.after_s <= 0:
            continue
        row = sums.setdefault((ends[0], ends[1]), [0.0] * 3)
        values = (one.after_bytes, one.after_busy_s, one.after_bytes / one.after_s)
        for place, value in enumerate(values):
            row[place] += value
    rates: dict[_Pair, float] = {}
    costs: dict[_Pair, float] = {}
    for (one, other), (sent, busy_s, rate) in sums.items():
        pair = (min(one, other), max(one, other))
        rates[pair] = max(rates.get(pair, 0.0), rate)
        if sent >= _LEAST_BYTES:
            costs[pair] = max(costs.get(pair, 0.0), busy_s / sent)
    return Paths(rates, costs)


class Relocation:
    """Of one job."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._pause_s = _PAUSE_S
        self._found: tuple[Exchange, tuple[str, str]] | None = None
        self._ordered_s: float | None = None

    @property
    def is_ordered(self) -> bool:
        """The job is about to begin again with other places."""
        return self._ordered_s is not None

    def remedy(
        self, cases: Sequence[SlowCase], traffic: Sequence[PeerTraffic], iteration_s: float
    ) -> Remedy | None:
        """What an exchange would do about the slow link that is blamed; None: there is none, or none helps."""
        from keepstep.mitigate import Remedy, best_exchange

        self._found = None
        ranks = {node.name: rank for rank, node in self._desk.cluster.nodes.items()}
        blamed = (one for case in cases if case.incident for one in case.incident.culprits)
        links = (one.link.nodes for one in blamed if one.link is not None)
        link = next((one for one in links if set(one) <= ranks.keys() and one[0] != one[1]), None)
        if link is None:
            return None
        paths = paths_of(traffic, ranks)
        one, other = sorted(ranks[name] for name in link)
        cost, healthy = paths.costs.get((one, other), 0.0), paths.healthy((one, other))
        if healthy <= 0 or cost < _SLOW * healthy:
            return None
        carried = {pair: rate * iteration_s for pair, rate in paths.rates.items()}
        exchange = best_exchange(len(ranks), carried, healthy, {(one, other): cost})
        if exchange is None:
            return None
        self._found = exchange, link
        return Remedy(TOPOLOGY, self._pause_s, max(iteration_s - exchange.before_s + exchange.after_s, 0.0))

    def told(self) -> str:
        """The exchange that `remedy` spoke of, in words."""
        assert self._found is not None
        names = {rank: node.name for rank, node in self._desk.cluster.nodes.items()}
        return ", ".join(f"{names[one]} and {names[other]}" for one, other in self._found[0].swaps)

    def order(self, now_s: float) -> str:
        """Have it done; why not, or ""."""
        assert self._found is not None
        exchange, link = self._found
        refused = self._desk.exchange(exchange.swaps, f"the link {link[0]} ↔ {link[1]} is slow", now_s)
        self._ordered_s = None if refused else now_s
        return refused

    def tick(self, now_s: float) -> str:
        """Why an order has come to nothing, or ""."""
        if self._ordered_s is None or now_s - self._ordered_s < _ORDERED_S:
            return ""
        self._ordered_s = None
        return "not all ranks sealed a step"

    def begun_again(self) -> bool:
        """The job was formed anew; whether an exchange was to be expected."""
        was_ordered, self._ordered_s = self._ordered_s is not None, None
        return was_ordered
