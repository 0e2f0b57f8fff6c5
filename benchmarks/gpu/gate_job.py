"""What the gate before the optimizer's step costs, and what goes on behind it; parts of `benchmarks/gpu/job.py`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu.training import in_pairs, synchronize, training
from benchmarks.stand_in.device import is_stand_in

from keepstep.session.device_gate import DeviceGate

QUEUED = 400  # kernels of a round, which with their gates fit into a stream's queue
HELD_CYCLES = 60_000_000  # some 30 ms, in which they are queued
CLOSED_S = 0.3  # for which keepstep keeps the gate closed at most, while a group is aborted
RETURNS_S = 20.0  # longest wait for an abort
_GIB = 1 << 30


class Switched(DeviceGate):
    """A gate that can be left out."""

    on = True

    def put(self) -> None:
        super()._before_step()

    def _before_step(self, *_: Any) -> None:
        if self.on:
            self.put()


def stall(device: str, quick: bool) -> dict[str, Any]:
    """Seconds on the GPU: of a kernel, and of a step of a training, with the gate and without, in pairs."""
    gate = Switched()
    found: dict[str, Any] = {"kernel": [], "host": []}
    weight = torch.nn.Parameter(torch.zeros(1, device=device))
    torch.optim.SGD([weight], lr=1.0).step()
    found["stands"] = gate.stands
    if not gate.stands:
        return found
    for _ in range(3 if quick else 15):
        (on, host_on), (off, host_off) = _queued(gate.put), _queued(lambda: None)
        found["kernel"].append((on, off))
        found["host"].append((host_on, host_off))

    def stepping(step: Callable[[], None], on: bool) -> Callable[[], None]:
        def act() -> None:
            gate.on = on
            step()

        return act

    for name, small, steps, seconds in (("large", False, 5, 8.0), ("small", True, 20, 4.0)):
        step = training(device, small).step
        for _ in range(20):
            step()
        synchronize(device)
        seconds = 1.0 if quick else seconds
        found[name] = in_pairs(stepping(step, True), stepping(step, False), steps, seconds)
    return found


def _queued(before: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a small kernel with ``before``, of the GPU and of the host, while the host is ahead."""
    x = torch.zeros(1, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HELD_CYCLES)
    begin.record()
    begun_s = time.perf_counter()
    for _ in range(QUEUED):
        before()
        x.add_(1)
    host_s = time.perf_counter() - begun_s
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / QUEUED, host_s / QUEUED


def held(device: str, quick: bool) -> dict[str, Any]:
    """A copy on another stream, and memory that the cache does not have, with the gate closed and with it open."""
    gate = DeviceGate()
    weight = torch.nn.Parameter(torch.zeros(1 << 20, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.step()
    synchronize(device)
    free, _ = torch.cuda.mem_get_info()
    copied = (_GIB >> 7) if is_stand_in() else _GIB
    wanted = min(8 * _GIB, free // 4)
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty(copied, dtype=torch.uint8, pin_memory=True)
    aside = torch.cuda.Stream()
    found: dict[str, Any] = {"stands": gate.stands, "copied": copied, "wanted": wanted, "tries": []}

    def once(closed: bool) -> dict[str, Any]:
        if closed:
            gate.close()
        optimizer.step()
        behind = torch.cuda.Event()
        behind.record()
        if not closed:
            behind.synchronize()
        begun_s = time.perf_counter()
        with torch.cuda.stream(aside):
            target.copy_(source, non_blocking=True)
        aside.synchronize()
        copy_s, copy_held = time.perf_counter() - begun_s, not behind.query()
        begun_s = time.perf_counter()
        large = torch.empty(wanted, dtype=torch.uint8, device=device)
        malloc_s, malloc_held = time.perf_counter() - begun_s, not behind.query()
        if closed:
            gate.open()
        synchronize(device)
        del large
        torch.cuda.empty_cache()
        gate.renew()
        times = {"copy_s": copy_s, "copy_held": copy_held, "malloc_s": malloc_s, "malloc_held": malloc_held}
        return {"closed": closed, "stepped": behind.query(), **times}

    if gate.stands:
        once(False)  # what is made once
        found["tries"] = [once(closed) for _ in range(2 if quick else 7) for closed in (True, False)]
    return found


def abort(device: str, quick: bool) -> dict[str, Any]:
    """Two ranks: seconds in which rank 0 aborts an all-reduce to which rank 1 does not come, as keepstep does it."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    gate = DeviceGate()
    tries: list[dict[str, Any]] = []
    for number in range(2 if quick else 5):
        group: Any = dist.new_group([0, 1], backend="nccl")
        weight = torch.nn.Parameter(torch.ones(64, device=device))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.grad = torch.ones_like(weight)
        dist.all_reduce(weight.grad, dist.ReduceOp.AVG, group=group)
        optimizer.step()
        synchronize(device)
        if rank == 0:
            tries.append(_stuck(group, gate, weight, optimizer))
            store.set(f"aborted-{number}", "no" if tries[-1]["abort_s"] is None else "yes")
        if store.get(f"aborted-{number}") == b"no":
            break
        if rank != 0:
            group.abort()
    if rank == 0:  # it has the store, and leaves last
        store.wait(["over"])
    else:
        store.set("over", "yes")
    return {"stands": gate.stands, "tries": tries}


def _stuck(
    group: Any, gate: DeviceGate, weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """One abort, beside products on another stream. The weights are 0 before it."""
    assert weight.grad is not None
    weight.grad.fill_(5.0)
    dist.all_reduce(weight.grad, dist.ReduceOp.AVG, group=group)
    optimizer.step()
    behind = torch.cuda.Event()
    behind.record()
    busy = _load()
    ended_s: list[float] = []

    def run() -> None:
        group.abort()
        ended_s.append(time.monotonic())

    thread = threading.Thread(target=run, daemon=True)
    begun_s = time.monotonic()
    gate.close()
    thread.start()
    thread.join(CLOSED_S)
    under_load = not busy.query()
    time.sleep(0.1)  # for a step that no gate stands before
    told: dict[str, Any] = {"abort_s": None, "fed": _fed(weight), "under_load": under_load}
    opened_s = time.monotonic()
    gate.open()
    thread.join(RETURNS_S)
    if ended_s:
        behind.synchronize()
        told |= {"abort_s": ended_s[0] - begun_s, "let_go_s": time.monotonic() - opened_s}
        gate.renew()
    return told


def _load() -> torch.cuda.Event:
    """Keep the GPU busy for a second or more; what is returned is recorded behind that."""
    stream, size = torch.cuda.Stream(), 8192
    one, other = (torch.empty(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    with torch.cuda.stream(stream):
        for _ in range(900):
            torch.mm(one, one, out=other)
        event = torch.cuda.Event()
        event.record()
    for tensor in (one, other):
        tensor.record_stream(stream)
    return event


def _fed(weight: torch.nn.Parameter) -> bool:
    """Whether the weights have changed, read on a stream that waits for nothing."""
    aside = torch.cuda.Stream()
    host = torch.empty(weight.shape, pin_memory=True)
    with torch.cuda.stream(aside):
        host.copy_(weight.detach(), non_blocking=True)
    aside.synchronize()
    return bool(host.any())
