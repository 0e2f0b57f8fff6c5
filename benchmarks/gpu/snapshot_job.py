"""Snapshots of a training on a GPU: what they add to a step, how fast they come, what waits; a part of ``job.py``."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.judge import synchronisations
from benchmarks.gpu.training import in_pairs, synchronize, training
from benchmarks.stand_in.device import Device, is_stand_in
from benchmarks.stand_in.jobs.snapshots import image, same, tensors_of

from keepstep import checkpoint

MICRO_BATCHES = 8  # so many in a step that copying the state takes less time than they do
COUNTED = 2  # steps in which waits are counted
_GIB = 1 << 30


def snapshot(device: str, quick: bool) -> dict[str, Any]:
    """Steps with a snapshot in each and without, in pairs; single snapshots; waits; a state that came back."""
    made = training(device, False, micro_batches=MICRO_BATCHES)
    state: dict[str, Any] = {"model": made.model, "optimizer": made.optimizer, "step": 0}

    def save() -> None:
        state["step"] += 1
        checkpoint.save(state, state["step"])

    def saving_step() -> None:
        save()
        made.step()

    for _ in range(3):
        made.step()
    synchronize(device)
    checkpoint.register(state)
    time.sleep(1 if is_stand_in() else 5)  # the kernel gives the pages in the background
    for _ in range(3):  # what is made once; and all slots
        saving_step()
    checkpoint.wait()
    found: dict[str, Any] = {"bytes": sum(one.nbytes for one in tensors_of(state))}
    seconds = 1.0 if quick else 15.0
    found["pairs"] = in_pairs(saving_step, made.step, 2 if quick else 4, seconds, between=checkpoint.wait)
    found |= _alone(device, save, 3 if quick else 7)
    with_, without = (_counted(action) for action in (saving_step, made.step))
    found["waits"] = {name: with_[name] - without[name] for name in with_}
    found["steps"] = COUNTED
    found["same"] = _comes_back(state, save, made.step)
    return found


def _alone(device: str, save: Callable[[], None], count: int) -> dict[str, Any]:
    """Seconds until ``save`` returns and until a snapshot is whole, nothing else going on; bytes/s of a plain copy."""
    returned, whole, copied = [], [], []
    nbytes = _GIB >> 7 if is_stand_in() else _GIB
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    for _ in range(count):
        synchronize(device)
        begun_s = time.perf_counter()
        save()
        returned.append(time.perf_counter() - begun_s)
        checkpoint.wait()
        whole.append(time.perf_counter() - begun_s)
        begun_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        copied.append(nbytes / (time.perf_counter() - begun_s))
    medians = {"returned_s": returned, "whole_s": whole, "pcie_bytes_per_s": copied}
    return {name: statistics.median(values) for name, values in medians.items()}


def _counted(action: Callable[[], None]) -> Mapping[str, int]:
    """How often the training's streams were made to wait, and the host waited for them, in some steps."""

    def act() -> None:
        for _ in range(COUNTED):
            action()
        checkpoint.wait()

    if is_stand_in():
        device, stream = Device(), torch.cuda.current_stream().cuda_stream
        before = device.waits_of(stream)
        act()
        put, awaited = (after - was for after, was in zip(device.waits_of(stream), before, strict=True))
        return {"waits put on the training's streams": put, "the host's waits for them": awaited}
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    config = _ExperimentalConfig(enable_cuda_sync_events=True)
    with profile(activities=[ProfilerActivity.CUDA], experimental_config=config) as profiler:
        act()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return synchronisations(json.loads(path.read_text())["traceEvents"])


def _comes_back(state: dict[str, Any], save: Callable[[], None], step: Callable[[], None]) -> bool:
    """Whether a state is the same byte by byte, when it is restored after a step and zeros."""
    save()
    truth = image(state)
    number = state["step"]
    step()
    checkpoint.wait()
    for tensor in tensors_of(state):
        tensor.zero_()
    state["step"] = -1
    return checkpoint.load(state) == number and state["step"] == number and same(truth, image(state))
