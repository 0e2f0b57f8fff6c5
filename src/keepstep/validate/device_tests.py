"""Tests of this rank's device: matrix products in the number formats it has, and tests of the user's own."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from statistics import median, quantiles
from typing import Any

from keepstep.core.cpu_counters import cpu_counters, quota_file
from keepstep.core.validation import DeviceFigure

TESTS = "keepstep.validate_tests"
"""Entry points ``test(device: str) -> float``, more is better; they leave the training's random numbers alone."""

REPETITIONS = 3  # how often each test is run; the median counts
_CPU_SIZE = 384  # rows and columns of the matrices
_CPU_BUSY_S, _CPU_PATIENCE_S = 0.03, 0.25  # length of one repetition: time on the core, or time in all
_CPU_LEAST_PRODUCTS = 4
_GPU_SIZES, _GPU_PRODUCTS = (4096, 1024), 8  # the small size is taken where memory is short


def device_tests(rank: int, device: str, running: Callable[[], bool]) -> Iterator[DeviceFigure | str]:
    """The figure of each test, or a text that says why there is none. Ends once ``running()`` is false, at any test."""
    if device.startswith("cuda"):
        yield from _products_on_gpu(rank, device, running)
    else:
        yield _products_on_cpu(rank)
    for entry in entry_points(group=TESTS):
        if not running():
            return
        try:
            test: Callable[[str], float] = entry.load()
            figure = median(float(test(device)) for _ in range(REPETITIONS))
        except Exception as error:
            yield f"custom test {entry.name} failed with {type(error).__name__}: {error}"
            continue
        if math.isfinite(figure) and figure > 0:
            yield DeviceFigure(rank, entry.name[:64], figure, "")
        else:
            yield f"custom test {entry.name} gave {figure}; it must give a number above 0"


def _products_on_cpu(rank: int) -> DeviceFigure:
    """The speed of matrix products on the CPU.

    Ranks share the host's cores, so time in which others had the core does not count; time beyond a CPU quota does.
    """
    import torch

    factor = torch.full((_CPU_SIZE, _CPU_SIZE), 0.5, device="cpu", dtype=torch.float32)
    into = torch.empty_like(factor)
    # With helper threads this thread's own time says nothing: it may sleep until they are done.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def product_s() -> float:
        begun_s = clock()
        torch.mm(factor, factor, out=into)
        return clock() - begun_s

    def repetition_s() -> float:
        times: list[float] = []
        busy_until_s = time.thread_time() + _CPU_BUSY_S
        until_s = time.monotonic() + _CPU_PATIENCE_S
        while len(times) < _CPU_LEAST_PRODUCTS or (
            time.thread_time() < busy_until_s and time.monotonic() < until_s
        ):
            times.append(product_s())
        return quantiles(times, n=4)[0]  # slower products suffer from what neighbours do to caches

    product_s()
    quota = quota_file(os.getpid())

    def throttled_s() -> float:
        counters = cpu_counters(os.getpid(), quota)
        return counters.throttled_us * 1e-6 if counters else 0.0

    begun = time.perf_counter(), time.thread_time(), throttled_s()
    seconds = median(repetition_s() for _ in range(REPETITIONS))
    wall_s, busy_s, limited_s = (
        now - before
        for now, before in zip((time.perf_counter(), time.thread_time(), throttled_s()), begun, strict=True)
    )
    # The kernel adds throttled time over cores and processes.
    limited_s = min(limited_s, max(wall_s - busy_s, 0.0))
    speed = _teraflops(_CPU_SIZE, seconds * (1 + limited_s / max(busy_s, 1e-9)))
    taken = max(wall_s - busy_s - limited_s, 0.0) / wall_s
    return DeviceFigure(rank, "fp32", speed, "TFLOP/s", limited_s / (busy_s + limited_s), taken)


def _products_on_gpu(rank: int, device: str, running: Callable[[], bool]) -> Iterator[DeviceFigure | str]:
    """The speed of matrix products on the GPU in each number format that it has, as long as ``running()``."""
    import torch

    half = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    for test in ("fp8", half, "fp32"):
        if test == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
            continue
        for size in _GPU_SIZES:
            if not running():
                return
            if not _fits(size, device):
                continue
            try:
                seconds = _time_on_gpu(_product(test, size, device), device, running)
            except torch.OutOfMemoryError:
                continue
            except (RuntimeError, KeyError, TypeError) as error:
                yield f"{test} product failed: {error}"[:200]
                break
            if seconds is None:
                return
            name = test if size == _GPU_SIZES[0] else f"{test} n={size}"
            yield DeviceFigure(rank, name, _teraflops(size, seconds))
            break
        else:
            yield f"{test} product: no memory is free on {device}"


def _fits(size: int, device: str) -> bool:
    """Whether there is room for the matrices beside what the training keeps allocated."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + kept >= 4 * 4 * size**2


def _product(test: str, size: int, device: str) -> Callable[[], Any]:
    """A function that multiplies two square matrices in one number format."""
    import torch

    types: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if test != "fp8":
        factor = torch.full((size, size), 0.5, device=device, dtype=types[test])
        into = torch.empty_like(factor)
        return lambda: torch.mm(factor, factor, out=into)
    eighth: Any = torch.full((size, size), 0.5, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    scaled: Any = vars(torch)["_scaled_mm"]  # the only product of 8-bit floats that torch has
    return lambda: scaled(eighth, eighth.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _time_on_gpu(product: Callable[[], Any], device: str, running: Callable[[], bool]) -> float | None:
    """Seconds of one product: the median over the repetitions of the mean of a few. None when not ``running()``."""
    import torch

    times: list[float] = []
    with torch.cuda.device(device):
        product()
        for _ in range(REPETITIONS):
            if not running():  # the training may go on, and must not find us on its GPU
                return None
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(_GPU_PRODUCTS):
                product()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3 / _GPU_PRODUCTS)
    return median(times)


def _teraflops(size: int, seconds: float) -> float:
    return 2 * size**3 / max(seconds, 1e-9) * 1e-12
