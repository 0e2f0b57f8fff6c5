"""The training of the bench: DDP on Gloo that saves every step. Arguments: folder, steps, seconds of pause after each.

Each rank appends ``STEP LOSS UNIX_SECONDS NODE`` to ``losses-RANK``. A file ``raise-RANK`` in the folder makes that
rank fail with a Python error, in every incarnation, and a file ``break-NODE`` the ranks on that node with what torch
says of a broken GPU. A file ``pause`` has the seconds of pause from now on.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import keepstep.checkpoint

folder, steps, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
node = os.environ.get("SLURMD_NODENAME") or os.environ.get("KEEPSTEP_NODE_NAME", "-")


class Data:
    """Batches drawn from a generator."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(rank)

    def next(self) -> torch.Tensor:
        return torch.randn(16, 32, generator=self._generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
layers = (torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
# DDP would else lay gradients anew after its first step, and three ranks would sum them in another order: a training
# that begins again in the middle would differ in the last bit.
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = Data(rank)
state = {"model": model, "optimizer": optimizer, "data": data, "random": keepstep.checkpoint.RandomState()}
start = keepstep.checkpoint.load(state) or 0
with (folder / f"losses-{rank}").open("a") as log:
    for step in range(start, steps):
        x = data.next()
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        if (folder / f"raise-{rank}").exists():
            raise ValueError("the batch has no label")
        if (folder / f"break-{node}").exists():
            time.sleep(0.5)
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        optimizer.step()
        log.write(f"{step} {float(loss.item()).hex()} {time.time():.3f} {node}\n")
        log.flush()
        optimizer.zero_grad()
        keepstep.checkpoint.save(state, step + 1)
        paced = folder / "pause"
        time.sleep(float(paced.read_text()) if paced.exists() else pause_s)
dist.destroy_process_group()
