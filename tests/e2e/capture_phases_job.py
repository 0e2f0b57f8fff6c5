"""One process that does one thing of each phase, in a known order; imports nothing of keepstep."""

from __future__ import annotations

import gc
import io
import os
import sys
import tempfile
import threading
from contextlib import suppress
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint import save as save_distributed
from torch.utils.data import DataLoader


class Frozen(nn.Module):
    """Keeps its norm in evaluation mode while it trains, as fine-tuning does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self


def main() -> None:
    gc.disable()
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
    teacher = nn.Linear(4, 4).eval()  # before any training: no evaluation
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        (model(torch.ones(2, 4)) - teacher(torch.ones(2, 4)).detach()).sum().backward()
        optimizer.step()

    step()  # backward is not recorded: the ring is claimed by the first optimizer step
    numbers: Any = list(range(4))  # Any: a list will do for a data set, which the annotations do not know
    for _ in DataLoader(numbers, batch_size=2):  # DATA: iter, 2 batches, the end
        pass
    step()  # BACKWARD, OPTIMIZER

    model.eval()  # EVALUATION 1
    list(DataLoader(numbers[:1], batch_size=1))  # DATA: 3
    model.train()
    model.eval()  # EVALUATION 2, ended by its mode set back by hand before the backward
    for module in model.modules():
        module.training = True
    step()  # BACKWARD, OPTIMIZER

    torch.save(model.state_dict(), io.BytesIO())  # CHECKPOINT 1
    with tempfile.TemporaryDirectory() as folder:
        save_distributed({"model": model.state_dict()}, checkpoint_id=os.path.join(folder, "a"))  # 2
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=os.path.join(folder, "b"))  # 3
    beside = threading.Thread(target=lambda: torch.save({}, io.BytesIO()))
    beside.start()  # another thread's: not recorded
    beside.join()

    gc.collect(0)
    gc.collect()  # GC 1

    frozen = Frozen()
    frozen_optimizer = torch.optim.SGD(frozen.parameters(), lr=0.1)
    for _ in range(3):
        frozen.train()  # EVALUATION 3 in the first round only: then it is known as frozen
        frozen(torch.ones(2, 4)).sum().backward()  # 3 BACKWARD
        frozen_optimizer.step()  # 3 OPTIMIZER

    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()  # BACKWARD inside OPTIMIZER
        return loss

    lbfgs.step(closure)

    class Failing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise ValueError("on purpose")

    failing = Failing(model.parameters(), lr=0.1)
    for _ in range(2):
        with suppress(ValueError):
            failing.step()  # OPTIMIZER, failed, twice; the second is found open by the step below
    step()

    nested = torch.ones(2, requires_grad=True)

    class Reentrant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True)
                inner.sum().backward()
            return gradient * 2

    Reentrant.apply(nested).sum().backward()  # one BACKWARD

    per_parameter = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter, its_optimizer in per_parameter.items():
        parameter.register_post_accumulate_grad_hook(lambda _, o=its_optimizer: o.step())
    model(torch.ones(2, 4)).sum().backward()  # BACKWARD, then one OPTIMIZER for all parameters

    pid = os.fork()
    if pid == 0:
        step()  # the child records nothing
        os._exit(0)
    os.waitpid(pid, 0)
    sys.stdout.flush()
    raise RuntimeError("the end")


if __name__ == "__main__":
    main()
