"""A training with tensor, pipeline and (sharded) data parallelism that goes on where it was when a process dies.

    keepstep run --nproc-per-node 8 --max-restarts 3 examples/recover/tp_pp_dp.py
    kill -9 …    # any of its processes

2 pipeline stages × 2 data-parallel × 2 tensor-parallel ranks. What each has of its stage goes back to the same rank.
Arguments: steps (30), and a folder where each rank of the last stage writes its losses.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import keepstep

STAGES, MICRO_BATCHES = 2, 4


class Block(torch.nn.Module):
    """Of a residual network: one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Data:
    """Batches, and where in them we are; the same on all ranks that are no others' data-parallel replica."""

    def __init__(self, replica: int) -> None:
        self.generator = torch.Generator().manual_seed(replica)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(32, 64, generator=self.generator)
        return x, x.sin()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


@keepstep.resilient
def train(session: keepstep.Session, total: int, folder: Path | None) -> None:
    mesh = init_device_mesh("cpu", (STAGES, session.world_size // 4, 2), mesh_dim_names=("pp", "dp", "tp"))
    number = mesh["pp"].get_local_rank()
    torch.manual_seed(number)
    block = Block()
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
    stage = PipelineStage(block, number, STAGES, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)
    data = Data(mesh["dp"].get_local_rank())
    start = session.restore(block=block, optimizer=optimizer, data=data)
    for step in session.steps(start, total):
        x, y = data.batch()
        losses: list[torch.Tensor] = []
        if number == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses and folder:
            with (folder / f"losses-{session.rank}").open("a") as file:
                file.write(f"{step} {' '.join(float(loss.item()).hex() for loss in losses)}\n")
        if losses and session.rank == session.world_size - 1:
            print(f"step {step}: loss {sum(loss.item() for loss in losses) / MICRO_BATCHES:.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 30, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    dist.destroy_process_group()
