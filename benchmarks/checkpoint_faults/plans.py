"""What happens in each seed of `nodes.py`, drawn before it runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

from benchmarks.checkpoint_faults.campaign import moment
from benchmarks.checkpoint_faults.job import Phase

NODES = 4

When = Literal["phase", "transfer", "ring", "link", "storage"]


@dataclass(frozen=True)
class Loss:
    """Nodes that are lost at once, ``after_s`` seconds after ``when`` has come about, and return ``away_s`` later.

    Attributes:
        nodes: by node rank.
        when: "phase": rank ``rank`` is in ``phase``, at the earliest ``steps`` steps after the first step was backed
            up; "transfer": the first node's agent gives or gets a state; "ring": the loss before is made good again;
            "link": the fault of the link has begun; "storage": so many folders of steps are on storage.
        silent: their links go first, so that nobody gets a last packet.
    """

    nodes: tuple[int, ...]
    when: When
    after_s: float
    away_s: float
    silent: bool
    rank: int = 0
    phase: Phase = Phase.SAVE
    steps: int = 0


@dataclass(frozen=True)
class LinkFault:
    """From a node to the next one, ``steps`` steps after the first step was backed up.

    Attributes:
        node: whose ranks' states its agent gives to the next.
        rate: of what is left, as tc writes it; "": nothing passes.
        all_traffic: of the two nodes, both ways, and not only the states that the node's agent gives.
        lasts_s: at the longest until the lost node returns.
    """

    node: int
    rate: str
    all_traffic: bool
    lasts_s: float
    steps: int


@dataclass(frozen=True)
class Plan:
    """One seed. ``rate``: bytes a second that a node gives for backups, 0: any."""

    losses: tuple[Loss, ...]
    per_node: int = 1
    rate: int = 0
    link: LinkFault | None = None
    storage: bool = False

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return NODES * self.per_node


class _Shape(TypedDict):
    """What a `Plan` has of the job."""

    per_node: int
    rate: int


def _shape(chances: random.Random) -> _Shape:
    return {
        "per_node": chances.choice((1,) * 7 + (2,)),
        "rate": chances.choice((0, 0, 40_000_000, 15_000_000)),
    }


def _loss(chances: random.Random, when: When, after_s: float, nodes: Sequence[int] = (), **more: Any) -> Loss:
    """``away_s``: less and more than what a node may be away without being lost."""
    chosen = tuple(nodes) or (chances.randrange(NODES),)
    return Loss(chosen, when, after_s, chances.uniform(0, 5), chances.random() < 0.3, **more)


def _while_saving(phase: Phase, count: int = 1) -> Callable[[random.Random], Plan]:
    def plan(chances: random.Random) -> Plan:
        shape = _shape(chances)
        first = chances.randrange(NODES)
        nodes = (first, (first + 2) % NODES)[:count]  # not neighbours
        rank = chances.randrange(NODES * shape["per_node"])
        steps = chances.randint(1, 12)
        loss = _loss(chances, "phase", moment(chances), nodes, rank=rank, phase=phase, steps=steps)
        return Plan((loss,), **shape)

    return plan


def _while_backed_up(chances: random.Random) -> Plan:
    shape: _Shape = {**_shape(chances), "rate": chances.choice((8_000_000, 20_000_000))}
    return Plan((_loss(chances, "transfer", 10 ** chances.uniform(-4, 0)),), **shape)


def _while_restoring(chances: random.Random) -> Plan:
    shape: _Shape = {
        **_shape(chances),
        "rate": chances.choice((40_000_000, 15_000_000)),
    }  # so that it takes a while
    first = _loss(chances, "phase", moment(chances), phase=Phase.SEAL, steps=chances.randint(1, 6))
    if chances.random() < 0.7:
        rank = first.nodes[0] * shape["per_node"]
        after_s = 10 ** chances.uniform(-4, -0.7)
        second = _loss(chances, "phase", after_s, first.nodes, rank=rank, phase=Phase.RESTORE)
        second = replace(second, silent=False)  # to take the link away takes longer than a restore
    else:
        neighbour = (first.nodes[0] + chances.choice((-1, 1))) % NODES
        second = _loss(chances, "ring", 10 ** chances.uniform(-4, 0), (neighbour,))
    return Plan((first, second), **shape)


def _while_persisting(chances: random.Random) -> Plan:
    after_s, folders = 10 ** chances.uniform(-4, -0.5), chances.randint(2, 4)  # the one before is whole
    return Plan(
        (_loss(chances, "storage", after_s, steps=folders),), chances.choice((1,) * 7 + (2,)), storage=True
    )


def _with_link(cut: bool) -> Callable[[random.Random], Plan]:
    def plan(chances: random.Random) -> Plan:
        shape, everything = _shape(chances), chances.random() < 0.3
        rates = ("200mbit", "500mbit") if everything else ("5mbit", "20mbit", "80mbit")
        node = chances.randrange(NODES)
        link = LinkFault(
            node,
            "" if cut else chances.choice(rates),
            everything,
            chances.uniform(0.5, 5),
            chances.randint(1, 6),
        )
        nodes = [chances.choice((node, node, (node + 1) % NODES, (node + 2) % NODES))]
        return Plan((_loss(chances, "link", chances.uniform(0.3, 5), nodes),), link=link, **shape)

    return plan


CASES: dict[str, Callable[[random.Random], Plan]] = {
    "node-at-save": _while_saving(Phase.SAVE),
    "node-at-seal": _while_saving(Phase.SEAL),
    "node-at-backup": _while_backed_up,
    "node-at-restore": _while_restoring,
    "node-at-persist": _while_persisting,
    "two-nodes": _while_saving(Phase.SEAL, 2),
    "link-cut": _with_link(cut=True),
    "link-slow": _with_link(cut=False),
}
