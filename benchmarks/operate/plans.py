"""What each seed of the bench does. Nothing of it is told to keepstep."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Fault = Literal["healthy", "rank-killed", "launcher-killed", "node-lost", "slow-node", "python-error"]
FAULTS: tuple[Fault, ...] = (
    *("rank-killed", "launcher-killed", "node-lost", "node-lost", "slow-node", "python-error"),
)
_HEALTHY_EACH = 6  # of so many seeds one is healthy


@dataclass(frozen=True, slots=True)
class Plan:
    """One seed. ``victim``: the place of the node among those that train, from 0."""

    seed: int
    fault: Fault
    spare: bool
    user: Literal["root", "nobody"]
    nodes: int
    ranks: int  # of each node
    victim: int
    at_step: int

    @property
    def is_replaced(self) -> bool:
        """Whether a spare has to take the node's ranks."""
        return self.spare and self.fault in ("node-lost", "slow-node")

    @property
    def is_drained(self) -> bool:
        """Whether Slurm has to keep other jobs from the node: of a slow one, once a spare has its ranks."""
        return self.user == "root" and (
            self.fault == "node-lost" or (self.fault == "slow-node" and self.spare)
        )

    @property
    def is_requeued(self) -> bool:
        """Whether the job has to end with 75 and start again."""
        return self.fault == "node-lost" and not self.spare


def plan_of(seed: int) -> Plan:
    """What a seed does. The node that hosts the controller and the batch script is never lost or slow."""
    draw = random.Random(seed)
    fault = draw.choice(FAULTS) if seed % _HEALTHY_EACH else "healthy"
    nodes = draw.choice((2, 3))
    return Plan(
        seed=seed,
        fault=fault,
        spare=draw.random() < 0.5,
        user=draw.choice(("root", "nobody")),
        nodes=nodes,
        ranks=draw.choice((1, 2)),
        victim=draw.randrange(1 if fault in ("node-lost", "slow-node") else 0, nodes),
        at_step=draw.randint(8, 20),
    )
