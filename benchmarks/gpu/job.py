"""One rank of a part of `benchmarks.gpu`: NCCL on a GPU; with ``cpu`` as the device, Gloo, to try the part itself.

Arguments: part, file for the result (``-RANK.json`` is added), device (``cuda``, ``cpu``), size (``quick``, ``whole``).
Times are nanoseconds of CLOCK_MONOTONIC, as in the ring.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu import gate_job, snapshot_job
from benchmarks.gpu.device import take_device
from benchmarks.gpu.training import synchronize, training
from benchmarks.gpu.verdicts import measured
from benchmarks.stand_in.device import compute_values

MIB = 1 << 20
SLEEP_CYCLES = 40_000_000  # some 20 ms: what is called meanwhile is queued behind it
TIMES_S = 120
QUEUED = 10  # calls of a batch
WARM_UP = 40  # steps; of a process's first 32 the shim measures each
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


# --- iteration time --------------------------------------------------------------------------------------------------


def steps(device: str, quick: bool) -> dict[str, Any]:
    """Seconds of each step, by events on the stream of the training, and which of them the shim has measured."""
    found: dict[str, Any] = {}
    made = 0
    for name, small, count in (
        ("large", False, 80 if quick else 250),
        ("small", True, 150 if quick else 400),
    ):
        step = training(device, small).step
        found[name] = step_times(device, step, WARM_UP, count)
        found[f"{name}, from"] = made + WARM_UP
        made += WARM_UP + count
    time.sleep(0.2)  # the shim's thread reads its events some time later
    ring = os.environ.get("KEEPSTEP_RING")
    found["measured"] = sorted(measured(Path(ring))) if ring else []
    return found


def step_times(device: str, step: Callable[[], None], warm_up: int, count: int) -> list[float]:
    for _ in range(warm_up):
        step()
    synchronize(device)
    if device == "cpu":
        marks = [time.perf_counter()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter())
        return [b - a for a, b in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    synchronize(device)
    return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(events)]


# --- what the shim and the plugin recorded ---------------------------------------------------------------------------


def events(device: str, quick: bool) -> dict[str, Any]:
    """A training, and batches of single calls beside the profiler; each with the records of its time."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from keepstep.ring import RingReader
    from keepstep.ring.link_reader import LinkReader
    from keepstep.ring.orders import OrdersPage

    made = 0

    def counting(_, bucket):  # torch refuses other annotations than its own
        nonlocal made
        made += 1
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    step = training(device, False, counting).step
    order_times(OrdersPage(os.environ["KEEPSTEP_ORDERS"]), device)
    for _ in range(5):  # DDP orders its buckets anew, and broadcasts that
        step()
    synchronize(device)
    made, count = 0, 20 if quick else 60
    begun_ns = time.monotonic_ns()
    for _ in range(count):
        step()
    synchronize(device)
    time.sleep(0.1)  # the shim's thread looks every 2 ms
    found: dict[str, Any] = {"training": {"made": made + count, "from": begun_ns, "to": time.monotonic_ns()}}
    del step
    found["batches"] = batches(device, quick)
    ring = RingReader(os.environ["KEEPSTEP_RING"])
    rows, sites, groups = ring.snapshot(), ring.sites(), ring.groups()
    for part in (found["training"], *found["batches"]):
        inside = rows[(rows["start_ns"] >= part["from"]) & (rows["start_ns"] <= part["to"])]
        part["calls"] = [
            [
                groups[row["group"]].name if row["group"] >= 0 else "",
                int(row["seq"]),
                sites[row["site"]].partition(" stream ")[2],
                *(
                    int(row[name])
                    for name in ("ticket", "start_ns", "wait_ns", "end_ns", "bytes", "kind", "flags")
                ),
            ]
            for row in inside
        ]
    header = ring.header
    found["ring"] = {"dropped": header.dropped, "late": header.late, "overflowed": header.overflowed}
    links = LinkReader(os.environ["KEEPSTEP_LINKS"]).snapshot()
    found["plugin"] = {
        "came": links.pid == os.getpid(),
        "interface": links.abi,
        "communicators": len(links.communicators),
        "links": len(links.links),
        "unsound": links.unsound,
    }
    return found


def order_times(page: Any, device: str) -> None:
    """As the agent does for a job that has become slow; the first call has the shim prepare itself."""
    page.take_times(time.monotonic_ns() + TIMES_S * 10**9)
    token = torch.zeros(1, device=device)
    for _ in range(10):
        dist.all_reduce(token, async_op=True).wait()  # type: ignore[union-attr]
        synchronize(device)
        time.sleep(0.05)


def batches(device: str, quick: bool) -> list[dict[str, Any]]:
    """Calls that move something also in a group of one rank: there a gather copies, and a mean is a kernel."""
    sizes = (1,) if device == "cpu" else (16, 64) if dist.get_world_size() > 1 else (16, 256, 2048)
    found = []
    for mib in sizes[1:] if quick and len(sizes) > 2 else sizes:
        source = torch.ones(mib * MIB // 4, device=device)
        target = torch.empty(source.numel() * dist.get_world_size(), device=device)
        # Gloo has no mean.
        mean = dist.ReduceOp.AVG if device == "cuda" else dist.ReduceOp.SUM
        calls: dict[str, Callable[[], Any]] = {
            "gather": lambda: dist.all_gather_into_tensor(target, source, async_op=True),  # noqa: B023
            "mean": lambda: dist.all_reduce(source, mean, async_op=True),  # noqa: B023
        }
        for (name, call), queued in product(calls.items(), (True, False)):
            found.append({"name": name, "mib": mib, "queued": queued, **profiled(device, call, queued)})
    return found


def profiled(device: str, call: Callable[[], Any], queued: bool) -> dict[str, Any]:
    """A batch of calls and what the profiler saw on the device meanwhile: (name, start, duration)."""
    from torch.profiler import ProfilerActivity, profile

    call().wait()
    synchronize(device)
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        call().wait()  # the profiler's first events are late; not in the window
        synchronize(device)
        time.sleep(0.02)
        begun_ns = time.monotonic_ns()
        if queued and device == "cuda":
            torch.cuda._sleep(SLEEP_CYCLES)
        works = []
        for _ in range(QUEUED):
            works.append(call())
            if not queued:
                works[-1].wait()
                synchronize(device)
        for work in works:
            work.wait()
        synchronize(device)
        time.sleep(0.02)
        ended_ns = time.monotonic_ns()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    ahead_ns = time.time_ns() - time.monotonic_ns()
    base_ns = trace.get("baseTimeNanoseconds", 0) - ahead_ns
    seen = [
        [event["name"], event["ts"] * 1e3 + base_ns, event["dur"] * 1e3]
        for event in trace["traceEvents"]
        if event.get("cat") in DEVICE_EVENTS
    ]
    return {"from": begun_ns, "to": ended_ns, "made": QUEUED, "profiler": seen}


# --- validation, checkpoint ------------------------------------------------------------------------------------------


def gemm(device: str, quick: bool) -> dict[str, Any]:
    """The device's tests between two steps of a training, for the first time in the process and again."""
    from keepstep.validate.device_tests import device_tests

    step = training(device, False).step
    for _ in range(5):
        step()
    synchronize(device)
    seconds, said = [], []
    for _ in range(3 if quick else 10):
        begun = time.perf_counter()
        said = list(device_tests(dist.get_rank(), "cuda:0" if device == "cuda" else "cpu", lambda: True))
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
        step()
        synchronize(device)
    figures = {one.test: round(one.value, 1) for one in said if not isinstance(one, str)}
    return {"seconds": seconds, "figures": figures, "failed": [one for one in said if isinstance(one, str)]}


def memory_checkpoint(device: str, quick: bool) -> dict[str, Any]:
    """Seconds of saves and of plain copies of the same tensors, in turns."""
    from keepstep import checkpoint

    count, each = (16, 1 * MIB) if device == "cpu" else (64, (16 if quick else 64) * MIB)
    tensors = [torch.randn(each // 4, device=device) for _ in range(count)]
    state = {"weights": {str(i): tensor for i, tensor in enumerate(tensors)}, "step": 0}
    pinned = [torch.zeros(each // 4, pin_memory=device == "cuda") for _ in range(count)]
    number = iter(range(1, 1000))

    def copy() -> None:
        for target, source in zip(pinned, tensors, strict=True):
            target.copy_(source, non_blocking=True)

    def save(overlap: bool) -> None:
        checkpoint.save(state, next(number), overlap=overlap)

    actions: dict[str, Callable[[], Any]] = {
        "cudaMemcpy, pinned": copy,
        "cudaMemcpy, pageable": lambda: [tensor.cpu() for tensor in tensors],
        "save": lambda: save(False),
        "save, overlapped: blocking": lambda: save(True),
    }

    def timed(action: Callable[[], Any]) -> float:
        synchronize(device)
        begun = time.perf_counter()
        action()
        synchronize(device)
        return time.perf_counter() - begun

    checkpoint.register(state)
    time.sleep(1 if device == "cpu" else 5)  # the kernel gives the pages in the background
    first_s = timed(lambda: save(False))
    copy()
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(3 if quick else 7):
        for name, action in actions.items():
            found[name].append(timed(action))
            checkpoint.wait()
    kept = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    restore_s = timed(lambda: checkpoint.load(state))
    return {
        "bytes": each * count,
        "first": first_s,
        "restore": restore_s,
        "same": all(torch.equal(a, b) for a, b in zip(kept, tensors, strict=True)),
        "seconds": {name: statistics.median(values) for name, values in found.items()},
    }


PARTS = {
    "steps": steps,
    "events": events,
    "gemm": gemm,
    "checkpoint": memory_checkpoint,
    "stall": gate_job.stall,
    "held": gate_job.held,
    "abort": gate_job.abort,
    "snapshot": snapshot_job.snapshot,
}


def main() -> None:
    part, result, device, size = sys.argv[1:]
    if device == "cuda":
        compute_values()
        taken = take_device(0, int(os.environ["WORLD_SIZE"]))
        dist.init_process_group("nccl", device_id=taken)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    found = PARTS[part](device, size == "quick")
    Path(f"{result}-{dist.get_rank()}.json").write_text(json.dumps(found))
    if part == "abort":  # what an abort has left behind is not destroyed
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
