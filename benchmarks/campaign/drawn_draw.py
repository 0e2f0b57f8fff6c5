"""What each seed of ``hang-drawn`` and ``healthy-drawn`` does: drawn alike by the plan and by the job itself."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.campaign.case import drawn, kind_of

HANG, HEALTHY = "hang-drawn", "healthy-drawn"
# The kinds of hangs, and what their incidents may be called.
HANGS = {
    "forward": ("hang",),
    "backward": ("hang",),
    "data": ("hang",),
    "optimizer": ("hang",),
    "checkpoint": ("hang",),
    "skip": ("hang", "desync"),
    "order": ("hang", "desync"),
}
PAUSES = ("checkpoint, marked", "checkpoint, unmarked", "evaluation", "first step")
LAYOUTS = ("ddp", "fsdp2", "dp x pp2")
PAUSE_S = 6.0


@dataclass(frozen=True)
class Drawn:
    """One seed: at ``step`` the rank does what ``kind`` says."""

    kind: str
    layout: str
    nproc: int
    rank: int
    step: int
    steps: int


def draw(name: str, seed: int) -> Drawn:
    """The seed's own job."""
    chance = drawn(name, seed)
    kind = kind_of(name, seed, HANGS if name == HANG else PAUSES)
    layout = kind_of(f"{name}:layout", seed, LAYOUTS)
    # Of two ranks that call differently nobody can tell which is right.
    sizes = (4, 8) if kind in ("skip", "order") or layout == "dp x pp2" else (2, 4, 8)
    nproc = chance.choice(sizes)
    if name == HEALTHY:
        return Drawn(kind, layout, nproc, 0, 0 if kind == "first step" else 12, 24)
    return Drawn(kind, layout, nproc, chance.randrange(nproc), chance.randint(15, 30), 10_000)
