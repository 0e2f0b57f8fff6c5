"""Training (DDP, or FSDP2 with ``KIND=fsdp2``) that resumes from its checkpoints; writes each step's loss as hex.

Arguments: folder, steps, and optionally ``RANK STEP WHERE``: that rank kills itself there in the first incarnation.
``PERSIST_AT=4,8``: these steps are asked for on storage, and waited for. ``DAMAGED_RANK=1``: in the second incarnation
all that this rank has in its node's cache is damaged. ``KILL_AGENT_AT=4``: rank 0 kills the agent before that step is
saved, and the step is not waited for. ``PAUSE_AT=8``: before that step it waits for ``FOLDER/go``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import keepstep.checkpoint
from keepstep.checkpoint.memory.cache_server import ADDRESS, Open, ask

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
dying, dies_at, where = (
    (int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]) if len(sys.argv) > 3 else (-1, -1, "")
)


class Data:
    """Batches drawn from a generator, and where in them we are."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)
        self.position = 0

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.position += 1
        x = torch.randn(16, 32, generator=self.generator)
        return x, x.sum(1, keepdim=True) + self.position

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.position = state["position"]


dist.init_process_group("gloo")
rank = dist.get_rank()
incarnation = int(os.environ.get("KEEPSTEP_INCARNATION", "0"))
torch.manual_seed(7)


def die(step: int, here: str) -> None:
    if (rank, step, here, incarnation) == (dying, dies_at, where, 0):
        os.kill(os.getpid(), signal.SIGKILL)


class Block(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        die(step, "forward")
        return super().forward(x)


def wrapped(block: Block) -> torch.nn.Module:
    if os.environ.get("KIND") != "fsdp2":
        return torch.nn.parallel.DistributedDataParallel(block)
    from torch.distributed.fsdp import fully_shard

    for layer in (block[0], block[3]):
        fully_shard(layer)
    fully_shard(block)
    return block


model = wrapped(
    Block(torch.nn.Linear(32, 511), torch.nn.BatchNorm1d(511), torch.nn.Dropout(0.1), torch.nn.Linear(511, 1))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
data = Data(rank)
state = {
    "model": model,
    "optimizer": optimizer,
    "scheduler": scheduler,
    "data": data,
    "random": keepstep.checkpoint.RandomState(),
}


def damage_cache() -> None:
    found = ask(os.environ[ADDRESS], Open(rank))
    for slot in found.slots:
        for offset in range(4096, os.fstat(slot).st_size, 4096):
            os.pwrite(slot, b"damaged", offset)
    for descriptor in (found.board, *found.slots):
        os.close(descriptor)


def wait_for_storage(step: int) -> None:
    where = Path(os.environ["KEEPSTEP_CHECKPOINT_DIR"])
    while not list(where.glob(f"step-{step:010d}-i*/manifest.json")):
        time.sleep(0.02)


if incarnation == 1 and rank == int(os.environ.get("DAMAGED_RANK", "-1")):
    damage_cache()


def kill_agent() -> None:
    for process in psutil.Process(os.getppid()).children():
        if "keepstep.agent" in process.cmdline():
            process.kill()


persist_at = {int(word) for word in os.environ.get("PERSIST_AT", "").split(",") if word}
kill_agent_at = int(os.environ.get("KILL_AGENT_AT", "-1"))
start = keepstep.checkpoint.load(state) or 0
(folder / f"start-{rank}-{incarnation}").write_text(str(start))
with (folder / f"losses-{rank}").open("a") as log:
    for step in range(start, steps):
        while step == int(os.environ.get("PAUSE_AT", "-1")) and not (folder / "go").exists():
            time.sleep(0.02)
        x, y = data.next()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        die(step, "backward")
        optimizer.step()
        log.write(f"{step} {float(loss.item()).hex()}\n")
        log.flush()
        scheduler.step()
        die(step, "before save")
        optimizer.zero_grad()
        if rank == 0 and step + 1 == kill_agent_at:
            kill_agent()
        keepstep.checkpoint.save(state, step + 1, persist=True if step + 1 in persist_at else None)
        if step + 1 in persist_at - {kill_agent_at}:
            wait_for_storage(step + 1)
        die(step, "after save")
dist.destroy_process_group()
