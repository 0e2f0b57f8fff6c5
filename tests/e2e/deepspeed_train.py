"""DeepSpeed training (ZeRO stage ``STAGE``) that resumes from its checkpoints; writes each step's loss as hex.

Arguments: folder, steps of this run, steps of the schedule. ``KEEP``: "no" trains without keepstep's part, a number is
``files_every``. ``DIE``: "STEP WHERE": all ranks kill themselves there in the first incarnation. ``DAMAGE``: this
rank's snapshots are damaged before the second one loads.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist

from keepstep import checkpoint

folder, steps, schedule = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
keep, stage = os.environ["KEEP"], int(os.environ["STAGE"])
dies_at, where = (os.environ.get("DIE") or "-1 nowhere").split(" ", 1)
incarnation = int(os.environ.get("KEEPSTEP_INCARNATION", "0"))


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


def die(step: int, here: str) -> None:
    if (step, here, incarnation) == (int(dies_at), where, 0):
        os.kill(os.getpid(), signal.SIGKILL)


def damage() -> None:
    from keepstep.checkpoint import native
    from keepstep.checkpoint.memory.cache_server import ADDRESS
    from keepstep.checkpoint.memory.rank_slots import RankSlots

    rank_slots = RankSlots(os.environ[ADDRESS], dist.get_rank())
    for slot in rank_slots.slots:
        slot.memory[native.DATA_OFFSET + 64] ^= 1
    rank_slots.close()


# Not compiled at first use, a minute on each machine, whose lock outlives a killed compiler: everything goes over Gloo.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
rank = dist.get_rank()
torch.manual_seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 511), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(511, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
config = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": os.environ.get("DTYPE") != "fp32"},
    "steps_per_print": 1 << 30,
}
engine, _, _, _ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, schedule),
    config=config,
)
torch.manual_seed(rank)
data, start = Data(rank), 0
if keep != "no":
    from keepstep.integrations.deepspeed import install

    if os.environ.get("DAMAGE") == str(rank) and incarnation == 1:
        damage()
    install(engine, files_every=int(keep), state={"data": data, "random": checkpoint.RandomState()})
    path, client = engine.load_checkpoint(str(folder / "checkpoints"))
    if path:
        start = client["step"]
        assert client["told"] == argparse.Namespace(rank=rank if stage == 3 else 0, folder=folder)
        assert Path(path).is_relative_to(folder / "checkpoints"), path
        assert data.position == start == engine.global_steps
(folder / f"start-{rank}-{incarnation}").write_text(str(start))
with (folder / f"losses-{rank}").open("a") as log:
    for step in range(start, steps):
        x, y = data.next()
        loss = torch.nn.functional.mse_loss(engine(x.to(next(iter(model.parameters())).dtype)).float(), y)
        engine.backward(loss)
        die(step, "backward")
        engine.step()
        log.write(f"{step} {float(loss.item()).hex()}\n")
        log.flush()
        die(step, "before save")
        if keep != "no":
            told = argparse.Namespace(rank=rank, folder=folder)
            engine.save_checkpoint(str(folder / "checkpoints"), client_state={"step": step + 1, "told": told})
        die(step, "after save")
dist.destroy_process_group()
