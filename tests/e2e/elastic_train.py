"""A training (DDP) whose global batch is the same on however many nodes it runs, each micro-batch's loss written down.

Arguments: folder, steps, micro-batches. ``LOSE_AT``: the first incarnation waits there for the loss of a node.
``SLOWLY``: so many seconds times its number more for each step of the second. ``STRANGE``: each rank saves something of
its own.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import keepstep


def batch(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(16, 32, generator=generator)
    return x, x.sin().sum(1, keepdim=True)


@keepstep.resilient
def train(session: keepstep.Session, folder: Path, total: int, count: int) -> None:
    torch.manual_seed(7)
    layers = torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
    model = DistributedDataParallel(torch.nn.Sequential(*layers), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = {"rank": session.rank} if "STRANGE" in os.environ else {}
    start = session.restore(model=model, optimizer=optimizer, **own)
    (folder / f"start-{session.incarnation}-{session.rank}").write_text(f"{start} of {session.world_size}")
    for step in session.steps(start, total):
        if session.incarnation == 0 and step == int(os.environ.get("LOSE_AT", "-1")):
            time.sleep(600)
        if session.incarnation == 1:
            time.sleep(float(os.environ.get("SLOWLY", "0")) * step)
        for number in session.microbatches(count, model):
            x, y = batch(step, number)
            loss = torch.nn.functional.mse_loss(model(x), y)
            (loss * session.weight).backward()
            with (folder / f"losses-{number}").open("a") as file:
                file.write(f"{step} {float(loss.item()).hex()} {session.incarnation}\n")
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    dist.destroy_process_group()
