"""Remedy S3: nodes exchange their ranks, and exchange them back when the cause is gone.

The exchange makes a slow link carry little, or brings slow nodes together in few replicas and stages. What goes over
which link, and how fast, agents read from the kernel's TCP counters. An idle link gives no speed reading, so agents
occasionally send a test load, sized to take 0.1 s on the slow link. Where the traffic is not TCP's, as with RDMA, the
devices at its ends send to each other instead, while all ranks are held for a moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING

from keepstep.control.incidents.case import Desk
from keepstep.control.remedies.device_speeds import Look
from keepstep.control.remedies.moves import Move, culprits_of, movable_culprits
from keepstep.core.errors import UsageError
from keepstep.core.incident import Culprit
from keepstep.core.summary import PathProbe, PeerTraffic
from keepstep.core.validation import Validation
from keepstep.validate.judge import SLOW_SHARE, link_speeds, link_transports
from keepstep.wire.messages import MOST_LOAD_BYTES

if TYPE_CHECKING:
    from keepstep.control.incidents.slow_case import SlowCase
    from keepstep.mitigate import Exchange, Remedy

TOPOLOGY = "S3, exchange of nodes"

_LEAST_BYTES = 65536  # the least traffic from which a speed is read
_ABOUT = 0.25  # a pair of nodes that sends this share of another's bytes sends about as much
_SLOW = 1.5  # a link is slow that takes so many times as long for a byte as a healthy one
_LOAD_S = 0.1  # time that a test load is to take on the slow link
_LEAST_LOAD_BYTES = 65536
_LOAD_EVERY_S, _SELDOM_S = 10.0, 60.0  # time between test loads: at first, and in the end
_OTHERS = 3  # pairs of nodes that the link is compared with
_FAST = 2.0  # a link that takes at most this many times the fastest compared pair is fast again
_TRIES = 3  # loads in a look: a busy host may delay one, but a slow link is not fast by chance
_LOOKS = 2  # successive looks that must find the link fast
# Time between tests on devices, at first and in the end: each one holds the job.
_HELD_EVERY_S, _MOST_EVERY_S = 60.0, 3600.0
# Nodes keep their new places for so long, twice as long each time that the link turns slow again.
_HOLD_S, _MOST_HOLD_S = 10.0, 1280.0

_Pair = tuple[int, int]
_Link = tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Paths:
    """The traffic of pairs of nodes (by rank), in its busier direction: bytes a second, and seconds for a byte."""

    rates: Mapping[_Pair, float]
    costs: Mapping[_Pair, float]

    def healthy(self, pair: _Pair) -> float:
        """The median seconds for a byte of other pairs that send about as much or more; 0 without any.

        Pairs that send little send short messages, whose time is mostly latency.
        """
        least = _ABOUT * self.rates.get(pair, 0.0)
        return median(
            [cost for one, cost in self.costs.items() if one != pair and self.rates[one] >= least] or [0.0]
        )


def paths_of(traffic: Sequence[PeerTraffic], rank_of: Mapping[str, int]) -> Paths:
    """The paths that agents have measured; ``rank_of``: node ranks by name."""
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


@dataclass(slots=True)
class _Done:
    """An exchange that was done. ``swaps``: pairs of node ranks; ``link``: the slow link, if that was the cause."""

    swaps: tuple[tuple[int, int], ...]
    link: tuple[str, str] | None
    load_bytes: int  # size of a test load; 0: the link is tested between devices
    hold_until_s: float
    every_s: float = _LOAD_EVERY_S
    next_s: float = 0.0
    fast: int = 0  # successive looks that found the link fast

    def is_due(self, now_s: float) -> bool:
        """Whether the nodes may go back, as far as this exchange is concerned."""
        return (self.link is None or self.fast >= _LOOKS) and now_s >= self.hold_until_s

    @property
    def gone(self) -> str:
        """How the cause is gone, in words."""
        return f"the link {' ↔ '.join(self.link)} is fast again" if self.link else "no node is slow any more"


class Relocation(Move):
    """The exchanges of nodes in one job."""

    name = TOPOLOGY

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self.back = 0  # exchanges that the present order takes back
        self._found: tuple[Exchange, _Link, int] | None = None
        self._done: list[_Done] = []
        self._holds: dict[_Link, float] = {}
        self._question: int | None = None
        self._others_s: float | None = None  # time of a load between other nodes, while the link is tested
        self._tries = 0

    @property
    def is_asking(self) -> bool:
        """Whether test loads are under way."""
        return self._question is not None

    def blames_link(self, cases: Sequence[SlowCase]) -> bool:
        """Whether a link between nodes of the job is blamed."""
        return self._blamed(cases) is not None

    def may_help(self, cases: Sequence[SlowCase]) -> bool:
        return self._blamed(cases) is not None or len(self._slow_nodes(culprits_of(cases))) > 1

    def remedy(self, look: Look) -> Remedy | None:
        self._found = None
        link = self._blamed(look.cases)
        return self._consolidation(look) if link is None else self._relief(link, look)

    def _consolidation(self, look: Look) -> Remedy | None:
        """The remedy that brings slow nodes together in few replicas, and there in few stages."""
        from keepstep.mitigate import Remedy, consolidation_of

        slow = self._slow_nodes(movable_culprits(look))
        if look.replicas is None or look.stages is None or len(slow) < 2:
            return None
        ranks = {rank: node.ranks for rank, node in self._desk.cluster.nodes.items()}
        try:
            exchange = consolidation_of(look.seconds, look.splits, look.stages, ranks, slow)
        except UsageError:  # what ranks report makes up no job, as when a stage of a replica is missing
            return None
        if exchange is None:
            return None
        self._found = exchange, None, 0
        split = next(iter(look.splits.values()))
        best_s = look.replicas.iteration_s(look.replicas.best(split.multiple_of, split.at_most))
        return Remedy(TOPOLOGY, self.pause_s, best_s * exchange.after_s / exchange.before_s)

    def _relief(self, link: tuple[str, str], look: Look) -> Remedy | None:
        """The remedy that leaves little traffic on a slow link."""
        from keepstep.mitigate import Remedy, best_exchange

        ranks = self._rank_of()
        of_devices = [one for one in look.traffic if one.over == "NCCL"]
        paths = paths_of(of_devices or look.traffic, ranks)
        one, other = sorted(ranks[name] for name in link)
        cost, healthy = paths.costs.get((one, other), 0.0), paths.healthy((one, other))
        carried = {pair: rate * look.iteration_s for pair, rate in paths.rates.items()}
        volume, load_bytes = look.volumes.get((one, other), 0.0), 0
        if carried.get((one, other), 0.0) < _ABOUT * volume:
            # The kernel does not count most of the traffic, as with RDMA: estimate the speed from the slowdown.
            times = max(found.slowdown for found in culprits_of(look.cases) if found.link is not None)
            if times < _SLOW:
                return None
            carried = look.volumes
            healthy = max(look.iteration_s - look.healthy_s, 0.0) / (volume * (times - 1))
            cost = healthy * times
        elif cost > 0 and not of_devices:
            load_bytes = min(max(round(_LOAD_S / cost), _LEAST_LOAD_BYTES), MOST_LOAD_BYTES)
        if healthy <= 0 or cost < _SLOW * healthy:
            return None
        exchange = best_exchange(len(ranks), carried, healthy, {(one, other): cost})
        if exchange is None:
            return None
        self._found = exchange, link, load_bytes
        # The measured time is a sum over a node's connections, but these send at the same time.
        after_s = max(look.iteration_s - exchange.before_s + exchange.after_s, look.healthy_s)
        return Remedy(TOPOLOGY, self.pause_s, after_s)

    def told(self) -> str:
        assert self._found is not None
        swaps = ", ".join(" and ".join(self._names(swap)) for swap in self._found[0].swaps)
        return f"{swaps} take each other's ranks"

    def is_done(self, exchanged: bool) -> bool:
        return exchanged

    def settled(self, now_s: float) -> None:
        """Note that the order was carried out: an exchange, or one back."""
        if self.back:
            del self._done[-self.back :]
        elif self._found is not None:
            exchange, link, load_bytes = self._found
            hold_s = self._holds.get(link, _HOLD_S)
            self._holds[link] = min(2 * hold_s, _MOST_HOLD_S)
            done = _Done(exchange.swaps, link, load_bytes, now_s + hold_s)
            if not load_bytes:
                done.every_s, done.next_s = _HELD_EVERY_S, now_s + max(hold_s, _HELD_EVERY_S)
            self._done.append(done)
        self.back, self._found, self._question = 0, None, None

    def take_back(self, now_s: float) -> tuple[str, str] | None:
        """Have nodes go back to their former places where the cause is gone. Call it while the job is healthy.

        The last exchange goes first, and with it those before it whose cause is gone, too. Returns what is ordered, in
        words, and why that is refused ("" if it is not); None: nothing is ordered.
        """
        if not self._done or self._question is not None or self.is_ordered:
            return None
        if not self._stands(self._done[-1]):
            self._done.pop()
            return None
        due = list(takewhile(lambda one: one.is_due(now_s) and self._stands(one), reversed(self._done)))
        if not due:
            self.probe(now_s)
            return None
        takers = _takers([swap for one in due for swap in one.swaps])
        if not takers:  # they undo each other
            del self._done[-len(due) :]
            return None
        why = "; ".join(dict.fromkeys(one.gone for one in due))
        refused = self._desk.rank_moves.exchange(takers, why, now_s)
        self.back, self._ordered_s = (0, None) if refused else (len(due), now_s)
        for one in due:
            one.fast = 0
        *first, other = sorted(self._names(takers))
        return f"{', '.join(first)} and {other} take their ranks back: {why}", refused

    def probe(self, now_s: float) -> None:
        """Test, when it is time, whether the link that nodes have left is fast again.

        It is tested while something else is slow, too: then the nodes can go back as soon as nothing is.
        """
        left = self._left()
        if left is None or self._question is not None or self.is_ordered or now_s < left.next_s:
            return
        assert left.link is not None
        if not set(left.link) <= self._rank_of().keys():
            return
        if not left.load_bytes:
            self._test_devices(left, left.link, now_s)
            return
        left.next_s = now_s + left.every_s
        left.every_s = min(1.5 * left.every_s, _SELDOM_S)
        self._others_s, self._tries = None, 0
        self._question = self._desk.agents.ask_probes(self._others(left.link), now_s, left.load_bytes)

    def probed(self, question: int, probes: Sequence[PathProbe], now_s: float) -> None:
        """Take the times of test loads: first between other nodes, then over the link."""
        last = self._left()
        if question != self._question or last is None:
            return
        self._question = None
        took_s = _load_s(probes)
        if self._others_s is None:
            if not 0 < took_s < math.inf:
                return
            self._others_s = took_s
        else:
            self._tries += 1
            is_fast = 0 < took_s <= _FAST * self._others_s
            if is_fast or self._tries == _TRIES or took_s > _LOAD_S / 2:
                last.fast = last.fast + 1 if is_fast else 0
                if last.fast == 1:
                    last.every_s = _LOAD_EVERY_S  # look again soon
                    last.next_s = min(last.next_s, now_s + last.every_s)
                return
        assert last.link is not None
        self._question = self._desk.agents.ask_probes([last.link], now_s, last.load_bytes)

    def _test_devices(self, left: _Done, link: tuple[str, str], now_s: float) -> None:
        """Have devices at the link's ends send to each other, and others to compare with, while all ranks are held."""
        ranks = {node.name: node.ranks for node in self._desk.cluster.nodes.values()}
        if not all(ranks[name] for name in ranks):
            return  # they have not told yet which they are
        groups = [(min(ranks[one]), min(ranks[other])) for one, other in (link, *self._others(link))]
        tell = partial(self._tested, left, groups[0])
        if self._desk.validations.begin(groups, tell, lambda: self.is_ordered, now_s):
            left.next_s = now_s + left.every_s
            left.every_s = min(2 * left.every_s, _MOST_EVERY_S)

    def _tested(
        self, left: _Done, ends: _Pair, outcome: Validation | None, refused: str, now_s: float
    ) -> None:
        """Take what the test has measured: the link is fast if it is about as fast as the others, both ways."""
        figures = outcome.figures if outcome is not None else ()
        ways = link_transports(figures)
        speeds = {pair: speed for pair, speed in link_speeds(figures).items() if ways[pair] == "nccl"}
        own = [speeds.get(pair, 0.0) for pair in (ends, (ends[1], ends[0]))]
        others = [speed for pair, speed in speeds.items() if set(pair) != set(ends)]
        left.fast = left.fast + 1 if others and min(own) >= SLOW_SHARE * median(others) else 0
        if left.fast == 1:
            left.every_s = _LOAD_EVERY_S
            left.next_s = min(left.next_s, now_s + left.every_s)

    def _stands(self, one: _Done) -> bool:
        """Whether the job still has all nodes of an exchange, and both ends of its link."""
        ranks = self._rank_of()
        places = {place for swap in one.swaps for place in swap}
        return places <= set(ranks.values()) and set(one.link or ()) <= ranks.keys()

    def _left(self) -> _Done | None:
        """The last exchange whose cause was a link."""
        return next((one for one in reversed(self._done) if one.link), None)

    def begun_again(self) -> bool:
        self._question = None  # the agents that were asked are gone
        return super().begun_again()

    def _have_done(self, now_s: float) -> str:
        assert self._found is not None
        exchange, link, _ = self._found
        why = "slow nodes are in several replicas or stages"
        if link:
            why = f"the link {' ↔ '.join(link)} is slow"
        return self._desk.rank_moves.exchange(_takers(exchange.swaps), why, now_s)

    def _blamed(self, cases: Sequence[SlowCase]) -> tuple[str, str] | None:
        """The first blamed link between nodes of the job, by node names."""
        ranks = self._rank_of()
        links = (one.link.nodes for one in culprits_of(cases) if one.link is not None)
        return next((one for one in links if set(one) <= ranks.keys() and one[0] != one[1]), None)

    def _slow_nodes(self, culprits: Sequence[Culprit]) -> dict[int, float]:
        """How many times as long the blamed nodes take, by node rank."""
        ranks = self._rank_of()
        found: dict[int, float] = {}
        for one in culprits:
            if one.rank is not None and one.confidence != "low" and one.slowdown > 1 and one.node in ranks:
                node = ranks[one.node]
                found[node] = max(found.get(node, 1.0), one.slowdown)
        return found

    def _others(self, link: tuple[str, str]) -> list[tuple[str, str]]:
        """Disjoint pairs of nodes to compare the link with; away from its ends, where there are such nodes."""
        names = sorted(self._rank_of(), key=lambda name: (name in link, name))
        apart = [name for name in names if name not in link]
        pairs = list(zip(apart[::2], apart[1::2], strict=False))[:_OTHERS]
        return pairs or [(names[0], names[-1])]


def _takers(swaps: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Which node takes each place after these swaps, done one after the other; only places that change."""
    at: dict[int, int] = {}
    for one, other in swaps:
        at[one], at[other] = at.get(other, other), at.get(one, one)
    return {place: node for place, node in at.items() if place != node}


def _load_s(probes: Sequence[PathProbe]) -> float:
    """Time of a load on the fastest pair, in the slower direction; 0: not known, infinite: it did not arrive."""
    pairs: dict[tuple[str, str], float] = {}
    for one in probes:
        pair = min(one.source, one.target), max(one.source, one.target)
        pairs[pair] = max(pairs.get(pair, 0.0), one.load_s if one.outcome == "echo" else math.inf)
    return min(pairs.values(), default=0.0)
