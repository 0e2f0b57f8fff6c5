"""What each seed of ``healthy-odd`` does: drawn alike by the plan and by the job itself."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.campaign.case import drawn, kind_of

NAME = "healthy-odd"
SILENT_S, MOVING_S = (20.0, 50.0), (60.0, 150.0)
SILENT = ("upload, answer", "rollout, file", "rollout, service")
MOVING = (
    "evaluation, loop",
    "evaluation, loader",
    "upload, pieces",
    "rollout, player",
    "slow storage",
    "compile",
    "garbage",
)
# What each kind draws from; "" is done to the rank from outside.
KINDS: dict[str, tuple[str, ...]] = {
    "evaluation": ("evaluation, loop", "evaluation, loader"),
    "upload": ("upload, answer", "upload, pieces"),
    "rollout": ("rollout, file", "rollout, service", "rollout, player"),
    "stop": ("",),
    "slow storage": ("slow storage",),
    "compile": ("compile",),
    "garbage": ("garbage",),
    "transformers": (*SILENT, *MOVING),
    "accelerate": (*SILENT, *MOVING),
    "lightning": (*SILENT, *MOVING),
    "deepspeed": (*SILENT, *MOVING),
    "fsdp2-offload": (*SILENT, *MOVING),
    "work-on": (*SILENT, *MOVING),  # one rank has ended, the others work for themselves
    "export": (*SILENT, *MOVING),  # all ranks but one have ended
}
# The script of a kind that has its own, and the package that it needs.
FRAMEWORKS = {
    "transformers": ("odd_transformers_job.py", "transformers"),
    "accelerate": ("odd_accelerate_job.py", "accelerate"),
    "lightning": ("odd_lightning_job.py", "lightning"),
    "deepspeed": ("odd_deepspeed_job.py", "deepspeed"),
    "fsdp2-offload": ("odd_fsdp_job.py", "torch"),
}


@dataclass(frozen=True)
class Odd:
    """One seed. ``rank`` does it after ``step``; of "work-on" it is the one that does not."""

    seed: int
    kind: str
    way: str
    nproc: int
    rank: int
    step: int
    steps: int
    seconds: float
    wait: str  # where the others wait: "barrier", "broadcast", "gradients"
    destroys: bool  # whether the group is destroyed at the end

    @property
    def chance(self) -> random.Random:
        """For what the way draws."""
        return drawn(f"{NAME}:way", self.seed)


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def draw(seed: int, installed: Callable[[str], bool] = is_installed) -> Odd:
    """The seed's own job; a kind whose package is not installed is drawn anew."""
    chance = drawn(NAME, seed)
    nproc = chance.randint(2, 4)
    rank, step = chance.randrange(nproc), chance.randint(20, 60)
    wait = chance.choice(("barrier", "broadcast", "gradients"))
    steps = step + 1 + chance.randint(20, 40)
    destroys = chance.random() < 0.5
    length = chance.random()
    kind = kind_of(NAME, seed, KINDS)
    if kind in FRAMEWORKS and not installed(FRAMEWORKS[kind][1]):
        kind = chance.choice([one for one in KINDS if one not in FRAMEWORKS or installed(FRAMEWORKS[one][1])])
    way = chance.choice(KINDS[kind])
    shortest, longest = MOVING_S if way in MOVING else SILENT_S
    seconds = round(shortest + length * (longest - shortest), 1)
    return Odd(seed, kind, way, nproc, rank, step, steps, seconds, wait, destroys)
