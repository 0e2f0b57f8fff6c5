"""Snapshots of states on the stand-in GPU, taken, killed and restored; a line of JSON for each seed.

    python snapshots.py states|waits|kills FIRST LAST

Every rank is a fork of this process, which never uses its device. `benchmarks/stand_in/snapshots.py` starts it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.stand_in.device import Device, compute_values
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from keepstep.checkpoint.api import RandomState
from keepstep.checkpoint.memory.cache import Cache
from keepstep.checkpoint.memory.cache_server import CacheServer
from keepstep.checkpoint.snapshot import Snapshots, Worker
from keepstep.checkpoint.state import DTYPES

RANKS = 2
_LIMIT_BYTES = 2 << 30
_KERNEL_US = 300
_STEPS = 8  # of a training that counts waits
_PATIENCE_S = 120


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """A process that does ``work``, given where it may write; and where that can be read."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    code = 1
    try:
        os.close(ours)
        work(theirs)
        code = 0
    except BaseException:
        failed = traceback.format_exc().replace(f"{os.getcwd()}/", "")
        os.write(theirs, json.dumps({"failed": failed[-2000:]}).encode() + b"\n")
    finally:
        os._exit(code)


@contextmanager
def cache() -> Iterator[str]:
    """The address of a node's cache, which a process of its own keeps, as the launcher does."""

    def serve(out: int) -> None:
        async def forever() -> None:
            server = CacheServer(Cache(_LIMIT_BYTES, None), print)
            os.write(out, server.address.encode())
            await asyncio.Event().wait()

        asyncio.run(forever())

    pid, address = forked(serve)
    try:
        yield os.read(address, 1000).decode()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(address)


class Rank:
    """One rank, in a process of its own: its device, its groups, its snapshots."""

    def __init__(self, rank: int, address: str, incarnation: int, meeting: str, backend: str) -> None:
        os.environ["RANK"] = str(rank)
        compute_values()
        torch.cuda.set_device(rank)
        self.rank, self.device, self.incarnation = rank, Device(), incarnation
        self.device.kernel_us(_KERNEL_US)
        store = dist.FileStore(f"{meeting}-{incarnation}", RANKS)
        dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS)
        self._gloo = dist.new_group(backend="gloo")
        worker = Worker(rank, RANKS, RANKS, incarnation)
        self.snapshots = Snapshots(address, worker, self.gather, store=lambda: store)

    def gather(self, row: Any) -> list[Any]:
        """What each rank gives."""
        rows: list[Any] = [None] * RANKS
        dist.all_gather_object(rows, row, group=self._gloo)
        return rows


def ranks(
    seed: int,
    address: str,
    incarnation: int,
    meeting: str,
    work: Callable[[Rank, int, int], None],
    backend: str,
) -> list[tuple[int, int]]:
    """Processes and where they are read, by rank."""

    def one(rank: int) -> Callable[[int], None]:
        return lambda out: work(Rank(rank, address, incarnation, meeting, backend), seed, out)

    return [forked(one(rank)) for rank in range(RANKS)]


def results(started: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """What each rank has written last, once all have ended."""
    found: list[dict[str, Any]] = []
    until_s = time.monotonic() + _PATIENCE_S
    for pid, out in started:
        text = b""
        while (left_s := until_s - time.monotonic()) > 0 and select.select([out], [], [], left_s)[0]:
            if not (more := os.read(out, 1 << 16)):
                break
            text += more
        else:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(out)
        lines = text.decode().splitlines()
        told = json.loads(lines[-1]) if lines else {}
        found.append({"failed": f"ended with {status}"} if status and not told.get("failed") else told)
    return found


def tell(out: int, **told: Any) -> None:
    os.write(out, json.dumps(told).encode() + b"\n")


def _bytes(draw: random.Random, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` elements of any bits, that a kernel writes."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    size = torch.empty(0, dtype=dtype).element_size()
    drawn = torch.randint(
        0, 2 if dtype == torch.bool else 256, (count * size,), generator=generator, dtype=torch.uint8
    )
    on_device = (
        drawn.pin_memory()
        .cuda(non_blocking=True)
        .bitwise_xor(torch.zeros((), dtype=torch.uint8, device="cuda"))
    )
    return on_device.view(dtype)


def _strided(draw: random.Random, whole: torch.Tensor) -> torch.Tensor:
    """A view of a flat tensor: as it is, a part, every other, transposed, expanded, one element, none."""
    count = whole.numel()
    kind = draw.choice(("whole", "part", "steps", "transposed", "expanded", "scalar", "empty"))
    if kind == "part":
        return whole[draw.randrange(count) :]
    if kind == "steps":
        return whole[draw.randrange(2) :: draw.randrange(2, 5)]
    if kind == "transposed":
        return whole[: count // 4 * 4].view(4, -1).t()
    if kind == "expanded":
        return whole[:1].expand(draw.randrange(1, 6))
    if kind == "scalar":
        return whole[draw.randrange(count)]
    return whole[:0].view(0, 3) if kind == "empty" else whole


def drawn_tensors(draw: random.Random) -> dict[str, Any]:
    """Tensors of any type, shape and stride, some of which share their memory, nested, some on the host."""
    found: dict[str, Any] = {}
    wholes: list[torch.Tensor] = []
    for number in range(draw.randrange(3, 12)):
        if wholes and draw.random() < 0.35:
            whole = draw.choice(wholes)
        else:
            dtype = DTYPES[draw.choice(sorted(DTYPES))]
            whole = _bytes(draw, draw.choice((1, 7, 64, 1000, 70_001, 1 << 20)), dtype)
            wholes.append(whole.cpu() if draw.random() < 0.15 else whole)
            whole = wholes[-1]
        view = _strided(draw, whole)
        nest = draw.choice(("plain", "list", "tuple", "dict"))
        name = f"t{number}"
        found[name] = {
            "plain": view,
            "list": [view, number],
            "tuple": (view,),
            "dict": {"in": view, "at": 0.1},
        }[nest]
    return found


def drawn_training(draw: random.Random, wrap: str) -> tuple[nn.Module | None, Any, Callable[[], None]]:
    """A model, its optimizer, and a step of it; the same on all ranks but for its data."""
    if wrap == "none":
        return None, None, lambda: None
    torch.manual_seed(draw.randrange(1 << 30))
    width = draw.choice((16, 64, 256))
    model: nn.Module = nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, width)
    )
    if draw.random() < 0.3:
        model[3].weight = model[0].weight  # pyright: ignore
    model = model.cuda()
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    elif wrap == "fsdp2":
        fully_shard(model)
    name, foreach = draw.choice(("sgd", "adam", "adamw")), draw.random() < 0.5
    made: Any = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=foreach),
        "adam": lambda: torch.optim.Adam(model.parameters(), foreach=foreach, amsgrad=draw.random() < 0.5),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), foreach=foreach),
    }[name]
    optimizer = made()
    data = torch.randn(8, width).cuda()

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors of a state, in its order."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        return [local.detach()]
    if isinstance(value, dict):
        return [one for part in value.values() for one in tensors_of(part)]
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in tensors_of(part)]
    return tensors_of(value.state_dict()) if hasattr(value, "state_dict") else []


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def image(state: Any) -> list[torch.Tensor]:
    """The bits of all tensors as they are when the device comes to it; nothing is waited for."""
    each = (torch.view_as_real(one) if one.dtype == torch.complex128 else one for one in tensors_of(state))
    return [one.view(_BITS[one.element_size()]).clone(memory_format=torch.contiguous_format) for one in each]


def shared(state: Any) -> list[int]:
    """For each tensor, the first one with the same storage."""
    found = [one.untyped_storage().data_ptr() for one in tensors_of(state)]
    return [found.index(one) for one in found]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.cpu(), b.cpu()) for a, b in zip(left, right, strict=True)
    )


def scramble(state: Any) -> None:
    """Overwrite every byte of a state's storages."""
    for one in tensors_of(state):
        torch.empty(0, dtype=torch.uint8, device=one.device).set_(one.untyped_storage()).fill_(0xA5)


def states(rank: Rank, seed: int, out: int) -> None:
    """Save a drawn state while its producing kernels are still to run, go on training, and bring it back."""
    draw = random.Random(seed)
    wrap = draw.choice(("none", "plain", "ddp", "fsdp2"))
    model, optimizer, step = drawn_training(draw, wrap)
    state: dict[str, Any] = {"random": RandomState(), "tensors": drawn_tensors(draw), "number": seed}
    if model is not None:
        state |= {"model": model, "optimizer": optimizer}
    for _ in range(draw.randrange(1, 4)):
        step()
    truth, sharing, overlap = image(state), shared(state), draw.random() < 0.8
    rank.snapshots.save(state, 1, overlap=overlap)
    scramble(state["tensors"])  # no optimizer's: they are there when `save` returns
    step()
    rank.snapshots.wait()
    scramble(state["tensors"])
    if model is not None:
        scramble({"m": model, "o": optimizer})
    state["number"] = -1
    restored = rank.snapshots.load(state)
    found = image(state)
    wrong = [
        f"{i}: {tensors_of(state)[i].dtype}"
        for i, (a, b) in enumerate(zip(truth, found, strict=True))
        if not same([a], [b])
    ]
    right = same(truth, found) and shared(state) == sharing and state["number"] == seed
    nbytes = sum(one.nbytes for one in truth)
    tell(
        out,
        wrap=wrap,
        overlap=overlap,
        tensors=len(truth),
        bytes=nbytes,
        restored=restored,
        right=right,
        wrong=wrong,
    )
    rank.snapshots.close()


def waits(rank: Rank, seed: int, out: int) -> None:
    """What snapshots add to the waits on the training's streams, and of the host for them, over some steps."""
    draw = random.Random(seed)
    wrap = draw.choice(("plain", "ddp", "fsdp2"))
    model, optimizer, step = drawn_training(draw, wrap)
    state = {"model": model, "optimizer": optimizer, "number": 0}
    streams = _streams()
    saved = 0

    def counted(saves: bool) -> tuple[list[int], int]:
        nonlocal saved
        before, events = [rank.device.waits_of(one) for one in streams], rank.device.count("events")
        for _ in range(_STEPS):
            step()
            if saves:
                saved += 1
                rank.snapshots.save(state, saved)
        rank.snapshots.wait()
        after = [rank.device.waits_of(one) for one in streams]
        moved = [sum(b[i] - a[i] for a, b in zip(before, after, strict=True)) for i in range(2)]
        return moved, rank.device.count("events") - events

    for _ in range(2):  # what is made once: a stream, memory; DDP measures its first ten steps itself
        counted(True)
    without, with_ = counted(False), counted(True)
    added = [b - a for a, b in zip(without[0], with_[0], strict=True)]
    tell(out, wrap=wrap, steps=_STEPS, added=added, right=added == [0, 0], events=[without[1], with_[1]])
    rank.snapshots.close()


def _streams() -> list[int]:
    """The training's: the legacy one, on which it computes, and all that torch keeps in its pools."""
    pools = {torch.cuda.Stream(priority=priority).cuda_stream for priority in (0, -1) for _ in range(64)}
    return [0, *sorted(pools)]


def _trained(seed: int, rank: int) -> tuple[dict[str, Any], Callable[[], None]]:
    """A training of 4 to 40 MB whose every step changes every byte that it saves, by rank and step."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width = draw.choice((512, 1024, 1536))
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width // 4)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), foreach=draw.random() < 0.5)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}

    def step() -> None:
        state["step"] += 1
        generator = torch.Generator().manual_seed(1000 * state["step"] + rank)
        data = torch.randn(8, width, generator=generator).pin_memory().cuda(non_blocking=True)
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return state, step


def trains(rank: Rank, seed: int, out: int) -> None:
    """Train and save each step, until somebody kills it."""
    state, step = _trained(seed, rank.rank)
    for _ in range(40):
        step()
        dist.barrier()  # as a training's own collectives do, it keeps the ranks together
        os.write(out, b"s")
        rank.snapshots.save(state, state["step"])
    raise RuntimeError("nobody has killed it")


def restores(rank: Rank, seed: int, out: int) -> None:
    """Restore, and train anew to the same step: both have the same bytes."""
    state, step = _trained(seed, rank.rank)
    step()
    restored = rank.snapshots.load(state)
    found = image(state)
    torch.cuda.synchronize()
    again, step = _trained(seed, rank.rank)
    for _ in range(restored or 0):
        step()
    right = bool(restored) and state["step"] == restored and same(found, image(again))
    tell(out, restored=restored, right=right, bytes=sum(one.nbytes for one in found))
    rank.snapshots.close()


def kill(seed: int, address: str, meeting: str) -> dict[str, Any]:
    """Kill one rank at a random moment of a save, the other soon after, and restore."""
    draw = random.Random(seed + 1_000_000)
    started = ranks(seed, address, 0, meeting, trains, "gloo")
    victim, save = draw.randrange(RANKS), draw.randrange(3, 8)
    began: list[list[float]] = [[] for _ in started]
    while len(began[victim]) < save:
        ready = select.select([out for _, out in started], [], [], _PATIENCE_S)[0]
        for number, (_, out) in enumerate(started):
            if out in ready:
                said = os.read(out, 1)
                if said != b"s":
                    for pid, _ in started:
                        os.kill(pid, signal.SIGKILL)
                    return {"failed": (said + os.read(out, 4000)).decode()}
                began[number].append(time.monotonic())
    times = began[victim]
    after_s = draw.uniform(0, 1.2 * (times[-1] - times[-2]))
    time.sleep(after_s)
    os.kill(started[victim][0], signal.SIGKILL)
    time.sleep(draw.uniform(0, 0.05))
    for pid, out in started:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(out)
    told = results(ranks(seed, address, 1, meeting, restores, "gloo"))
    alike = len({one.get("restored") for one in told}) == 1
    return {
        "victim": victim,
        "save": save,
        "after_ms": round(1000 * after_s, 1),
        "restored": [one.get("restored") for one in told],
        "bytes": told[0].get("bytes"),
        "failed": "; ".join(one["failed"] for one in told if one.get("failed")),
        "right": alike and all(one.get("right") for one in told),
    }


def main() -> None:
    part, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for seed in range(first, last + 1):
        with tempfile.TemporaryDirectory() as folder, cache() as address:
            meeting = f"{folder}/meeting"
            if part == "kills":
                told = kill(seed, address, meeting)
            else:
                work = {"states": states, "waits": waits}[part]
                each = results(ranks(seed, address, 0, meeting, work, "nccl"))
                failed = "; ".join(one["failed"] for one in each if one.get("failed"))
                told = {**each[0], "failed": failed, "right": all(one.get("right") for one in each)}
        print(json.dumps({"name": part, "seed": seed, **told}), flush=True)


if __name__ == "__main__":
    main()
