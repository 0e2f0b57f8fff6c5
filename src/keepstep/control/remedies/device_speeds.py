"""How fast a job's devices are, and so how long replicas will take once their ranks play on other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import TYPE_CHECKING

from keepstep.control.cluster import Node
from keepstep.control.remedies.moves import Look
from keepstep.core.microbatch_shares import Split, equal_shares

if TYPE_CHECKING:
    from keepstep.mitigate import Replicas


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one job, as measured before its nodes take other places.

    Attributes:
        factors: by node name, for each of its devices: its time for a micro-batch over the median of its stage.
        stage_s: that median, by stage.
        stages: pipeline stages by rank.
        besides_s: seconds of an iteration that are not spent on micro-batches.
    """

    factors: Mapping[str, Sequence[float]]
    stage_s: Mapping[int, float]
    stages: Mapping[int, int]
    besides_s: float

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
