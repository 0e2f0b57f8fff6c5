"""How fast a job's devices are, compared with others that do the same, and so what replicas take on other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import TYPE_CHECKING

from keepstep.control.cluster import Node
from keepstep.control.remedies.moves import Look
from keepstep.core.microbatches import Split, equal_shares

if TYPE_CHECKING:
    from keepstep.mitigate import Replicas


@dataclass(frozen=True, slots=True)
class Devices:
    """Of one job, before its nodes take other places.

    ``factors``: how many times as long each takes for a micro-batch as the middle one of its stage, by node and place
    there. ``stage_s``: what that one takes. ``besides_s``: what an iteration takes besides micro-batches.
    """

    factors: Mapping[str, Sequence[float]]
    stage_s: Mapping[int, float]
    stages: Mapping[int, int]
    besides_s: float

    @classmethod
    def of(cls, look: Look, nodes: Iterable[Node], saved_s: float) -> Devices | None:
        """As they were measured; None: they were not. ``saved_s``: of what iterations take besides micro-batches."""
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
        """What they take on these nodes, with equal shares. A node that is new is taken for one like most."""
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
    """What the middle rank of each stage takes for a micro-batch; of an even number, the faster one of two."""
    by_stage: dict[int, list[float]] = {}
    for rank, seconds in look.seconds.items():
        by_stage.setdefault((look.stages or {}).get(rank, 0), []).append(seconds)
    return {stage: median_low(times) for stage, times in by_stage.items()}


def times_as_long(look: Look) -> dict[int, float]:
    """How many times as long each rank takes for a micro-batch as the middle one of its stage."""
    middle = stage_seconds(look)
    return {
        rank: seconds / middle[(look.stages or {}).get(rank, 0)] for rank, seconds in look.seconds.items()
    }
