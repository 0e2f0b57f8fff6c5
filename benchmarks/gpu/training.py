"""Trainings of the bench's jobs, and how long their steps take with something and without it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from benchmarks.stand_in.device import is_stand_in
from torch import nn


class Training(NamedTuple):
    """A model under DDP, and its step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def training(device: str, small: bool, hook: Any = None, micro_batches: int = 1) -> Training:
    """A transformer. ``small``: kernels so short that the host is what the GPU waits for.

    A few small layers on the host, and on the stand-in, whose kernels take as long as they are told to.
    """
    width, layers, batch, length = (256, 4, 4, 64) if small else (1024, 12, 8, 1024)
    plain = is_stand_in()
    if device == "cpu" or plain:
        width, layers, batch, length = 256 if plain else 32, 2, 2, 8
    half = torch.bfloat16 if device == "cuda" and not plain else torch.float32
    torch.manual_seed(0)

    def layer() -> nn.Module:
        if plain:
            return nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
        return nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)

    body = nn.Sequential(*(layer() for _ in range(layers))).to(device, half)
    model = nn.parallel.DistributedDataParallel(body, bucket_cap_mb=1 if small else 25)
    # DDP waits for timers of its own in every 100th iteration.
    model._set_ddp_runtime_logging_sample_rate(1 << 30)
    if hook:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    x = torch.randn(batch, length, width, device=device, dtype=half)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(micro_batches):
            loss = model(x).float().square().mean()
            loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())

    return Training(body, optimizer, step)


def in_pairs(
    one: Callable[[], None],
    other: Callable[[], None],
    steps: int,
    seconds: float,
    between: Callable[[], Any] = torch.cuda.synchronize,
) -> list[tuple[float, float]]:
    """Seconds of a call of each, on the GPU's clock: means over ``steps``, in pairs, by turns, two or more.

    ``between`` comes after each block, and is not measured.
    """
    began_s = time.monotonic()
    found: list[tuple[float, float]] = []
    while len(found) < 2 or time.monotonic() - began_s < seconds:
        took = dict.fromkeys((True, False), 0.0)
        for is_one in (True, False) if len(found) % 2 else (False, True):
            took[is_one] = _block_s(one if is_one else other, steps)
            between()
        found.append((took[True], took[False]))
    return found


def _block_s(action: Callable[[], None], steps: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        action()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / steps
