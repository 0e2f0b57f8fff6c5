"""A training with DDP, FSDP2 or a pipeline in which one rank hangs, calls what others do not, or pauses."""

from __future__ import annotations

import datetime
import time
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.campaign.drawn_draw import PAUSE_S, draw
from benchmarks.campaign.notes import Notes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FOR_GOOD_S = 100_000
_COMPUTE_S = 0.02
_WIDTH = 64


class Trouble:
    """What one rank does once, at its place in the step."""

    def __init__(self, notes: Notes) -> None:
        self.drawn, self.notes, self.now = draw(notes.case, notes.seed), notes, False

    def here(self, kind: str) -> bool:
        """Whether it is here and now; then it is told."""
        found = self.now and self.drawn.kind == kind
        if found:
            self.now = False
            self.notes.truth(step=self.drawn.step)
        return found

    def hang(self, kind: str) -> None:
        if self.here(kind):
            time.sleep(FOR_GOOD_S)


class Layer(torch.nn.Module):
    """A layer that takes a moment, and in which the trouble may be."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        self.linear, self.trouble = torch.nn.Linear(_WIDTH, _WIDTH), trouble

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trouble.hang("forward")
        time.sleep(_COMPUTE_S)
        return _Backward.apply(self.linear(x), self.trouble)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trouble: Trouble) -> torch.Tensor:
        ctx.trouble = trouble
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.trouble.hang("backward")
        return gradients[0], None


class Samples(Dataset[torch.Tensor]):
    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble

    def __len__(self) -> int:
        return self.trouble.drawn.steps

    def __getitem__(self, step: int) -> torch.Tensor:
        if step >= len(self):
            raise IndexError(step)
        drawn, notes = self.trouble.drawn, self.trouble.notes
        self.trouble.now = step == drawn.step and notes.rank == drawn.rank and notes.first
        self.trouble.hang("data")
        return torch.randn(8, _WIDTH)


class Training:
    """The job of one rank."""

    def __init__(self, trouble: Trouble) -> None:
        self.trouble, drawn = trouble, trouble.drawn
        world = dist.get_world_size()
        self.groups: list[Any] = [dist.new_group(list(range(world)), group_desc=d) for d in ("one", "two")]
        self.model: Any = torch.nn.Sequential(Layer(trouble), torch.nn.ReLU(), Layer(trouble))
        self.schedule: Any = None
        self.replicas: Any = None
        if drawn.layout == "ddp":
            self.model = DistributedDataParallel(self.model)
        elif drawn.layout == "fsdp2":
            mesh = init_device_mesh("cpu", (world,))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        else:
            mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "pp"))
            self.replicas = mesh.get_group("dp")
            self.stage = mesh.get_local_rank("pp")
            stage = PipelineStage(self.model, self.stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
            self.schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, _: y.mean())
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.optimizer.register_step_pre_hook(lambda *_: trouble.hang("optimizer"))

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        if self.trouble.here("first step"):
            time.sleep(PAUSE_S)
        self.forward_and_backward(x)
        first, second = self.groups
        if self.trouble.here("order"):
            first, second = second, first
        dist.all_reduce(torch.ones(100), group=first)
        if not self.trouble.here("skip"):
            dist.all_reduce(torch.ones(100), group=second)
        self.optimizer.step()
        self.pause()

    def forward_and_backward(self, x: torch.Tensor) -> None:
        if self.schedule is None:
            self.model(x).mean().backward()
            return
        if self.stage == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(target=x)
        for one in self.model.parameters():
            dist.all_reduce(one.grad, group=self.replicas)

    def pause(self) -> None:
        """What comes after a step, on one rank."""
        self.trouble.hang("checkpoint")
        if self.trouble.here("checkpoint, marked"):
            torch.save(_Slow(), "/dev/null")
        if self.trouble.here("checkpoint, unmarked"):
            time.sleep(PAUSE_S)
        if self.trouble.here("evaluation"):
            aside = torch.nn.Linear(_WIDTH, 1)
            aside.eval()
            for _ in range(round(PAUSE_S / 0.1)):
                aside(torch.randn(8, _WIDTH))
                time.sleep(0.1)


class _Slow:
    """An object that takes long to be written."""

    def __getstate__(self) -> dict[str, int]:
        time.sleep(PAUSE_S)
        return {}


def main() -> None:
    notes = Notes()
    notes.began()
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    training = Training(Trouble(notes))
    for step, x in enumerate(DataLoader(Samples(training.trouble), batch_size=None)):
        training.step(x)
        notes.step(step)
    dist.destroy_process_group()
    notes.done()


if __name__ == "__main__":
    main()
