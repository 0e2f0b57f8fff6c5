"""How fast a job's devices are: how long replicas will take on other nodes, and which ranks the pace does not show.

A rank that turns slow behind a slower stage costs nothing until that stage is fast again. Agents that begin to watch
after a restart have seen no faster iterations. In both cases a slow rank is found by its time for a micro-batch,
compared with the other ranks of its stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import TYPE_CHECKING

from keepstep.control.cluster import Node
from keepstep.core.incident import Culprit
from keepstep.core.microbatch_shares import Split, equal_shares
from keepstep.core.slow_steps import SlowSteps
from keepstep.core.summary import PeerTraffic

if TYPE_CHECKING:
    from keepstep.control.incidents.slow_case import SlowCase
    from keepstep.control.incidents.slow_evidence import Healthy
    from keepstep.mitigate import Replicas

_SLOW = 1.2  # a rank is slow that takes so many times as long as the median rank of its stage
_LOOKS = 2  # successive looks that must find a rank slow
_MOST = 8  # ranks blamed at once


@dataclass(frozen=True, slots=True)
class Look:
    """What was measured of a slow job."""

    cases: Sequence[SlowCase]
    traffic: Sequence[PeerTraffic]
    replicas: Replicas | None
    healthy_s: float  # seconds of an iteration before the slowdown
    iteration_s: float  # how long an iteration takes now
    splits: Mapping[int, Split] = field(default_factory=dict[int, Split])
    # For a micro-batch, by rank; empty where ranks do not report how they divide micro-batches.
    seconds: Mapping[int, float] = field(default_factory=dict[int, float])
    stages: Mapping[int, int] | None = None  # pipeline stages by rank; None: not known
    # Bytes of an iteration by pair of nodes, from the operations of ranks.
    volumes: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    # In which iterations blamed ranks were the slow ones; None: not looked at.
    slow_steps: Mapping[int, SlowSteps] | None = None

    def may_be_moved(self, rank: int) -> bool:
        """Whether a blamed rank is the slow one steadily enough to move or exclude its node."""
        return self.slow_steps is None or (rank in self.slow_steps and self.slow_steps[rank].may_be_moved)


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one job, as measured before its nodes take other places."""

    # By node name, for each of its devices: its time for a micro-batch over the median of its stage.
    factors: Mapping[str, Sequence[float]]
    stage_s: Mapping[int, float]  # median time for a micro-batch, by stage
    stages: Mapping[int, int]  # pipeline stages by rank
    besides_s: float  # seconds of an iteration that are not spent on micro-batches

    @classmethod
    def of(cls, look: Look, nodes: Iterable[Node], saved_s: float) -> Devices | None:
        """The measured devices; None without measures. ``saved_s``: what a move will save besides micro-batches."""
        if look.replicas is None:
            return None
        times = times_as_long(look)
        factors = {
            node.name: [times[rank] for rank in sorted(node.ranks)]
            for node in nodes
            if times.keys() >= set(node.ranks)
        }
        besides_s = look.replicas.shared_s + median(look.replicas.fixed_s)
        return cls(factors, stage_seconds(look), look.stages or {}, max(besides_s - saved_s, 0.0))

    def replicas(self, nodes: Iterable[Node], splits: Mapping[int, Split]) -> Replicas:
        """How long the replicas will take on these nodes, with equal shares. A new node is assumed to be healthy."""
        from keepstep.mitigate import Replicas  # numpy is not in the controller's start

        first = next(iter(splits.values()))
        slowest = [0.0] * first.replicas
        for node in nodes:
            known = self.factors.get(node.name, ())
            for place, rank in enumerate(sorted(node.ranks)):
                factor = known[place] if place < len(known) else 1.0
                replica = splits[rank].replica
                slowest[replica] = max(slowest[replica], factor * self.stage_s[self.stages.get(rank, 0)])
        shares = equal_shares(first.count, first.replicas, first.multiple_of)
        return Replicas(tuple(shares), tuple(slowest), (0.0,) * first.replicas, self.besides_s)


class HealthyRanks:
    """What was seen of the ranks before a slowdown, with whatever shares they had then. ``stages``: None: not known."""

    def __init__(self) -> None:
        self.stages: Mapping[int, int] | None = None
        self._each_s: Mapping[int, float] = {}

    def learn(self, seen: Healthy, splits: Mapping[int, Split]) -> None:
        """Take what was seen while ranks had these shares."""
        self.stages = seen.stages
        self._each_s = {rank: own_s / _share(rank, splits) for rank, own_s in seen.own_s.items()}

    def own_s(self, splits: Mapping[int, Split]) -> dict[int, float]:
        """The own times that ranks would have with these shares, in seconds."""
        return {rank: each_s * _share(rank, splits) for rank, each_s in self._each_s.items()}


def _share(rank: int, splits: Mapping[int, Split]) -> int:
    return splits[rank].share if rank in splits else 1


def stage_seconds(look: Look) -> dict[int, float]:
    """The median seconds for a micro-batch by stage; of an even number of ranks, the lower one."""
    by_stage: dict[int, list[float]] = {}
    for rank, seconds in look.seconds.items():
        by_stage.setdefault((look.stages or {}).get(rank, 0), []).append(seconds)
    return {stage: median_low(times) for stage, times in by_stage.items()}


def times_as_long(look: Look) -> dict[int, float]:
    """By rank, its seconds for a micro-batch over the median of its stage."""
    middle = stage_seconds(look)
    return {
        rank: seconds / middle[(look.stages or {}).get(rank, 0)] for rank, seconds in look.seconds.items()
    }


@dataclass(slots=True)
class SlowRanks:
    """The slow ranks of one job. ``since``: by rank, the iteration at which it was first seen to be slow."""

    since: dict[int, int] = field(default_factory=dict[int, int])
    _looks: dict[int, int] = field(default_factory=dict[int, int])

    def found(
        self, look: Look, step: int, node_of: Mapping[int, str], blamed: Collection[str]
    ) -> tuple[Culprit, ...]:
        """Culprits: ranks that hold up their replica and were slow in successive looks, the last one at this step.

        ``blamed``: names of nodes that are blamed already; their ranks are left out.
        """
        slow = {rank: times for rank, times in _slow(look).items() if node_of.get(rank, "") not in blamed}
        self._looks = {rank: self._looks.get(rank, 0) + 1 for rank in slow}
        self.since = {rank: self.since.get(rank, step) for rank in slow}
        sure = sorted((rank for rank in slow if self._looks[rank] >= _LOOKS), key=lambda rank: -slow[rank])
        return tuple(
            Culprit(rank, None, node_of.get(rank, ""), "", round(slow[rank], 2), "medium", "compute")
            for rank in sorted(sure[:_MOST])
        )


def _slow(look: Look) -> dict[int, float]:
    """How many times as long the ranks take that hold up their replica, by rank; only slow ones."""
    slowest: dict[int, int] = {}  # rank by replica
    for rank, seconds in look.seconds.items():
        replica = look.splits[rank].replica
        if seconds > look.seconds.get(slowest.get(replica, -1), 0.0):
            slowest[replica] = rank
    times = times_as_long(look)
    return {rank: times[rank] for rank in slowest.values() if times[rank] >= _SLOW}


def evidence_of(culprits: Sequence[Culprit], look: Look) -> str:
    """Evidence: how long a micro-batch takes on the slow ranks."""
    told = [
        f"rank {one.rank} {1000 * look.seconds[one.rank]:.3g} ms" for one in culprits if one.rank is not None
    ]
    return f"a micro-batch takes {', '.join(told)}; {culprits[0].slowdown:.2g} × the middle rank of its stage"
