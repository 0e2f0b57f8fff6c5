"""A training in which one rank gets stuck for good, once. Plain PyTorch on Gloo."""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.campaign.notes import Notes
from benchmarks.campaign.stuck_draw import draw
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

FOR_GOOD_S = 100_000


def deadlock() -> None:
    """Two threads, each with the lock that the other one wants."""
    mine, other = threading.Lock(), threading.Lock()
    held = threading.Event()

    def second() -> None:
        with other:
            held.set()
            with mine:
                pass

    with mine:
        threading.Thread(target=second, daemon=True).start()
        held.wait()
        with other:
            pass


def spin() -> None:
    """A loop whose end never comes."""
    waited = 0
    while waited >= 0:
        waited += 1


class Samples(IterableDataset[torch.Tensor]):
    """One a step; that of the step ``stuck_at`` never comes."""

    def __init__(self, steps: int, stuck_at: int, notes: Notes) -> None:
        self.steps, self.stuck_at, self.notes = steps, stuck_at, notes

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(self.steps):
            if step == self.stuck_at:
                self.notes.truth(step=step)
                time.sleep(FOR_GOOD_S)
            yield torch.randn(8, 64)


class Backward(torch.autograd.Function):
    """Where the backward gets stuck, when it is to."""

    stuck: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        if Backward.stuck:
            Backward.stuck()
        return gradients[0]


STUCK = {
    "lock": deadlock,
    "gil": lambda: ctypes.PyDLL(None).sleep(FOR_GOOD_S),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "spinning": spin,
    "data": lambda: time.sleep(FOR_GOOD_S),
}


def main() -> None:
    notes = Notes()
    drawn = draw(notes.seed)
    mine = notes.first and notes.rank == drawn.rank
    notes.began()
    if mine and drawn.kind == "set-up":
        notes.truth(step=-1)
        time.sleep(FOR_GOOD_S)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    in_the_loader = mine and drawn.kind == "loader"
    samples = Samples(drawn.steps, drawn.step if in_the_loader else -1, notes)
    loader = DataLoader(samples, batch_size=None, num_workers=1 if drawn.kind == "loader" else 0)

    def sleep_in_backward() -> None:
        notes.truth(step=drawn.step)
        time.sleep(FOR_GOOD_S)

    for step, x in enumerate(loader):
        now = mine and step == drawn.step
        if now and drawn.kind in STUCK:
            notes.truth(step=step)
            STUCK[drawn.kind]()
        optimizer.zero_grad()
        time.sleep(0.05)
        y = model(x)
        if drawn.kind == "backward":
            Backward.stuck = sleep_in_backward if now else None
            y = Backward.apply(y)
        y.mean().backward()
        optimizer.step()
        notes.step(step)
    dist.destroy_process_group()
    notes.done()


if __name__ == "__main__":
    main()
