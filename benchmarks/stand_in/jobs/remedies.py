"""What the bench of remedies trains over NCCL: a Session whose host runs ahead, on devices and links that turn slow.

    remedies.py LAYOUT STEPS FOLDER

LAYOUT: ``replicas``, DDP whose ranks share out the micro-batches of each step; ``megatron``, a GPT of megatron-core on
two pipelines of two stages, which do the same by its calculator; or ``pipelines``, of two stages as well, of which the
data-parallel pairs (0, 2) and (1, 3) exchange much and the stages little. Devices and links stay where they are when
ranks move: FOLDER/bad says how slow those of a place are, ``{"devices": {"node-1/0": 2.0}, "links": [["node-0",
"node-2", 700]]}`` (percent more time). Each rank writes FOLDER/rows-RANK, a line of JSON a step
(`Row`), once its device has the value, so that the host is up to three steps ahead. Where FOLDER/enough has the number
of a step, all end there. ``PACE_S`` in the environment is the least time of a host's step on the wall.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from benchmarks.gpu.device import take_device
from benchmarks.stand_in.device import MOST_RANKS, Device, compute_values
from benchmarks.stand_in.jobs.framework_layouts import (
    SEQUENCE,
    WORDS,
    gpt_loss,
    megatron_gpt,
    torch_optimizer,
)
from torch import nn

import keepstep

AHEAD = 3  # steps
WIDTH, BATCH = 64, 8
EACH = 8  # micro-batches for each replica
BALLAST = 1 << 21  # numbers that data-parallel pairs of pipelines reduce besides their gradients
PACE_S = float(os.environ.get("PACE_S", "0"))
PLACE = f"{os.environ.get('KEEPSTEP_NODE_NAME', '')}/{os.environ.get('LOCAL_RANK', '')}"


class Row(NamedTuple):
    """A step of one rank."""

    step: int
    incarnation: int
    share: int  # micro-batches
    launches: int  # kernels
    slowness: float
    value: str  # the loss of all ranks ("replicas"), or a sum of some of the rank's parameters, as hex
    at_s: float  # Unix time


class Machine:
    """The rank's device and its links, as slow as its place is."""

    def __init__(self, session: keepstep.Session, folder: Path) -> None:
        self.device, self.slowness = Device(), 1.0
        self._rank, self._file = session.rank, folder / "bad"
        self._text: str | None = None
        store: Any = dist.distributed_c10d._get_default_store()
        store.set(f"place {session.incarnation} {session.rank}", PLACE)
        told = [
            store.get(f"place {session.incarnation} {rank}").decode() for rank in range(session.world_size)
        ]
        self._nodes = [place.rpartition("/")[0] for place in told]

    def begin(self, stream: int) -> None:
        """Call it first in a step."""
        text = self._file.read_text() if self._file.exists() else "{}"
        if text == self._text:
            return
        self._text, bad = text, json.loads(text)
        self.slowness = bad.get("devices", {}).get(PLACE, 1.0)
        percent = {frozenset(ends): more for *ends, more in bad.get("links", [])}
        mine = self._nodes[self._rank]
        for peer in range(MOST_RANKS):
            ends = frozenset((mine, self._nodes[peer])) if peer < len(self._nodes) else frozenset[str]()
            self.device.slow_pair(stream, self._rank, peer, percent.get(ends, 0))
        self.device.slow_down(self.slowness)


class Late(NamedTuple):
    """A row whose value is on its way to the host."""

    row: Row
    value: torch.Tensor
    has_come: torch.cuda.Event


class Notes:
    """The file of rows."""

    def __init__(self, path: Path) -> None:
        self._path, self._late = path, deque[Late]()

    def add(self, row: Row, value: torch.Tensor) -> None:
        copy = torch.empty((), dtype=torch.float64, pin_memory=True).copy_(value.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._late.append(Late(row, copy, event))
        self.write(AHEAD)

    def write(self, most: int) -> None:
        """Write what has come, and wait while more than ``most`` are on their way."""
        while self._late and (len(self._late) > most or self._late[0].has_come.query()):
            row, value, event = self._late.popleft()
            event.synchronize()
            with self._path.open("a") as file:
                file.write(json.dumps(row._replace(value=float(value).hex(), at_s=time.time())) + "\n")


def drawn(step: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 1_000_003 + number)
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator).pin_memory()


def layers(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, width, dtype=torch.float64), nn.Tanh()).cuda()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


class Replicas:
    """DDP; each rank is a replica."""

    def __init__(self, session: keepstep.Session) -> None:
        self._session = session
        self.model: nn.Module = nn.parallel.DistributedDataParallel(layers(1), bucket_cap_mb=0.01)
        self.optimizer = self.torch_optimizer = sgd(self.model)

    def step(self, step: int) -> tuple[int, torch.Tensor]:
        """Forward and backward; the rank's micro-batches, and the row's value."""
        total = torch.zeros((), dtype=torch.float64, device="cuda")
        share = 0
        for number in self._session.microbatches(EACH * self._session.world_size, self.model):
            share += 1
            x = drawn(step, number).cuda(non_blocking=True)
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean() * self._session.weight
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        return share, total / self._session.world_size


class Megatron:
    """A GPT of megatron-core. Ranks 0 and 1 are the first stage of the two pipelines, 2 and 3 the last."""

    def __init__(self, session: keepstep.Session) -> None:
        from megatron.core import num_microbatches_calculator, parallel_state  # pyright: ignore[reportMissingImports]
        from megatron.core.pipeline_parallel import get_forward_backward_func  # pyright: ignore[reportMissingImports]

        from keepstep.integrations.megatron import MicroBatches

        config, self.model, self.optimizer = megatron_gpt(1, 2, WIDTH, optimizer="sgd")
        self.torch_optimizer = torch_optimizer(self.optimizer)
        self._calculator = num_microbatches_calculator
        replica = parallel_state.get_data_parallel_rank()
        replicas = parallel_state.get_data_parallel_world_size()
        self._calculator.init_num_microbatches_calculator(session.rank, None, EACH * replicas, 1, replicas)
        self._batches = MicroBatches(session, config, replica, replicas)
        self._schedule, self._at = get_forward_backward_func(), 0

    def step(self, step: int) -> tuple[int, torch.Tensor]:
        self._at = step
        self._calculator.update_num_microbatches(step)
        numbers = self._batches.share()
        self.model.zero_grad_buffer()
        self._schedule(
            forward_step_func=self._forward,
            data_iterator=iter(numbers),
            model=[self.model],
            num_microbatches=self._calculator.get_num_microbatches(),
            seq_length=SEQUENCE,
            micro_batch_size=1,
        )
        weights: torch.Tensor = next(iter(self.model.parameters()))
        return len(numbers), weights.detach().double().sum()

    def _forward(self, numbers: Iterator[int], model: nn.Module) -> tuple[torch.Tensor, Any]:
        generator = torch.Generator().manual_seed(self._at * 1_000_003 + next(numbers))
        words = torch.randint(WORDS, (1, SEQUENCE), generator=generator)
        return gpt_loss(model, words.pin_memory().cuda(non_blocking=True))


class Pipelines:
    """Two pipelines of two stages, without micro-batches."""

    def __init__(self, session: keepstep.Session) -> None:
        self.replica, self.stage = divmod(session.rank, 2)
        self._peer = session.rank ^ 1
        self._over: Any = [dist.new_group([0, 2]), dist.new_group([1, 3])][self.stage]
        self._along: Any = [dist.new_group([0, 1]), dist.new_group([2, 3])][self.replica]
        self.model = layers(WIDTH)
        self.optimizer = self.torch_optimizer = sgd(self.model)
        self._ballast = torch.zeros(BALLAST, dtype=torch.float64, device="cuda")

    def step(self, step: int) -> tuple[int, torch.Tensor]:
        if self.stage == 0:
            made = self.model(drawn(step, self.replica).cuda(non_blocking=True))
            dist.send(made.detach(), self._peer, group=self._along)
            gradient = torch.empty_like(made)
            dist.recv(gradient, self._peer, group=self._along)
            made.backward(gradient)
        else:
            x = torch.empty(BATCH, WIDTH, dtype=torch.float64, device="cuda")
            dist.recv(x, self._peer, group=self._along)
            x.requires_grad_()
            self.model(x).square().mean().backward()
            assert x.grad is not None
            dist.send(x.grad, self._peer, group=self._along)
        for one in self.model.parameters():
            assert one.grad is not None
            dist.all_reduce(one.grad, dist.ReduceOp.AVG, group=self._over)
        dist.all_reduce(self._ballast, group=self._over)
        weights: torch.Tensor = next(iter(self.model.parameters()))
        return 0, weights.detach().sum()


LAYOUTS = {"replicas": Replicas, "megatron": Megatron, "pipelines": Pipelines}


@keepstep.resilient
def train(session: keepstep.Session, layout: str, total: int, folder: Path) -> None:
    torch.manual_seed(7)
    machine = Machine(session, folder)
    stream = torch.cuda.current_stream().cuda_stream
    job = LAYOUTS[layout](session)
    notes = Notes(folder / f"rows-{session.rank}")
    enough = folder / "enough"
    start = session.restore(model=job.model, optimizer=job.torch_optimizer)
    for step in session.steps(start, total):
        if enough.exists() and step >= int(enough.read_text()):
            break
        next_s = time.monotonic() + PACE_S
        machine.begin(stream)
        before = machine.device.count("launches")
        share, value = job.step(step)
        job.optimizer.step()
        machine.device.mark(stream, step)
        job.optimizer.zero_grad()
        launches = machine.device.count("launches") - before
        row = Row(step, session.incarnation, share, launches, machine.slowness, "", 0.0)
        notes.add(row, value)
        time.sleep(max(next_s - time.monotonic(), 0.0))
    notes.write(0)


if __name__ == "__main__":
    compute_values()
    take_device(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("nccl")
    train(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    dist.destroy_process_group()
