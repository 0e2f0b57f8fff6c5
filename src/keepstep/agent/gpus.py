"""The node's GPUs as NVIDIA's driver tells of them, once a second, in a thread: a driver that hangs holds up nobody.

Needs ``nvidia-ml-py`` (the extra ``gpu``) and the driver's library; without them there is nothing to tell.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from keepstep.core.summary import HostCause
from keepstep.detect.gpu import GpuSample, low_clock

logger = logging.getLogger("keepstep.agent")

_EVERY_S = 1.0
_WINDOW = 10  # looks
_RECENT_S = 5.0
_DRIVER = "/dev/nvidiactl"
_MOST_LINKS = 18


@dataclass(slots=True)
class _Gpu:
    handle: Any
    number: int
    looks: deque[GpuSample] = field(default_factory=lambda: deque[GpuSample](maxlen=_WINDOW))
    processes: frozenset[int] = frozenset()
    errors: dict[str, int] = field(default_factory=dict[str, int])


class Gpus:
    """Looks from `start` to `close`."""

    def __init__(self) -> None:
        self._gpus: list[_Gpu] = []
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to look, where there is a driver."""
        if not os.path.exists(_DRIVER):
            return
        try:
            import pynvml
        except ImportError:
            logger.warning("the GPUs' clocks and errors are not watched: pip install 'keepstep[gpu]'")
            return
        threading.Thread(target=self._run, args=(pynvml,), name="keepstep-gpus", daemon=True).start()

    def close(self) -> None:
        """No more looks."""
        self._ended.set()

    def causes(self, processes: Mapping[int, int]) -> tuple[HostCause, ...]:
        """GPUs that are held down, by the ranks that compute on them. ``processes``: pid by rank."""
        now_s = time.monotonic()
        found: list[HostCause] = []
        for gpu in self._gpus:
            looks = list(gpu.looks)
            low = low_clock(looks) if looks and now_s - looks[-1].time_s < _RECENT_S else None
            if low is not None:
                ranks = (rank for rank, process in sorted(processes.items()) if process in gpu.processes)
                detail = f"GPU {gpu.number}: {low.detail}"
                found += [HostCause(rank, low.cause, low.share, detail) for rank in ranks]
        return tuple(found)

    def _run(self, nvml: Any) -> None:
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            gpus = [_Gpu(nvml.nvmlDeviceGetHandleByIndex(n), n) for n in range(count)]
            events = _register(nvml, gpus)
        except nvml.NVMLError as error:
            logger.warning("the GPUs' clocks and errors are not watched: %s", error)
            return
        self._gpus = gpus
        while not self._ended.wait(_EVERY_S):
            for gpu in gpus:
                _look(nvml, gpu)
            _take_events(nvml, events, gpus)


def _look(nvml: Any, gpu: _Gpu) -> None:
    """What the driver does not tell of this GPU is left out."""
    with suppress(nvml.NVMLError):
        handle, clock = gpu.handle, nvml.NVML_CLOCK_SM
        gpu.looks.append(
            GpuSample(
                time.monotonic(),
                nvml.nvmlDeviceGetClockInfo(handle, clock),
                nvml.nvmlDeviceGetMaxClockInfo(handle, clock),
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            )
        )
    with suppress(nvml.NVMLError):
        running = nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
        gpu.processes = frozenset(int(one.pid) for one in running)
    for name, count in _errors(nvml, gpu.handle).items():
        before = gpu.errors.get(name)
        gpu.errors[name] = count
        if before is not None and count > before:
            logger.warning("GPU %d: %d more %s (%d)", gpu.number, count - before, name, count)


def _errors(nvml: Any, handle: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    with suppress(nvml.NVMLError):
        found["uncorrected memory errors"] = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    replays = 0
    for link in range(_MOST_LINKS):
        with suppress(nvml.NVMLError):
            replays += nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, nvml.NVML_NVLINK_ERROR_DL_REPLAY)
    found["NVLink replays"] = replays
    return found


def _register(nvml: Any, gpus: list[_Gpu]) -> Any:
    """XIDs as they come; None where the driver tells none."""
    try:
        events = nvml.nvmlEventSetCreate()
        for gpu in gpus:
            nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError:
        return None
    return events


def _take_events(nvml: Any, events: Any, gpus: list[_Gpu]) -> None:
    while events is not None:
        try:
            event = nvml.nvmlEventSetWait(events, 0)
        except nvml.NVMLError:  # there is none
            return
        numbers = [gpu.number for gpu in gpus if _same(gpu.handle, event.device)]
        logger.warning("GPU %s: XID %d", ", ".join(map(str, numbers)) or "?", event.eventData)


def _same(one: Any, other: Any) -> bool:
    from ctypes import c_void_p, cast

    return cast(one, c_void_p).value == cast(other, c_void_p).value
