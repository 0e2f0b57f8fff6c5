"""What happens in each seed of `faults.py`, drawn before it runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.checkpoint_faults.campaign import moment
from benchmarks.checkpoint_faults.job import Phase

MEMBERS = 3  # nodes that train

Kind = Literal["node", "rank", "cut", "slow"]


@dataclass(frozen=True)
class Event:
    """What is done, ``after_s`` seconds after rank ``rank`` has come to ``phase``.

    Attributes:
        kind: "node": hosts are lost with all that runs there; "rank": SIGKILL; "cut": nothing passes between two hosts
            for ``lasts_s``; "slow": that long the host's link gives 10 Mbit/s.
        nodes: by node rank; of "cut" two.
        rank: whose phase it is, and who is killed.
        steps: to be made since the job began (anew) before that; of RESTORE: none.
        silent: the link goes first, so that nobody gets a last packet.
        returns_s: after so long the lost hosts are there again, empty; below 0: never.
    """

    kind: Kind
    nodes: tuple[int, ...]
    rank: int
    phase: Phase
    after_s: float
    steps: int = 0
    silent: bool = False
    lasts_s: float = 0.0
    returns_s: float = -1.0


@dataclass(frozen=True)
class Plan:
    """One seed. ``standbys``, ``backups``: as the launcher's flags have it."""

    events: tuple[Event, ...]
    spares: int
    per_node: int = 1
    standbys: int = 0
    backups: int = 1

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return MEMBERS * self.per_node


_PHASES = (Phase.TRAIN, Phase.SAVE, Phase.SEAL, Phase.STEP)


def _shape(chances: random.Random) -> dict[str, int]:
    per_node = chances.choice((1, 1, 2))
    return {"per_node": per_node, "standbys": chances.choice((0, 1)) * per_node}


def _lose(
    chances: random.Random, nodes: tuple[int, ...], per_node: int, phase: Phase, returns_s: float = -1.0
) -> Event:
    return Event(
        "node",
        nodes,
        chances.randrange(MEMBERS * per_node),
        phase,
        moment(chances),
        chances.randint(2, 8),
        chances.random() < 0.3,
        returns_s=returns_s,
    )


def _kill(chances: random.Random, world: int, phase: Phase, steps: int) -> Event:
    rank = chances.randrange(world)
    return Event("rank", (), rank, phase, moment(chances, -2.5), steps)


def _node_killed(spares: int, first: int, count: int = 1) -> Callable[[random.Random], Plan]:
    """``first``: 0 where the controller's node may be lost, too."""

    def plan(chances: random.Random) -> Plan:
        shape = _shape(chances)
        nodes = tuple(sorted(chances.sample(range(first, MEMBERS), count)))
        returns_s = -1.0 if spares else chances.uniform(0, 8)
        lost = _lose(chances, nodes, shape["per_node"], chances.choice(_PHASES), returns_s)
        return Plan((lost,), spares, **shape, backups=count)  # of three nodes, any two are neighbours

    return plan


def _controllers_node(chances: random.Random) -> Plan:
    shape = _shape(chances)
    return Plan((_lose(chances, (0,), shape["per_node"], chances.choice(_PHASES)),), 1, **shape)


def _while_recovering(chances: random.Random) -> Plan:
    """A second one fails while the first failure is recovered from: of the same node, of another, of a rank."""
    shape = _shape(chances)
    world = MEMBERS * shape["per_node"]
    nodes = chances.sample(range(1, MEMBERS), 2)
    first = _lose(chances, (nodes[0],), shape["per_node"], chances.choice(_PHASES))
    if chances.random() < 0.5:
        rank = nodes[1] * shape["per_node"]
        after_s = 10 ** chances.uniform(-4, 0)
        second = Event("node", (nodes[1],), rank, Phase.RESTORE, after_s, silent=False)
    else:
        second = Event("rank", (), chances.randrange(world), Phase.RESTORE, 10 ** chances.uniform(-4, -1))
    return Plan((first, second), 2, **shape, backups=2)  # what the first backed up is not backed up again yet


def _in_the_step(chances: random.Random) -> Plan:
    shape = _shape(chances)
    world = MEMBERS * shape["per_node"]
    count = chances.choice((1, 2))
    return Plan(
        tuple(_kill(chances, world, Phase.STEP, chances.randint(2, 8)) for _ in range(count)), 0, **shape
    )


def _link(kind: Kind) -> Callable[[random.Random], Plan]:
    def plan(chances: random.Random) -> Plan:
        shape = _shape(chances)
        nodes = tuple(chances.sample(range(MEMBERS), 2))
        rank = chances.randrange(MEMBERS * shape["per_node"])
        event = Event(kind, nodes, rank, chances.choice(_PHASES), moment(chances), 4, lasts_s=5.0)
        return Plan((event,), 1, **shape)

    return plan


CASES: dict[str, Callable[[random.Random], Plan]] = {
    "node-killed-spare": _node_killed(1, first=1),
    "node-killed-returns": _node_killed(0, first=1),
    "node-slow": _link("slow"),
    "controllers-node-killed": _controllers_node,
    "two-nodes-killed": _node_killed(2, first=1, count=2),
    "failure-while-recovering": _while_recovering,
    "failure-in-the-step": _in_the_step,
    "link-cut-5-s": _link("cut"),
}
