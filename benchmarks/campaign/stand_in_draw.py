"""What each seed of the campaign on the stand-in GPU does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.campaign.case import drawn, kind_of
from benchmarks.stand_in.faults import Fault, Phase

NAME = "drawn, stand-in-nccl"
FRAMEWORKS = "drawn frameworks, stand-in-nccl"
PORTS = "pairs with ports, stand-in-nccl"  # of four nodes, whose ports of InfiniBand tell which pair it is
SLOW = ("slow x1.3", "slow x2", "slow x4", "two slow", "slow early")
PAIR, CUT = "slow pair", "cut pair"
# Faults that stop the job, and what their incidents may be called.
HANGS = {
    "hang forward": ("hang",),
    "hang backward": ("hang",),
    "hang data": ("hang",),
    "hang optimizer": ("hang",),
    "hang checkpoint": ("hang",),
    "skip": ("hang", "desync"),
    "order": ("hang", "desync"),
    "never ends": ("hang",),
    CUT: ("hang",),
}
HEALTHY = ("checkpoint", "evaluation", "first step")
KINDS = (*SLOW, PAIR, *HANGS, *HEALTHY)
LAYOUTS = ("ddp", "fsdp2", "pipeline")
FRAMEWORK_LAYOUTS = ("megatron", "deepspeed")
EARLY = (0, 3, 8, 12)  # onsets of those that are slow from the start
HISTORY = 32  # steps after which a rank's own past is the measure, and not its peers
PAUSE_S = 6.0
_AFTER = 25  # steps after the onset of what does not stop the job
_FOR_GOOD = 10_000
# Steps until recorders note when devices begin calls, by the number of ranks, which decides how long steps take.
_LATE = {2: (40, 50), 4: (30, 38), 8: (24, 30)}
_FACTORS = (1.3, 2.0, 4.0)
_PERCENT = (300, 700, 1500)  # by which a pair is slower


@dataclass(frozen=True)
class Drawn:
    """One seed."""

    kind: str
    layout: str
    ranks: int
    nodes: int
    steps: int
    faults: tuple[Fault, ...]

    @property
    def culprits(self) -> list[int]:
        """The ranks to name; none where a pair is to blame, or nobody."""
        blames_ranks = self.kind not in (PAIR, CUT, *HEALTHY)
        return sorted(fault.rank for fault in self.faults) if blames_ranks else []

    @property
    def step(self) -> int:
        """When it begins."""
        return self.faults[0].step

    @property
    def is_virtual(self) -> bool:
        """Whether the device's clock is counted. What stops a job, or pauses, takes its time on a wall."""
        return self.kind in (*SLOW, PAIR)


def draw(seed: int) -> Drawn:
    """The seed's own job."""
    return _draw(NAME, seed, LAYOUTS)


def draw_frameworks(seed: int) -> Drawn:
    """The seed's own job in a layout that a framework makes."""
    return _draw(FRAMEWORKS, seed, FRAMEWORK_LAYOUTS)


def _draw(name: str, seed: int, layouts: Sequence[str]) -> Drawn:
    chance = drawn(name, seed)
    kind = kind_of(name, seed, KINDS)
    layout = kind_of(f"{name}:layout", seed, layouts)
    # Of two ranks that call differently, or are slow both, nobody can tell which is right.
    many = kind in ("skip", "order", "two slow") or layout in ("pipeline", "megatron")
    ranks = chance.choice((4, 8) if many else (2, 4, 8))
    nodes = 1
    if kind in (PAIR, CUT):
        nodes = chance.choice([one for one in (2, 4) if one <= ranks])
    steps, faults = _FAULTS[_sort(kind)](chance, kind, layout, ranks, nodes)
    return Drawn(kind, layout, ranks, nodes, steps, faults)


def draw_with_ports(seed: int) -> Drawn:
    """The seed's own job of four ranks on four nodes with ports."""
    chance = drawn(PORTS, seed)
    kind = kind_of(PORTS, seed, (PAIR, CUT))
    layout = kind_of(f"{PORTS}:layout", seed, LAYOUTS)
    steps, faults = _pair(chance, kind, layout, 4, 4)
    return Drawn(kind, layout, 4, 4, steps, faults)


def _sort(kind: str) -> str:
    return "hang" if kind.startswith("hang") else "slow" if kind in SLOW else kind


def _slow(
    chance: random.Random, kind: str, layout: str, ranks: int, nodes: int
) -> tuple[int, tuple[Fault, ...]]:
    which = chance.sample(range(ranks), 2 if kind == "two slow" else 1)
    onset = chance.choice(EARLY) if kind == "slow early" else chance.randint(HISTORY, HISTORY + 8)
    told = kind.removeprefix("slow x")
    factor = float(told) if told != kind else chance.choice(_FACTORS)
    return onset + _AFTER, tuple(Fault("slow", rank=rank, step=onset, value=factor) for rank in which)


def _pair(
    chance: random.Random, kind: str, layout: str, ranks: int, nodes: int
) -> tuple[int, tuple[Fault, ...]]:
    """Two ranks on different nodes that send each other more than a norm."""
    on_node = ranks // nodes
    pairs = [
        (one, other)
        for one in range(ranks)
        for other in range(ranks)
        if one // on_node != other // on_node and _are_partners(layout, one, other)
    ]
    rank, peer = chance.choice(pairs)
    if kind == CUT:
        return _FOR_GOOD, (Fault("cut", rank=rank, peer=peer, step=chance.randint(*_LATE[ranks])),)
    onset = chance.randint(HISTORY, HISTORY + 8)
    percent = chance.choice(_PERCENT)
    return onset + _AFTER, (Fault("slow-pair", rank=rank, peer=peer, step=onset, value=percent),)


def _are_partners(layout: str, one: int, other: int) -> bool:
    """Whether two ranks exchange more than a norm."""
    if layout == "pipeline":  # stages of one replica, or replicas of one stage
        return one // 2 == other // 2 or one % 2 == other % 2
    if layout == "megatron":  # all but one are the same: tensor-parallel rank, replica, stage
        return one ^ other in (1, 2, 4)
    return True


def _hang(
    chance: random.Random, kind: str, layout: str, ranks: int, nodes: int
) -> tuple[int, tuple[Fault, ...]]:
    phases: dict[str, Phase] = {
        "hang forward": "forward", "hang backward": "backward", "hang data": "data",
        "hang optimizer": "optimizer", "hang checkpoint": "checkpoint",
    }  # fmt: skip
    fault = Fault("hang", rank=chance.randrange(ranks), step=chance.randint(10, 20), where=phases[kind])
    return _FOR_GOOD, (fault,)


def _called(
    chance: random.Random, kind: str, layout: str, ranks: int, nodes: int
) -> tuple[int, tuple[Fault, ...]]:
    what = "skip" if kind == "skip" else "order"
    return _FOR_GOOD, (Fault(what, rank=chance.randrange(ranks), step=chance.randint(10, 20)),)


def _never_ends(
    chance: random.Random, kind: str, layout: str, ranks: int, nodes: int
) -> tuple[int, tuple[Fault, ...]]:
    where: Phase = chance.choice(("forward", "backward"))
    step = chance.randint(*_LATE[ranks])
    return _FOR_GOOD, (Fault("never-ends", rank=chance.randrange(ranks), step=step, where=where),)


def _healthy(
    chance: random.Random, kind: str, layout: str, ranks: int, nodes: int
) -> tuple[int, tuple[Fault, ...]]:
    if kind == "first step":
        fault = Fault("slow-host", rank=0, step=0, until=1, where="forward", value=PAUSE_S)
    elif kind == "evaluation":
        fault = Fault("evaluate", rank=0, step=10, where="checkpoint", value=PAUSE_S)
    else:
        # Marked by what writes it, or a pause that nothing marks.
        what = chance.choice(("save", "slow-host"))
        fault = Fault(what, rank=0, step=10, until=11, where="checkpoint", value=PAUSE_S)
    return 22, (fault,)


_FAULTS = {
    "slow": _slow, PAIR: _pair, CUT: _pair, "hang": _hang, "skip": _called, "order": _called,
    "never ends": _never_ends, **dict.fromkeys(HEALTHY, _healthy),
}  # fmt: skip
