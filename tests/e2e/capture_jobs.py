"""Small jobs that the capture tests run with and without the probe: ``capture_jobs.py JOB RESULT_FILE``.

Every job returns what it computed (digests of tensors) and what torch's own profiler counted. It imports nothing of
keepstep.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Job = Callable[[int, int], Any]


def digest(*tensors: torch.Tensor | None) -> str:
    """Of the exact bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        assert tensor is not None
        found.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def plain(rank: int, world: int) -> Any:
    """Every public collective and point-to-point call, sync and async."""
    peer = (rank + 1) % world
    mine = torch.arange(8, dtype=torch.float32) + rank
    out: list[torch.Tensor] = []

    for asynchronous in (False, True):
        works = []
        reduced = mine.clone()
        works.append(dist.all_reduce(reduced, async_op=asynchronous))
        sent = mine.clone()
        works.append(dist.broadcast(sent, 0, async_op=asynchronous))
        at_root = mine.clone()
        works.append(dist.reduce(at_root, 0, async_op=asynchronous))
        listed = [torch.zeros(8) for _ in range(world)]
        works.append(dist.all_gather(listed, mine, async_op=asynchronous))
        gathered = torch.zeros(8 * world)
        works.append(dist.all_gather_into_tensor(gathered, mine, async_op=asynchronous))
        scattered = torch.zeros(8 // world)
        works.append(dist.reduce_scatter_tensor(scattered, mine.clone(), async_op=asynchronous))
        parts = torch.zeros(4)
        works.append(dist.reduce_scatter(parts, list(mine.clone().chunk(world)), async_op=asynchronous))
        collected = [torch.zeros(8) for _ in range(world)] if rank == 0 else None
        works.append(dist.gather(mine, collected, 0, async_op=asynchronous))
        given = torch.zeros(4)
        source = list(mine.clone().chunk(world)) if rank == 0 else None
        works.append(dist.scatter(given, source, 0, async_op=asynchronous))
        swapped = torch.zeros(8)
        works.append(dist.all_to_all_single(swapped, mine, async_op=asynchronous))
        for work in works:
            if work is not None:
                assert isinstance(work, dist.Work)
                work.wait()
        out += [reduced, sent, *listed, gathered, scattered, parts, given, swapped]
        if rank == 0:
            out += [at_root, *(collected or ())]
    dist.barrier()
    dist.monitored_barrier()

    received = torch.zeros(8)
    if rank == 0:
        dist.send(mine, peer)
        dist.recv(received, peer, tag=3)
    else:
        dist.recv(received, peer)
        dist.send(mine, peer, tag=3)
    both = [torch.zeros(8), torch.zeros(8)]
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, both[0], peer)]
    )
    for request in requests:
        request.wait()
    if rank == 0:
        dist.recv(both[1])
    else:
        dist.send(mine, 0)
    out += [received, *both]

    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    told = [rank]
    dist.broadcast_object_list(told, 1)

    reversed_group = dist.new_group([1, 0])
    dist.all_reduce(mine, group=reversed_group)
    work = dist.all_reduce(mine, async_op=True)
    assert work is not None
    future = work.get_future()
    future.wait()
    out.append(mine)
    return {"digest": digest(*out), "objects": objects, "told": told}


def _model(width: int = 64) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 8))


def _steps(model: nn.Module, rank: int, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def ddp(rank: int, _: int) -> Any:
    """DDP's C++ reducer, several buckets, buffers, gradient accumulation."""
    module = nn.Sequential(_model(), nn.BatchNorm1d(8))
    model = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.01, find_unused_parameters=False)
    assert isinstance(model.reducer, dist.Reducer)
    losses = _steps(model, rank)
    with model.no_sync():
        model(torch.ones(4, 32)).sum().backward()
    return {"digest": digest(*losses, *(p for p in model.parameters()))}


def ddp_unprofiled(rank: int, world: int) -> Any:
    """The same with nobody looking at the operators; and once with a mode that counts them."""
    from torch.distributed.tensor.debug import CommDebugMode

    result = ddp(rank, world)
    model = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.01)
    model(torch.ones(4, 32)).sum().backward()
    with CommDebugMode() as mode:
        model(torch.ones(4, 32)).sum().backward()
    return {**result, "counted": {str(op): count for op, count in mode.get_comm_counts().items()}}


def fsdp2(rank: int, world: int) -> Any:
    """FSDP2 on a CPU mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (world,))
    model = _model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses, shards = _steps(model, rank), []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        shards.append(parameter.to_local())
    return {"digest": digest(*losses, *shards)}


def pipeline(rank: int, world: int) -> Any:
    """One stage per rank, 1F1B, four micro-batches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(rank)
    layer = nn.Linear(16, 16)
    stage = PipelineStage(layer, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    batch = torch.arange(128, dtype=torch.float32).reshape(8, 16) / 128
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    for _ in range(2):
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)
        optimizer.step()
    return {"digest": digest(*(p.grad for p in layer.parameters()))}


def tensor_parallel(rank: int, world: int) -> Any:
    """DTensor: functional collectives, resolved by name in C++."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model = parallelize_module(_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = []
    for _ in range(2):
        loss = model(torch.ones(4, 32)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    whole = DTensor.from_local(torch.full((2, 4), float(rank)), mesh, [Shard(0)]).full_tensor()
    return {"digest": digest(*losses, whole)}


def _masked(error: BaseException) -> str:
    return re.sub(r"\d+|0x[0-9a-f]+", "N", f"{type(error).__module__}.{type(error).__name__}: {error}")


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return _masked(error)
    return "nothing"


def peer_dies(rank: int, _: int) -> Any:
    """Rank 1 dies; what rank 0 sees in a plain call and in a backward."""
    model = nn.parallel.DistributedDataParallel(_model())
    loss = model(torch.ones(2, 32)).sum()
    dist.barrier()
    if rank == 1:
        os._exit(0)
    seen = [_raised(lambda: dist.all_reduce(torch.ones(4))), _raised(loss.backward)]
    # Which of the messages about a lost connection comes is up to the moment; which type, is not.
    return {"seen": [text.split(":")[0] for text in seen], "full": seen}


def regroup(rank: int, world: int) -> Any:
    """Groups destroyed and made again; nothing of the old ones stays."""
    from torch._C._distributed_c10d import _resolve_process_group
    from torch.distributed.device_mesh import init_device_mesh

    found: dict[str, Any] = {}
    alive = []
    # The first group's store for all rounds: on another port somebody else may be, and torch's own store on the
    # same port again now and then meets its predecessor.
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()

    def again(name: str) -> None:
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world)

    for round_ in range(2):
        again(f"round{round_}")
        group = dist.group.WORLD
        assert type(group) is dist.ProcessGroup
        assert _resolve_process_group(group.group_name) is group
        assert dist.distributed_c10d._get_process_group_store(group) is not None
        assert group.get_group_store() is not None
        pair = dist.new_group([0, 1], group_desc="pair")
        assert isinstance(pair, dist.ProcessGroup)
        mesh = init_device_mesh("cpu", (world,))
        value = torch.ones(4) * (rank + 1)
        dist.all_reduce(value, group=pair)
        dist.all_reduce(value, group=mesh.get_group())
        model = nn.parallel.DistributedDataParallel(_model())
        model(torch.ones(2, 32)).sum().backward()
        found[f"round{round_}"] = value.tolist()
        dist.destroy_process_group(pair)
        dist.all_reduce(value)
        dist.barrier()
        alive += [weakref.ref(group), weakref.ref(pair)]
        dist.destroy_process_group()
        del group, pair, mesh, model
        gc.collect()
    found["alive"] = [reference() is not None for reference in alive]
    found["threads"] = threading.active_count()
    again("last")
    return found


def compiled(rank: int, _: int) -> Any:
    """A compiled graph with functional collectives in it."""
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    assert group is not None

    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", group.group_name) + 1

    x = torch.ones(4) * (rank + 1)
    eager = step(x)
    graph = torch.compile(step, backend="aot_eager", fullgraph=True)
    found = graph(x)
    return {"digest": digest(eager, found), "equal": bool(torch.equal(eager, found))}


def compiled_ddp(rank: int, _: int) -> Any:
    """DDP inside a compiled module, as in the field; a second shape makes it compile again in the middle."""
    model = nn.parallel.DistributedDataParallel(_model())
    graph = torch.compile(model, backend="eager", dynamic=False)
    assert isinstance(graph, nn.Module)
    losses = _steps(graph, rank)
    losses.append(graph(torch.ones(5, 32)).sum().detach())
    return {"digest": digest(*losses, *(p for p in model.parameters()))}


JOBS: dict[str, Job] = {
    job.__name__: job
    for job in (
        plain,
        ddp,
        ddp_unprofiled,
        fsdp2,
        pipeline,
        tensor_parallel,
        peer_dies,
        regroup,
        compiled,
        compiled_ddp,
    )
}


def main() -> None:
    name, result_file = sys.argv[1:3]
    torch.set_num_threads(1)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiled = name in ("plain", "ddp", "fsdp2", "pipeline", "tensor_parallel")
    if profiled:
        profile.start()
    dist.init_process_group("gloo")
    result = JOBS[name](dist.get_rank(), dist.get_world_size())
    if name != "peer_dies":
        dist.barrier()  # nobody closes connections that a peer still uses
    if profiled:
        profile.stop()
        events = profile.events()
        assert events is not None
        result["profiled"] = Counter(e.name for e in events if e.name.startswith("c10d::"))
    with open(result_file, "w") as file:
        json.dump(result, file)
    if name != "peer_dies":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
