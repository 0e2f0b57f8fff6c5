"""Jobs without training, in one process: what ranks have alike moves by drawn gradients, the rest as it may in a job.

A job of two to five ranks on one node or a node each. ``Shared`` parts have the same gradients on all ranks. Beside
them a job has, by chance, what differs by right: see `HABITS`. Nothing here tells the judge what was drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmarks.checkpoint.served import served
from benchmarks.corrupt.harness import Harness

from keepstep.core.incident import Incident

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "amsgrad": lambda ones: torch.optim.AdamW(ones, amsgrad=True),
    "momentum": lambda ones: torch.optim.SGD(ones, lr=0.01, momentum=0.9),
    "sgd": lambda ones: torch.optim.SGD(ones, lr=0.01),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}
DECAYED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "decayed momentum": lambda ones: torch.optim.SGD(ones, lr=0.01, momentum=0.9, weight_decay=1e-4),
    "decayed adam": lambda ones: torch.optim.Adam(ones, weight_decay=1e-2),
    "decayed sgd": lambda ones: torch.optim.SGD(ones, lr=0.01, weight_decay=1e-2),
}
"""Here weight decay is not decoupled: only bits of parameters are turned over, and none of the last."""

HABITS = (
    "batch norm",  # statistics of a rank's own data, and a count that one rank stops
    "synced statistics",  # the same on all ranks, until one rank evaluates in training mode
    "average",  # of the weights, the same on all ranks until one goes on alone
    "random states",  # the same on all ranks until one draws more
    "own part",  # trained by each rank on its own data, from the start
    "idle part",  # the same on all ranks, with zero gradients, until one rank uses it
    "idle for all",  # until every rank uses it
    "skipping part",  # whose optimizer steps only on the ranks that have data for it
    "thawed part",  # of what is shared, frozen at first
    "own rate",  # a rank's own learning rate for its own part
    "growing list",  # as long as a rank likes
    "apart",  # from some step on ranks train apart, and meet now and then
    "restart",  # all begin again
    "twice",  # a step is saved twice, or a save has several steps behind it
)


@dataclass
class Job:
    """What was drawn for a job."""

    ranks: int
    nodes: int
    kind: str
    sizes: list[int]
    habits: Sequence[str]
    steps: int
    seed: int
    at: dict[str, int] = field(default_factory=dict)  # the step at which a habit sets in
    who: dict[str, int] = field(default_factory=dict)  # the rank that it concerns
    of_own: str = "adamw"  # optimizer of what a rank trains alone


def drawn(chances: random.Random, steps: int, habits: int, kinds: list[str]) -> Job:
    """A job with so many of the habits."""
    ranks = chances.randint(2, 5)
    some = chances.sample(HABITS, habits)
    return Job(
        ranks,
        chances.choice((1, ranks)),
        chances.choice(kinds),
        [chances.randint(1, 40) for _ in range(chances.randint(3, 6))],
        some,
        steps,
        chances.randrange(1 << 30),
        {one: chances.randint(4, max(5, steps - 2)) for one in HABITS},
        {one: chances.randrange(ranks) for one in HABITS},
        chances.choice([*OPTIMIZERS, *DECAYED]),
    )


class Part:
    """Parameters with an optimizer of their own, moved by gradients that are drawn."""

    def __init__(self, sizes: list[int], kind: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.parameters = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
        self.optimizer = {**OPTIMIZERS, **DECAYED}[kind](self.parameters)

    def step(self, seed: int | None) -> None:
        """One step with the gradients of a seed; None: they are zero."""
        generator = torch.Generator().manual_seed(seed or 0)
        for one in self.parameters:
            if one.requires_grad:
                drawn = torch.randn(one.shape, generator=generator)
                one.grad = drawn if seed is not None else torch.zeros_like(one)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"weights": [one.detach() for one in self.parameters], "optimizer": self.optimizer}


class EngineRank:
    """One rank of such a job."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.shared = Part(job.sizes, job.kind, job.seed)
        self.alone = {
            name: Part([7, 3], job.of_own, job.seed + 1)
            for name in ("own part", "idle part", "idle for all", "skipping part", "own rate")
            if name in job.habits
        }
        self.kept: dict[str, Any] = {}
        if "batch norm" in job.habits:
            self.kept["batch norm"] = {"mean": torch.zeros(8), "count": torch.zeros((), dtype=torch.int64)}
        for name in ("synced statistics", "average"):
            if name in job.habits:
                self.kept[name] = torch.zeros(9)
        if "random states" in job.habits:
            self._random = torch.Generator().manual_seed(job.seed)
            self.kept["random states"] = self._random.get_state()
        if "thawed part" in job.habits:
            self.shared.parameters[0].requires_grad = False
        self.kept["list"] = [torch.zeros(1)]

    @property
    def state(self) -> dict[str, Any]:
        parts = {name: part.state() for name, part in self.alone.items()}
        return {"shared": self.shared.state(), "parts": parts, "kept": self.kept}

    def step(self, number: int) -> None:
        job, own = self.job, (number * 1009 + self.number) * 31 + 7
        begun = {name for name in job.habits if number >= job.at[name]}
        late = {name for name in begun if job.who[name] == self.number}
        if "thawed part" in begun:
            self.shared.parameters[0].requires_grad = True
        together = "apart" not in begun or (number - job.at["apart"]) % 5 == 4
        self.shared.step(number * 77 + job.seed if together else own)
        for name, part in self.alone.items():
            if name == "own rate":
                part.optimizer.param_groups[0]["lr"] = 0.001 * (self.number + 1)
                part.step(number)
            elif name == "idle part":
                part.step(own if name in late else None)
            elif name == "idle for all":
                part.step(own if name in begun else None)
            elif name == "own part" or (number + self.number) % 3:
                part.step(own)
        self._keep(number, own, late)

    def _keep(self, number: int, own: int, late: set[str]) -> None:
        if "batch norm" in self.kept:
            kept = self.kept["batch norm"]
            kept["mean"].lerp_(torch.randn(8, generator=torch.Generator().manual_seed(own)), 0.1)
            kept["count"] += "batch norm" not in late
        for name in ("synced statistics", "average"):
            if name in self.kept:
                seed = own if name in late else number
                self.kept[name].lerp_(torch.randn(9, generator=torch.Generator().manual_seed(seed)), 0.1)
        if "random states" in self.kept:
            torch.rand(2 if "random states" in late else 1, generator=self._random)
            self.kept["random states"] = self._random.get_state()
        if "growing list" in self.job.habits and own % 3 == 0 and len(self.kept["list"]) < 20:
            self.kept["list"].append(torch.zeros(1))


def trained(
    job: Job, before_save: Callable[[Harness[EngineRank], int], None] = lambda job, step: None
) -> tuple[Harness[EngineRank], int]:
    """The job when it is over, and how many saves it made."""
    with ExitStack() as stack:
        addresses = [stack.enter_context(served()) for _ in range(job.nodes)]
        harness = Harness(addresses, job.ranks // job.nodes, lambda number: EngineRank(job, number))
        saves = number = 0
        while number < job.steps:
            number += 1
            several = "twice" in job.habits and number % 4 == 0
            for rank in harness.ranks:
                rank.step(number)
                if several and number % 8 == 0:
                    rank.step(number + 100_000)
            before_save(harness, number)
            harness.save(number)
            saves += 1
            if several and number % 8 and number < job.steps:
                number += 1
                harness.save(number)
                saves += 1
            if "restart" in job.habits and number >= job.at["restart"] and not harness.incarnation:
                assert harness.restart() <= number
        harness.close()
    return harness, saves


def corrupt(harness: Harness[EngineRank]) -> list[Incident]:
    """The incidents of a wrong state."""
    return [one for one in harness.incidents.values() if one.kind == "corrupt"]
