"""A Session's training: DDP or FSDP2 over NCCL, whose host runs ahead; on the stand-in GPU, or one that is there.

    python session.py STEPS FOLDER

Each rank adds ``step loss time incarnation`` to ``FOLDER/losses-RANK`` once its device has the loss, so that the host
is up to three steps ahead, ``incarnation step process held`` to ``FOLDER/begun-RANK`` whenever it begins (``held``: the
newest step that it has sealed), and for each of the first four steps after that ``incarnation process time step`` to
``FOLDER/trained-RANK`` once its device has the loss of it. A rank plays the fault in ``FOLDER/order-RANK``, see
`Script.obey`. In the environment:

    LAYOUT      "ddp" or "fsdp2"
    BUCKETS     "one": a step has one reduction
    WAIT_AT     the step at which all ranks wait until there is FOLDER/go
    GATE        "open": the optimizer's kernels stand behind no gate, and keepstep does not know it; "none": nor does it
                know of aborts (where there is no shim), or that it does not; "unopened": nobody opens the gate before
                its time
    BALLAST_GB  memory of the device that each rank takes besides; with HELD the script never lets go of it
    MORE        a backend of a group besides
    TOLD_S      seconds after which a rank that has lost others says so itself
    ABORT_LATE_S  seconds by which aborts begin late, as on a busy host
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from benchmarks.gpu.device import RealDevice, take_device
from benchmarks.stand_in.device import Device, compute_values, is_stand_in
from benchmarks.stand_in.faults import Script
from torch.nn.parallel import DistributedDataParallel

import keepstep
from keepstep.checkpoint import api as door
from keepstep.checkpoint import snapshot
from keepstep.session import groups, staying
from keepstep.session.device_gate import DeviceGate

AHEAD = 3  # steps
TOLD = 4  # steps of an incarnation behind which the host waits for its device, and notes when it was
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))
WAIT_AT = int(os.environ.get("WAIT_AT", "-1"))
ONE_BUCKET = os.environ.get("BUCKETS") == "one"
KEPT: list[torch.Tensor] = []
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
        most_mb = 25 if ONE_BUCKET else 0.01  # to look for unused ones takes another reduction
        return DistributedDataParallel(layers, bucket_cap_mb=most_mb, find_unused_parameters=not ONE_BUCKET)
    from torch.distributed.fsdp import fully_shard

    for layer in () if ONE_BUCKET else (layers[0], layers[2]):
        fully_shard(layer)
    fully_shard(layers)
    return layers


@keepstep.resilient
def train(session: keepstep.Session, total: int, folder: Path) -> None:
    torch.manual_seed(7)
    device = Device() if is_stand_in() else RealDevice(0)
    script = Script.from_environment(device, session.rank)
    if backend := os.environ.get("MORE"):
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers one
        dist.new_group(backend=backend)
    stream = torch.cuda.current_stream().cuda_stream
    ballast = torch.empty(BALLAST_BYTES, dtype=torch.uint8, device="cuda")
    if os.environ.get("HELD"):
        KEPT.append(ballast)
    model = model_of(os.environ.get("LAYOUT", "ddp"))
    if isinstance(device, RealDevice):
        device.load(one for one in model.modules() if isinstance(one, torch.nn.Linear))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    data = Data(session.rank)
    held = newest_held()
    start = session.restore(model=model, optimizer=optimizer, data=data)
    note(folder / f"begun-{session.rank}", session.incarnation, start, os.getpid(), held)
    noted = session.incarnation
    path, late = folder / f"losses-{session.rank}", deque[Loss]()
    for step in session.steps(start, total):
        while step == WAIT_AT and not (folder / "go").exists():
            time.sleep(0.02)
        script.begin(step, stream)
        script.obey(folder / f"order-{session.rank}", step)
        x = data.batch().pin_memory().cuda(non_blocking=True)
        script.at(step, "forward")
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
        note_losses(path, noted, late, AHEAD)
        time.sleep(PAUSE_S)
    note_losses(path, noted, late, 0)
    del ballast


def newest_held() -> int:
    """The newest step that this rank has sealed; 0: none."""
    snapshots: Any = door._snapshots()  # pyright: ignore[reportPrivateUsage]
    return max((key.step for key in snapshots._cache.held() if key), default=0)


def note_losses(path: Path, incarnation: int, late: deque[Loss], most: int) -> None:
    """Note losses that have come, and wait for them while more than ``most`` are on their way."""
    while late and (len(late) > most or late[0].has_come.query()):
        late[0].has_come.synchronize()
        step, value, _ = late.popleft()
        note(path, step, float(value).hex(), f"{time.time():.4f}", incarnation)


def note(path: Path, *words: object) -> None:
    with path.open("a") as file:
        print(*words, file=file)


if __name__ == "__main__":
    compute_values()
    staying._DEATHS_TOLD_S = float(os.environ.get("TOLD_S", "10"))  # pyright: ignore[reportPrivateUsage]
    if os.environ.get("GATE") == "unopened":
        DeviceGate.open = lambda self: None
    if os.environ.get("GATE") == "none":
        snapshot.why_unseen = staying.why_unseen = lambda: ""
    if os.environ.get("GATE") in ("open", "none"):
        DeviceGate.__init__ = lambda self: setattr(self, "stands", True)
        for name in ("close", "open", "renew"):
            setattr(DeviceGate, name, lambda _: None)
    if late_s := float(os.environ.get("ABORT_LATE_S", "0")):
        abort = groups.abort
        groups.abort = lambda those: (time.sleep(late_s), abort(those))[1]
    take_device(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("nccl")
    train(int(sys.argv[1]), Path(sys.argv[2]))
    dist.destroy_process_group()
