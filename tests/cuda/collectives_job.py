"""What torch can do with NCCL, each with values that are checked: prints one line for each, ``NAME ok`` or why not."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.stand_in.device import compute_values
from torch import nn

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CHECKS: dict[str, Callable[[], bool]] = {}


def check(function: Callable[[], bool]) -> Callable[[], bool]:
    CHECKS[function.__name__] = function
    return function


def cuda(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).cuda()


@check
def all_reduce_of_every_type() -> bool:
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.int64,
        torch.uint8,
    ):
        x = cuda(RANK + 1, 2, dtype=dtype)
        dist.all_reduce(x)
        if x.tolist() != [SIZE * (SIZE + 1) / 2, 2 * SIZE]:
            return False
    return True


@check
def all_reduce_of_every_reduction() -> bool:
    wanted = {
        dist.ReduceOp.MAX: SIZE,
        dist.ReduceOp.MIN: 1,
        dist.ReduceOp.AVG: (SIZE + 1) / 2,
        dist.ReduceOp.PRODUCT: torch.arange(1, SIZE + 1).prod().item(),
    }
    for op, result in wanted.items():
        x = cuda(RANK + 1)
        dist.all_reduce(x, op=op)
        if x.item() != result:
            return False
    x = cuda(RANK + 1)
    halved: Any = dist._make_nccl_premul_sum(0.5)  # pyright: ignore[reportAttributeAccessIssue]
    dist.all_reduce(x, op=halved)
    return x.item() == SIZE * (SIZE + 1) / 4


@check
def all_reduce_of_many_pieces() -> bool:
    x = torch.arange(700_001, dtype=torch.float32).cuda()
    dist.all_reduce(x)
    return torch.equal(x.cpu(), torch.arange(700_001, dtype=torch.float32) * SIZE)


@check
def broadcast() -> bool:
    x = cuda(RANK)
    dist.broadcast(x, SIZE - 1)
    return x.item() == SIZE - 1


@check
def reduce() -> bool:
    x = cuda(RANK)
    dist.reduce(x, 0)
    return x.item() == (SIZE * (SIZE - 1) / 2 if RANK == 0 else RANK)


@check
def all_gather() -> bool:
    out = [cuda(9) for _ in range(SIZE)]
    dist.all_gather(out, cuda(RANK))
    return [x.item() for x in out] == list(range(SIZE))


@check
def reduce_scatter() -> bool:
    out = cuda(0)
    dist.reduce_scatter_tensor(out, cuda(*[i + RANK for i in range(SIZE)]))
    return out.item() == SIZE * RANK + SIZE * (SIZE - 1) / 2


@check
def all_to_all() -> bool:
    even, uneven = cuda(*[0] * SIZE), cuda(*[0] * SIZE)
    dist.all_to_all_single(even, cuda(*[RANK * 10 + i for i in range(SIZE)]))
    dist.all_to_all_single(uneven, cuda(*[RANK] * SIZE), [1] * SIZE, [1] * SIZE)
    return even.tolist() == [rank * 10 + RANK for rank in range(SIZE)] and uneven.tolist() == list(
        range(SIZE)
    )


@check
def gather_and_scatter() -> bool:
    out = [cuda(9) for _ in range(SIZE)] if RANK == 0 else None
    dist.gather(cuda(RANK), out, 0)
    y = cuda(0)
    dist.scatter(y, [cuda(i) for i in range(SIZE)] if RANK == 0 else None, 0)
    return y.item() == RANK and (out is None or [x.item() for x in out] == list(range(SIZE)))


@check
def send_and_receive() -> bool:
    x, y = cuda(RANK), cuda(0)
    if RANK % 2 == 0:
        dist.send(x, RANK + 1)
        dist.recv(y, RANK + 1)
    else:
        dist.recv(y, RANK - 1)
        dist.send(x, RANK - 1)
    return y.item() == RANK ^ 1


@check
def messages_round_a_ring() -> bool:
    x, y = torch.full((300_000,), float(RANK)).cuda(), torch.zeros(300_000).cuda()
    ops = [dist.P2POp(dist.isend, x, (RANK + 1) % SIZE), dist.P2POp(dist.irecv, y, (RANK - 1) % SIZE)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return set(y.tolist()) == {float((RANK - 1) % SIZE)}


@check
def groups_of_every_other_rank() -> bool:
    groups = [dist.new_group([rank for rank in range(SIZE) if rank % 2 == half]) for half in range(2)]
    x = cuda(1)
    dist.all_reduce(x, group=groups[RANK % 2])
    return x.item() == SIZE // 2


@check
def split_of_a_group() -> bool:
    world = dist.group.WORLD
    assert world is not None
    half = dist.split_group(world, [[r for r in range(SIZE) if r % 2 == k] for k in range(2)])
    x = cuda(RANK)
    dist.all_reduce(x, group=half)
    return x.item() == sum(rank for rank in range(SIZE) if rank % 2 == RANK % 2)


@check
def objects() -> bool:
    found: list[object] = [None] * SIZE
    dist.all_gather_object(found, {"rank": RANK})
    one = [{"from": RANK}]
    dist.broadcast_object_list(one, SIZE - 1)
    return found == [{"rank": rank} for rank in range(SIZE)] and one == [{"from": SIZE - 1}]


@check
def coalesced() -> bool:
    tensors = [cuda(RANK), cuda(1)]
    dist.all_reduce_coalesced(tensors)
    dist.barrier()
    return [x.item() for x in tensors] == [SIZE * (SIZE - 1) / 2, SIZE]


@check
def functional() -> bool:
    import torch.distributed._functional_collectives as functional

    world = dist.group.WORLD
    assert world is not None
    a = functional.all_reduce(cuda(1), "sum", world)
    b = functional.all_gather_tensor(cuda(RANK), 0, world)
    c = functional.reduce_scatter_tensor(cuda(*[1] * SIZE), "sum", 0, world)
    return (a.tolist(), b.tolist(), c.tolist()) == ([SIZE], list(range(SIZE)), [SIZE])


def _training(wrap: Callable[[nn.Module], nn.Module]) -> bool:
    """Whether losses are those of one process on the CPU that has all samples."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 1))
    twin = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 1))
    twin.load_state_dict(net.state_dict())
    model = wrap(net.cuda())
    ours = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.05)
    for step in range(4):
        samples = torch.randn(SIZE * 4, 16, generator=torch.Generator().manual_seed(step))
        mine = samples[RANK * 4 : RANK * 4 + 4]
        loss = (model(mine.cuda()) - mine.sum(1, keepdim=True).cuda()).pow(2).mean()
        loss.backward()
        ours.step()
        ours.zero_grad()
        alone = (twin(samples) - samples.sum(1, keepdim=True)).pow(2).mean()
        alone.backward()
        theirs.step()
        theirs.zero_grad()
        together = loss.detach().clone()
        dist.all_reduce(together)
        if not torch.isclose(together.cpu() / SIZE, alone, rtol=1e-4) or alone.item() == 0:
            raise AssertionError(f"step {step}: loss {together.item() / SIZE}, on one CPU {alone.item()}")
    return True


@check
def ddp_trains() -> bool:
    return _training(nn.parallel.DistributedDataParallel)


@check
def fsdp2_trains() -> bool:
    from torch.distributed.fsdp import fully_shard

    def wrap(module: nn.Module) -> nn.Module:
        for layer in (module[0], module[3]):  # type: ignore[index]
            fully_shard(layer)
        fully_shard(module)
        return module

    return _training(wrap)


@check
def tensor_parallel() -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    samples = torch.randn(4, 8)
    wanted = net(samples)
    model = parallelize_module(
        net.cuda(), init_device_mesh("cuda", (SIZE,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    return torch.allclose(model(samples.cuda()).detach().cpu(), wanted, atol=1e-5)


def main() -> None:
    compute_values()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(sys.argv[1], device_id=device)
    for name, function in CHECKS.items():
        try:
            result = "ok" if function() else "WRONG"
        except Exception as error:
            traceback.print_exc()
            result = f"FAILED {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        print(f"rank {RANK}: {name} {result}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
