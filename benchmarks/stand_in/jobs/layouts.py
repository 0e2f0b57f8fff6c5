"""Layouts of train.py that torch itself makes: forward and backward of a step, and the optimizer."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.stand_in.faults import Script
from torch import nn

BATCH = 8


class Layout:
    """Forward and backward of one step, as a layout does it."""

    def __init__(self, arguments: argparse.Namespace, script: Script) -> None:
        self.script = script
        self.width = arguments.width
        self.step = 0
        self.module = nn.Sequential(*[nn.Linear(self.width, self.width) for _ in range(arguments.layers)])

    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def make_optimizer(self) -> tuple[Any, torch.optim.Optimizer]:
        """What has ``step`` and ``zero_grad`` for the script, and the optimizer of torch that does it."""
        made = torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)
        return made, made

    def forward_backward(self) -> None:
        raise NotImplementedError

    def _watch_backward(self, module: nn.Module) -> None:
        module.register_full_backward_hook(lambda *_: self.script.at(self.step, "backward"))


class Ddp(Layout):
    def __init__(self, arguments: argparse.Namespace, script: Script) -> None:
        super().__init__(arguments, script)
        self._watch_backward(self.module[arguments.layers // 2])
        self.model = nn.parallel.DistributedDataParallel(
            self.module.cuda(), bucket_cap_mb=arguments.bucket_mb
        )

    def forward_backward(self) -> None:
        samples = torch.randn(BATCH, self.width, device="cuda")
        self.script.at(self.step, "forward")
        self.model(samples).sum().backward()


class Fsdp2(Layout):
    def __init__(self, arguments: argparse.Namespace, script: Script) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__(arguments, script)
        self._watch_backward(self.module[arguments.layers // 2])
        self.module.cuda()
        for layer in self.module:
            fully_shard(layer)
        fully_shard(self.module)

    def forward_backward(self) -> None:
        samples = torch.randn(BATCH, self.width, device="cuda")
        self.script.at(self.step, "forward")
        self.module(samples).sum().backward()


class Pipeline(Layout):
    """Ranks 0 and 1 are the two stages of the first replica, 2 and 3 those of the second. Needs values: for shapes."""

    def __init__(self, arguments: argparse.Namespace, script: Script) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        super().__init__(arguments, script)
        mesh = init_device_mesh(
            "cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicas", "stages")
        )
        self.stage = mesh["stages"].get_local_rank()
        half = max(arguments.layers // 2, 1)
        self.module = nn.Sequential(*list(self.module)[:half]).cuda()
        self._watch_backward(self.module[half // 2])
        self.replicas = mesh["replicas"].get_group()
        device = torch.device("cuda", torch.cuda.current_device())
        made = PipelineStage(self.module, self.stage, 2, device, group=mesh["stages"].get_group())
        self.schedule = Schedule1F1B(made, 4, loss_fn=lambda out, _: out.sum())

    def forward_backward(self) -> None:
        self.script.at(self.step, "forward")
        if self.stage == 0:
            self.schedule.step(torch.randn(4 * BATCH, self.width, device="cuda"))
        else:
            self.schedule.step(target=torch.zeros(4 * BATCH, device="cuda"))
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad, group=self.replicas)


PLAIN = {"ddp": Ddp, "fsdp2": Fsdp2, "pipeline": Pipeline}
