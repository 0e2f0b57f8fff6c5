"""Pipelines of torch with unequal shares: real processes, and gradients that equal those of equal shares."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.session.test_shares import Job

COUNT = 12
TRAIN = """
import json, os, sys
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
import keepstep
from keepstep.integrations.pipelining import Pipeline

STAGES, COUNT, kind = 2, 12, os.environ["KIND"]
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], int(os.environ["WORLD_SIZE"])),
                        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
session = keepstep.Session()
replica, place = divmod(session.rank, STAGES)
replicas = session.world_size // STAGES
down = [dist.new_group(range(one * STAGES, (one + 1) * STAGES)) for one in range(replicas)][replica]
across = [dist.new_group(range(one, session.world_size, STAGES)) for one in range(STAGES)][place]
each = 2 if kind == "interleaved" else 1

class Part(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 8, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(1))

parts = []
for number in range(STAGES * each):
    torch.manual_seed(number)
    parts.append(Part())
own_parts = {place + STAGES * one: parts[place + STAGES * one] for one in range(each)}
if kind == "ddp":
    own_parts = {one: torch.nn.parallel.DistributedDataParallel(part, process_group=across)
                 for one, part in own_parts.items()}
if kind == "fsdp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (replicas, STAGES), mesh_dim_names=("dp", "pp"))["dp"]
    own_parts = {one: fully_shard(part, mesh=mesh) for one, part in own_parts.items()}
stages = [PipelineStage(part, one, len(parts), torch.device("cpu"), group=down) for one, part in own_parts.items()]
model = torch.nn.ModuleList(own_parts.values())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.restore(model=model, optimizer=optimizer)

def loss(output, target):
    return (output - target).square().mean() * session.weight

def make(n):
    if kind == "interleaved":
        return ScheduleInterleaved1F1B(stages, n, loss, scale_grads=False)
    one = ScheduleGPipe if kind == "gpipe" else Schedule1F1B
    return one(stages[0], n, loss, scale_grads=kind == "scaled")

pipeline = Pipeline(session, make, COUNT, replica, replicas, multiple_of=1 if kind == "gpipe" else STAGES)
for step in session.steps(0, 1 << 30):
    stop = torch.tensor([float(session.rank == 0 and sys.stdin.readline() == "end\\n")])
    dist.broadcast(stop, 0)
    if stop:
        session._shares.finish()
        break
    numbers, schedule = pipeline.share()
    data = torch.cat([torch.arange(24, dtype=torch.float64).reshape(3, 8).sin() + one / COUNT for one in numbers])
    losses = []
    inputs = () if place else (data,)
    schedule.step(*inputs, **({} if place < STAGES - 1 else {"target": data.cos(), "losses": losses}))
    for parameter in model.parameters() if kind not in ("ddp", "fsdp") else ():
        dist.all_reduce(parameter.grad, group=across)
        parameter.grad /= replicas
    optimizer.step()
    optimizer.zero_grad()
    everybody = [None] * session.world_size
    values = [getattr(one, "full_tensor", lambda: one)().tolist() for one in model.parameters()]
    dist.all_gather_object(everybody, (list(numbers), float(sum(losses)), values))
    if session.rank == 0:
        total = sum(one[1] for one in everybody) / replicas
        print(json.dumps([[one[0] for one in everybody], [total, [one[2] for one in everybody]]]), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with ExitStack() as stack:

        def begin(kind: str, replicas: int = 2) -> Job:
            job = Job(str(tmp_path), 2 * replicas, TRAIN, KIND=kind)
            stack.callback(job.close)
            return job

        yield begin


class Twin:
    """The same training on one rank, without a pipeline: the losses and all parameters after each step."""

    def __init__(self, parts: int) -> None:
        made: list[torch.nn.Linear] = []
        for number in range(parts):
            torch.manual_seed(number)
            made.append(torch.nn.Linear(8, 8, dtype=torch.float64))
        self._model = torch.nn.Sequential(*made)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)

    def step(self) -> list[Any]:
        rows = torch.arange(24, dtype=torch.float64).reshape(3, 8).sin()
        data = torch.stack([rows + number / COUNT for number in range(COUNT)])
        loss = (self._model(data) - data.cos()).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        parts = [[one.tolist() for one in part.parameters()] for part in self._model]
        stages = [[*itertools.chain(*parts[place::2])] for place in range(2)]
        return [loss.item(), [*stages, *stages]]


def flat(found: Any) -> list[float]:
    return [value for one in found for value in flat(one)] if isinstance(found, list) else [found]


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "interleaved", "ddp"])
def test_unequal_shares_give_the_same_model(start: Callable[..., Job], kind: str) -> None:
    job, twin = start(kind), Twin(4 if kind == "interleaved" else 2)
    orders = {0: [6, 6], 1: [10, 2], 4: [6, 6], 6: [4, 8]}
    seen: list[list[int]] = []
    for step in range(9):
        if step and step in orders:
            job.order(step, orders[step])
        shares, found = job.step()
        assert shares[0] == shares[1]  # both stages of a replica
        assert shares[2] == shares[3]
        assert sorted(shares[0] + shares[2]) == list(range(COUNT))
        seen.append([len(shares[0]), len(shares[2])])
        assert flat(found) == pytest.approx(flat(twin.step()), rel=1e-9)
    assert seen[0] == [6, 6]
    assert [10, 2] in seen
    assert seen[-1] == [4, 8]
    assert job.end() == [0] * 4


def test_shares_that_change_in_some_replicas_only(start: Callable[..., Job]) -> None:
    job = start("ddp", 3)
    orders = {1: [4, 6, 2], 4: [6, 4, 2], 7: [4, 4, 4]}
    seen: list[list[int]] = []
    for step in range(10):
        if step in orders:
            job.order(step, orders[step])
        shares, _ = job.step()
        seen.append([len(one) for one in shares[::2]])
    assert [one for one, before in zip(seen[1:], seen, strict=False) if one != before] == [*orders.values()]
    assert job.end() == [0] * 6


def test_shares_stay_equal_where_stages_meet_in_each_micro_batch(start: Callable[..., Job]) -> None:
    job = start("fsdp")
    for step in range(5):
        if step == 1:
            job.order(1, [8, 4])
        shares, _ = job.step()
        assert [len(one) for one in shares] == [6] * 4
    split = job.pages[0].split.newest(0)
    assert split is not None
    assert split[1]["movable"] is False
    assert job.end() == [0] * 4


def test_a_schedule_that_scales_gradients_itself_is_refused() -> None:
    from keepstep.integrations.pipelining import Pipeline

    class Schedule:
        scale_grads = True

    class Session:
        division = 0

        def share(self, *_: Any, **__: Any) -> range:
            return range(3)

    pipeline = Pipeline(Session(), lambda count: Schedule(), 12, 0, 4)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"give it scale_grads=False, and multiply the loss by session\.weight"
    ):
        pipeline.share()
