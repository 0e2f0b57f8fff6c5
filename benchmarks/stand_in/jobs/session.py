"""A Session's training: DDP or FSDP2 over NCCL, whose host runs ahead; on the stand-in GPU, or one that is there.

    python session.py STEPS FOLDER

Each rank adds ``step loss time`` to ``FOLDER/losses-RANK`` once its device has the loss, so that the host is up to
three steps ahead, ``incarnation step process`` to ``FOLDER/begun-RANK`` whenever it begins, and for each of the first
four steps after that ``incarnation process time step`` to ``FOLDER/trained-RANK`` once its device has the loss of it.
A rank plays the fault in ``FOLDER/order-RANK`` in the step in which it finds it. In the environment: ``LAYOUT`` is
"ddp" or "fsdp2"; all ranks wait at step ``WAIT_AT`` until there is ``FOLDER/go``; with ``GATE=none`` the optimizer's
kernels stand behind no gate, and keepstep does not know it; ``BALLAST_GB`` is memory of the device that each rank takes
besides; aborts begin ``ABORT_LATE_S`` seconds late, as on a busy host.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from benchmarks.gpu.device import RealDevice, take_device
from benchmarks.stand_in.device import Device, compute_values, is_stand_in
from benchmarks.stand_in.faults import Script
from torch.nn.parallel import DistributedDataParallel

import keepstep
from keepstep.session import groups
from keepstep.session.device_gate import DeviceGate

AHEAD = 3  # steps
TOLD = 4  # steps of an incarnation behind which the host waits for its device, and notes when it was
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))
WAIT_AT = int(os.environ.get("WAIT_AT", "-1"))
BALLAST_BYTES = int(float(os.environ.get("BALLAST_GB", "0")) * 2**30)


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


class Loss(NamedTuple):
    """The loss of a step, on its way to the host."""

    step: int
    value: torch.Tensor
    has_come: torch.cuda.Event


def on_its_way(step: int, loss: torch.Tensor) -> Loss:
    value = torch.empty((), pin_memory=True).copy_(loss.detach(), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Loss(step, value, event)


def model_of(layout: str) -> torch.nn.Module:
    layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).cuda()
    if layout == "ddp":
        return DistributedDataParallel(layers, bucket_cap_mb=0.01, find_unused_parameters=True)
    from torch.distributed.fsdp import fully_shard

    for layer in (layers[0], layers[2]):
        fully_shard(layer)
    fully_shard(layers)
    return layers


@keepstep.resilient
def train(session: keepstep.Session, total: int, folder: Path) -> None:
    torch.manual_seed(7)
    device = Device() if is_stand_in() else RealDevice(0)
    script = Script.from_environment(device, session.rank)
    stream = torch.cuda.current_stream().cuda_stream
    ballast = torch.empty(BALLAST_BYTES, dtype=torch.uint8, device="cuda")
    model = model_of(os.environ.get("LAYOUT", "ddp"))
    if isinstance(device, RealDevice):
        device.load(one for one in model.modules() if isinstance(one, torch.nn.Linear))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    data = Data(session.rank)
    start = session.restore(model=model, optimizer=optimizer, data=data)
    note(folder / f"begun-{session.rank}", session.incarnation, start, os.getpid())
    path, late = folder / f"losses-{session.rank}", deque[Loss]()
    for step in session.steps(start, total):
        while step == WAIT_AT and not (folder / "go").exists():
            time.sleep(0.02)
        script.begin(step, stream)
        script.obey(folder / f"order-{session.rank}", step)
        x = data.batch().pin_memory().cuda(non_blocking=True)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        script.at(step, "backward")
        loss.backward()
        script.at(step, "optimizer")
        optimizer.step()
        optimizer.zero_grad()
        late.append(on_its_way(step, loss))
        if step < start + TOLD:
            late[-1].has_come.synchronize()
            words = session.incarnation, os.getpid(), f"{time.time():.4f}", step
            note(folder / f"trained-{session.rank}", *words)
        note_losses(path, late, AHEAD)
        time.sleep(PAUSE_S)
    note_losses(path, late, 0)
    del ballast


def note_losses(path: Path, late: deque[Loss], most: int) -> None:
    """Note losses that have come, and wait for them while more than ``most`` are on their way."""
    while late and (len(late) > most or late[0].has_come.query()):
        late[0].has_come.synchronize()
        step, value, _ = late.popleft()
        note(path, step, float(value).hex(), f"{time.time():.4f}")


def note(path: Path, *words: object) -> None:
    with path.open("a") as file:
        print(*words, file=file)


if __name__ == "__main__":
    compute_values()
    if os.environ.get("GATE") == "none":
        DeviceGate._before_step = lambda self, *_: setattr(self, "stands", True)  # pyright: ignore
    if late_s := float(os.environ.get("ABORT_LATE_S", "0")):
        abort = groups.abort
        groups.abort = lambda those: (time.sleep(late_s), abort(those))[1]
    take_device(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("nccl")
    train(int(sys.argv[1]), Path(sys.argv[2]))
    dist.destroy_process_group()
