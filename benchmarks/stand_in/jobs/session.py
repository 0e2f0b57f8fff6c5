"""A Session's training on the stand-in GPU whose operators compute: DDP over NCCL, the host runs ahead.

    python session.py STEPS FOLDER

Each rank adds ``step loss`` to ``FOLDER/losses-RANK``, a step late, so that the host never waits for its device.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.stand_in.device import Device, compute_values
from benchmarks.stand_in.faults import Script
from torch.nn.parallel import DistributedDataParallel

import keepstep

PAUSE_S = float(os.environ.get("PAUSE_S", "0"))


class Data:
    """Batches, and where in them the rank is."""

    def __init__(self, rank: int) -> None:
        self.rank, self.step = rank, 0

    def batch(self) -> torch.Tensor:
        self.step += 1
        generator = torch.Generator().manual_seed(1000 * self.step + self.rank)
        return torch.randn(8, 32, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


@keepstep.resilient
def train(session: keepstep.Session, total: int, folder: Path) -> None:
    torch.manual_seed(7)
    script = Script.from_environment(Device(), session.rank)
    stream = torch.cuda.current_stream().cuda_stream
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).cuda(),
        bucket_cap_mb=0.01,
        find_unused_parameters=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    data = Data(session.rank)
    start = session.restore(model=model, optimizer=optimizer, data=data)
    path = folder / f"losses-{session.rank}"
    late: tuple[int, torch.Tensor] | None = None
    for step in session.steps(start, total):
        script.begin(step, stream)
        x = data.batch().pin_memory().cuda(non_blocking=True)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        script.at(step, "backward")
        loss.backward()
        script.at(step, "optimizer")
        optimizer.step()
        optimizer.zero_grad()
        note(path, late)
        late = (step, loss.detach())
        time.sleep(PAUSE_S)
    note(path, late)


def note(path: Path, late: tuple[int, torch.Tensor] | None) -> None:
    if late is not None:
        with path.open("a") as file:
            file.write(f"{late[0]} {float(late[1].item()).hex()} {time.time():.3f}\n")


if __name__ == "__main__":
    compute_values()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    train(int(sys.argv[1]), Path(sys.argv[2]))
    dist.destroy_process_group()
