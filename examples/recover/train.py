"""A training (DDP) that goes on where it was when a process dies, with the very losses that it would have had.

    keepstep run --nproc-per-node 4 --max-restarts 3 examples/recover/train.py
    kill -9 …    # any of its processes

Arguments: steps (30), and a folder where each rank writes its losses.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Data:
    """Batches, and where in them we are: any loader with ``state_dict`` will do, as torchdata's StatefulDataLoader."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(32, 64, generator=self.generator)
        return x, x.sin().sum(1, keepdim=True)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


@keepstep.resilient
def train(session: keepstep.Session, total: int, folder: Path | None) -> None:
    torch.manual_seed(7)
    # From three ranks on DDP may add up gradients in another order right after a start; this keeps every bit the same.
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1)),
        find_unused_parameters=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Data(session.rank)
    start = session.restore(model=model, optimizer=optimizer, data=data)
    for step in session.steps(start, total):
        x, y = data.batch()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if folder:
            with (folder / f"losses-{session.rank}").open("a") as file:
                file.write(f"{step} {float(loss.item()).hex()}\n")
        if session.rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 30, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    dist.destroy_process_group()
