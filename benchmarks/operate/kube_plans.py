"""What each seed of the bench in Kubernetes does. Nothing of it is told to keepstep or its operator."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Fault = Literal["healthy", "rank-killed", "hardware", "node-lost", "slow-node"]
FAULTS: tuple[Fault, ...] = ("hardware", "hardware", "hardware", "node-lost", "slow-node", "rank-killed")
_HEALTHY_EACH = 8  # of so many seeds one is healthy
_AWAY_OF = 4  # of so many hardware faults one comes while the API server is away


@dataclass(frozen=True, slots=True)
class KubePlan:
    """One seed. ``victim``: the node of this rank of nodes, from 0."""

    seed: int
    fault: Fault
    spare: bool
    nodes: int
    ranks: int  # of each node
    victim: int
    at_step: int
    api_away: bool  # for a minute, from just before the fault on

    @property
    def condition(self) -> str:
        """The condition that the victim's node is to get; empty: none, as where no spare stands in for a slow one."""
        found = {"hardware": "KeepstepHardware", "node-lost": "KeepstepLost", "slow-node": "KeepstepFailSlow"}
        return found.get(self.fault, "") if self.spare or self.fault != "slow-node" else ""

    @property
    def taint(self) -> str:
        """The key of the taint that it is to get; empty: none."""
        return {
            "KeepstepHardware": "keepstep.dev/hardware",
            "KeepstepLost": "keepstep.dev/lost",
            "KeepstepFailSlow": "keepstep.dev/fail-slow",
        }.get(self.condition, "")


def plan_of(seed: int) -> KubePlan:
    """What a seed does."""
    draw = random.Random(seed)
    fault = draw.choice(FAULTS) if seed % _HEALTHY_EACH else "healthy"
    nodes = draw.choice((2, 3))
    api_away = draw.randrange(_AWAY_OF) == 0 and fault == "hardware"
    return KubePlan(
        seed=seed,
        fault=fault,
        # While the API server is away only a spare can stand in for a node.
        spare=draw.random() < 0.7 or api_away,
        nodes=nodes,
        ranks=draw.choice((1, 2)),
        # The first node's controller moves when three nodes are there to agree, so that it is not lost here.
        victim=draw.randrange(1, nodes),
        at_step=draw.randint(8, 20),
        api_away=api_away,
    )
