"""Trainings of a Session on NCCL that are made otherwise than by DDP and one optimizer of torch's; two ranks.

    python loops_job.py KIND FOLDER STEPS

Each rank adds ``step loss`` to ``FOLDER/losses-RANK``, and waits at step 10 until there is ``FOLDER/go``. ``KIND``:

    "tp"        tensor parallelism by DTensor
    "backward"  FSDP2, whose parameters have an optimizer each that steps inside backward
    "own"       gradients reduced and parameters changed by the script, without any optimizer of torch's
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.gpu.device import take_device
from benchmarks.stand_in.device import Device, compute_values
from benchmarks.stand_in.faults import Script
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import keepstep

WAIT_AT = 10


def stepped_in_backward(model: torch.nn.Module) -> dict[str, torch.optim.Optimizer]:
    """An optimizer for each parameter, which its hook steps."""
    made: dict[str, torch.optim.Optimizer] = {
        name: torch.optim.AdamW([one], lr=1e-2) for name, one in model.named_parameters()
    }
    optimizers = dict(zip(model.parameters(), made.values(), strict=True))

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return made


def step_by_hand(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        parameter.data.add_(parameter.grad, alpha=-1e-2)
        parameter.grad = None


@keepstep.resilient
def train(session: keepstep.Session, kind: str, folder: Path, total: int) -> None:
    torch.manual_seed(7)
    script = Script.from_environment(Device(), session.rank)
    stream = torch.cuda.current_stream().cuda_stream
    layers = [torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizers: dict[str, torch.optim.Optimizer] = {}
    step_all: Callable[[], None] = lambda: None  # noqa: E731
    if kind == "tp":
        parallelize_module(
            model, init_device_mesh("cuda", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        optimizers, step_all = {"all": optimizer}, optimizer.step
    elif kind == "backward":
        for layer in (layers[0], layers[2], model):
            fully_shard(layer)
        optimizers = stepped_in_backward(model)
    else:
        step_all = lambda: step_by_hand(model)  # noqa: E731
    start = session.restore(model=model, optimizers=list(optimizers.values()))
    for step in session.steps(start, total):
        while step == WAIT_AT and not (folder / "go").exists():
            time.sleep(0.02)
        script.begin(step, stream)
        generator = torch.Generator().manual_seed(step if kind == "tp" else 2 * step + session.rank)
        x = torch.randn(8, 32, generator=generator).cuda()
        script.at(step, "forward")
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        script.at(step, "backward")
        loss.backward()
        script.at(step, "optimizer")
        step_all()
        model.zero_grad()
        with (folder / f"losses-{session.rank}").open("a") as file:
            print(step, float(loss.detach()).hex(), file=file)


if __name__ == "__main__":
    compute_values()
    take_device(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("nccl")
    train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    dist.destroy_process_group()
