"""A training without keepstep in it: it saves by calls of its own, and begins with the newest save that is whole.

    own_saves.py FOLDER STEPS [--layout ddp|fsdp2|deepspeed] [--asynchronous] [--wait-at STEP] [--die RANK STEP]

Saves are torch's (DCP), or DeepSpeed's; each fifth step is saved, in ``FOLDER/step-N`` when N are done. Each rank adds
``step loss time`` to ``FOLDER/losses-RANK`` and ``step process`` to ``FOLDER/begun-RANK``. At ``--wait-at`` all wait
for ``FOLDER/go``, as for data; at ``--die`` that rank kills itself in the first incarnation, its gradients being there.
It runs on GPUs where there are some, else on Gloo.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

EVERY = 5


class Training:
    """A model and its optimizer, saved by DCP."""

    def __init__(self, folder: Path, layout: str, device: torch.device, asynchronous: bool) -> None:
        self.folder = folder
        self.saving: Any = None
        # A save in the background has a group of its own: its calls would meet the training's in any order.
        self.group: Any = dist.new_group(backend="gloo") if asynchronous else None
        layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        self.model: Any = layers.to(device)
        if layout == "ddp":
            self.model = torch.nn.parallel.DistributedDataParallel(layers, find_unused_parameters=True)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for module in (layers[0], layers[2], layers):
                fully_shard(module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, done: int) -> None:
        weights, moments = get_state_dict(self.model, self.optimizer)
        state = {"model": weights, "optimizer": moments, "done": done}
        target = self.folder / f"step-{done}"
        if self.group is None:
            dcp.save(state, checkpoint_id=target)
            return
        self.wait()
        self.saving = dcp.async_save(state, checkpoint_id=target, process_group=self.group)

    def wait(self) -> None:
        if self.saving is not None:
            self.saving.result()

    def load(self) -> int:
        """Begin with the newest save; returns how many steps were done by then. DCP writes ``.metadata`` last."""
        whole = [int(path.parent.name[5:]) for path in self.folder.glob("step-*/.metadata")]
        if not whole:
            return 0
        weights, moments = get_state_dict(self.model, self.optimizer)
        state = {"model": weights, "optimizer": moments, "done": 0}
        dcp.load(state, checkpoint_id=self.folder / f"step-{max(whole)}")
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        return state["done"]


class DeepSpeedTraining(Training):
    """The same by DeepSpeed's engine, ZeRO stage 1, and its own checkpoints."""

    def __init__(self, folder: Path, layout: str, device: torch.device, asynchronous: bool) -> None:
        os.environ["DS_BUILD_OPS"] = "0"
        import deepspeed  # pyright: ignore[reportMissingImports]

        self.folder, self.saving = folder, None
        layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        layers.to(device)
        wanted = {
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 30,
        }
        optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
        self.model, *_ = deepspeed.initialize(
            model=layers, optimizer=optimizer, config=wanted, dist_init_required=False
        )

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def step(self) -> None:
        self.model.step()

    def save(self, done: int) -> None:
        self.model.save_checkpoint(str(self.folder), tag=f"step-{done}", client_state={"done": done})

    def load(self) -> int:
        path, told = self.model.load_checkpoint(str(self.folder))
        return told["done"] if path else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--layout", choices=("ddp", "fsdp2", "deepspeed"), default="ddp")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--wait-at", type=int, default=-1)
    parser.add_argument("--die", type=int, nargs=2, default=(-1, -1))
    chosen = parser.parse_args()
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    kind = DeepSpeedTraining if chosen.layout == "deepspeed" else Training
    training = kind(chosen.folder, chosen.layout, device, chosen.asynchronous)
    start = training.load()
    with (chosen.folder / f"begun-{rank}").open("a") as file:
        print(start, os.getpid(), file=file)
    for step in range(start, chosen.steps):
        while step == chosen.wait_at and not (chosen.folder / "go").exists():
            time.sleep(0.02)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(8, 32, generator=generator).to(device)
        loss = (training.model(x) - x.sum(1, keepdim=True)).square().mean()
        training.backward(loss)
        if (rank, step) == tuple(chosen.die) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        training.step()
        with (chosen.folder / f"losses-{rank}").open("a") as file:
            print(step, loss.item().hex(), f"{time.time():.3f}", file=file)
        if (step + 1) % EVERY == 0:
            training.save(step + 1)
    training.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
