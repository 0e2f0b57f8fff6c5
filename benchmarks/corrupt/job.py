"""The job of the bench: a session under DDP, in whose state one bit is turned over as a file says.

Arguments: folder, steps, seconds of a pause after each, optimizer (see `OPTIMIZERS`). Beside what ranks
have alike the state holds what differs by right: running statistics of a batch norm, an average of the weights that one
rank begins late, a part of the model that each rank trains for itself, random states, the rank's data and a counter.

In the folder: ``flip-R`` (JSON: ``step``, ``when``, ``tensor``, ``element``, ``bit``; all but the first two numbers are
taken modulo what there is), which the rank that it is for carries out once, noting in ``flipped`` what that was; and by
rank ``loss-R`` (the losses of each step, of all incarnations) and ``pid-R``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import keepstep

folder, total, pause_s, kind = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
AVERAGED_FROM = 6  # step from which one rank averages the weights

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
}


class Data:
    """Batches drawn from a generator, and where in them we are."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(rank)
        self._drawn = 0

    def next(self) -> torch.Tensor:
        self._drawn += 1
        return torch.randn(8, 64, generator=self._generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state(), "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._drawn = state["drawn"]


def flip(model: Any, optimizer: torch.optim.Optimizer, rank: int, step: int, when: str) -> None:
    """Turn a bit over, if a file says so for this rank and moment; once."""
    order = folder / f"flip-{rank}"
    if not order.exists() or (folder / "flipped").exists():
        return
    plan = json.loads(order.read_text())
    if (plan["step"], plan["when"]) != (step, when):
        return
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(prefix="model"))
    for number, kept in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.state.{number}.{name}": value for name, value in kept.items()}
    name = list(tensors)[plan["tensor"] % len(tensors)]
    tensor = tensors[name]
    bits = plan["element"] % tensor.numel() * 32 + plan["bit"]
    byte = ctypes.c_uint8.from_address(tensor.data_ptr() + bits // 8)
    byte.value ^= 1 << bits % 8
    (folder / "flipped").write_text(json.dumps({"rank": rank, "step": step, "when": when, "tensor": name}))


@keepstep.resilient
def train(session: keepstep.Session) -> None:
    """The training."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = session.rank
    torch.manual_seed(7)
    inner = torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.BatchNorm1d(256),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(256, 1),
    )
    own, average = (
        torch.nn.Linear(64, 1),
        {name: one.detach().clone() for name, one in inner.named_parameters()},
    )
    model = torch.nn.parallel.DistributedDataParallel(
        inner,
        find_unused_parameters=True,  # keeps the buckets, and so the order of sums, the same after a restart
    )
    optimizer, of_own = OPTIMIZERS[kind](model.parameters()), torch.optim.AdamW(own.parameters())
    data, counter = Data(rank), torch.zeros(1)
    start = session.restore(
        model=model, optimizer=optimizer, data=data, own=own, of_own=of_own, average=average, counter=counter
    )
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    with (folder / f"loss-{rank}").open("a", buffering=1) as losses:
        for step in session.steps(start, total):
            flip(model, optimizer, rank, step, "before")
            x = data.next()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            apart = own(x).square().mean()
            (loss + apart).backward()
            for one in (optimizer, of_own):
                one.step()
                one.zero_grad()
            if rank == 0 and step >= AVERAGED_FROM:
                counter += 1
                for name, value in inner.named_parameters():
                    average[name].lerp_(value.detach(), 0.1)
            flip(model, optimizer, rank, step, "after")
            losses.write(f"{step} {loss.item().hex()} {apart.item().hex()}\n")
            if pause_s:
                time.sleep(pause_s)
    dist.destroy_process_group()


train()
