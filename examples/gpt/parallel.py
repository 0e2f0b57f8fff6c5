"""Spreads the model over the ranks.

Data parallelism by DDP or FSDP2, tensor parallelism by DTensor, pipelines by torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from compute import Compute
from model import Shape, Stage, cross_entropy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform  # DDP knows no DTensor parameters
from torch.nn.parallel import DistributedDataParallel

Schedule = Schedule1F1B | ScheduleGPipe | ScheduleInterleaved1F1B


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many ranks share what. Ranks are numbered with tp fastest, then dp, then pp."""

    dp: int
    tp: int
    pp: int
    dp_kind: str = "ddp"
    schedule: str = "1f1b"
    microbatches: int = 1
    rows: int = 8  # of a batch


def make_mesh(sizes: Sizes, device_type: str) -> DeviceMesh:
    """The mesh (pp, dp, tp) over all ranks."""
    return init_device_mesh(device_type, (sizes.pp, sizes.dp, sizes.tp), mesh_dim_names=("pp", "dp", "tp"))


def _split_tensors(stage: Stage, mesh: DeviceMesh) -> None:
    for block in stage.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            },
        )


def _replicate(stage: Stage, sizes: Sizes, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    if sizes.dp == 1:
        return stage
    if sizes.dp_kind == "fsdp":
        for block in stage.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(stage, mesh=mesh["dp"])
        return stage
    if sizes.tp > 1:
        _pre_dp_module_transform(stage)
    return DistributedDataParallel(
        stage,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=mesh.get_group("dp"),
    )


def build_stages(
    shape: Shape, sizes: Sizes, mesh: DeviceMesh, compute: Compute, device: torch.device, seed: int
) -> list[tuple[int, nn.Module]]:
    """This rank's (stage number, module) pairs: one, or two with the interleaved schedule."""
    chunks = 2 if sizes.schedule == "interleaved" and sizes.pp > 1 else 1
    count = sizes.pp * chunks
    stages: list[tuple[int, nn.Module]] = []
    for chunk in range(chunks):
        index = chunk * sizes.pp + mesh.get_local_rank("pp")
        torch.manual_seed(seed + index)  # the replicas of a stage begin alike
        stage = Stage(shape, compute, index * shape.layers // count, (index + 1) * shape.layers // count)
        stage = stage.to(device)
        if sizes.tp > 1:
            _split_tensors(stage, mesh["tp"])
        stages.append((index, _replicate(stage, sizes, mesh, device)))
    return stages


def _boundary(shape: Shape, sizes: Sizes, stage: int, stages: int) -> Tensor:
    """What crosses from stage ``stage - 1`` to ``stage``, as an empty tensor of that shape."""
    size = (sizes.rows // sizes.microbatches, shape.sequence)
    if stage == 0:
        return torch.empty(size, dtype=torch.long, device="meta")
    width = shape.vocabulary if stage == stages else shape.dim
    return torch.empty(*size, width, device="meta", requires_grad=True)


def _schedule(
    stages: list[tuple[int, nn.Module]], shape: Shape, sizes: Sizes, mesh: DeviceMesh, device: torch.device
) -> Schedule:
    count = sizes.pp * len(stages)
    pipe = [
        PipelineStage(
            module,
            index,
            count,
            device,
            # told, not inferred: the trial pass that infers them upsets DDP's reducer
            input_args=_boundary(shape, sizes, index, count),
            output_args=_boundary(shape, sizes, index + 1, count),
            group=mesh.get_group("pp"),
        )
        for index, module in stages
    ]
    if len(pipe) > 1:
        return ScheduleInterleaved1F1B([*pipe], sizes.microbatches, loss_fn=cross_entropy)
    kind = ScheduleGPipe if sizes.schedule == "gpipe" else Schedule1F1B
    return kind(pipe[0], sizes.microbatches, loss_fn=cross_entropy)


class Whole:
    """Forward and backward of the whole model on every rank: no pipeline."""

    def __init__(self, module: nn.Module, microbatches: int) -> None:
        self.module, self.microbatches = module, microbatches

    def forward_backward(self, inputs: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        """Gradients of one batch in micro-batches, reduced over the replicas when ``last``. The mean loss."""
        total = torch.zeros((), device=inputs.device)
        for number, (part, wanted) in enumerate(
            zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True)
        ):
            with self._reducing(last and number == self.microbatches - 1):
                loss = cross_entropy(self.module(part), wanted) / self.microbatches
                loss.backward()
            total += loss.detach()
        return total

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.module(inputs), targets)

    def _reducing(self, reduce: bool) -> AbstractContextManager[None]:
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(reduce)
        elif isinstance(self.module, DistributedDataParallel) and not reduce:
            return self.module.no_sync()
        return nullcontext()


class Piped:
    """Forward and backward by the pipeline's schedule. Only ranks of the last stage know the loss."""

    def __init__(
        self,
        stages: list[tuple[int, nn.Module]],
        shape: Shape,
        sizes: Sizes,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.first = stages[0][0] == 0
        self.last = stages[-1][0] == sizes.pp * len(stages) - 1
        self._make = partial(_schedule, stages, shape, sizes, mesh, device)
        self._training = self._make()
        self._evaluation: Schedule | None = None

    def forward_backward(self, inputs: Tensor, targets: Tensor, *, last: bool) -> Tensor | None:
        """As :meth:`Whole.forward_backward`; the schedule reduces gradients at the end of every batch."""
        return self._run(self._training.step, inputs, targets)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        if self._evaluation is None:  # own schedule: one that alternates would set itself up anew each time
            self._evaluation = self._make()
        return self._run(self._evaluation.eval, inputs, targets)

    def _run(self, run: Callable[..., object], inputs: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        arguments = (inputs,) if self.first else ()
        if self.last:
            run(*arguments, target=targets, losses=losses)
            return torch.stack([loss.detach() for loss in losses]).mean()
        run(*arguments)
        return None
