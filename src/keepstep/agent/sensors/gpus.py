"""Watches the node's GPUs through NVIDIA's driver once a second, in a thread, because a driver may hang.

This needs ``nvidia-ml-py`` (the extra ``gpu``) and the driver's library; without them no GPU is watched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from ctypes import CDLL, c_void_p, cast
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import median
from typing import Any

from keepstep.core.summary import HostCause
from keepstep.detect.host_causes import GpuSample, low_clock, usual_clock

logger = logging.getLogger("keepstep.agent")

_RECENT = 10  # number of newest samples that are judged
_HISTORY = 600  # number of samples kept to know the usual clock
_FRESH_S = 5.0  # age of the newest sample above which a GPU is not judged
_BUSY_PERCENT = 20  # share of a second with a kernel running from which a GPU counts as busy
_ERRORS_EVERY = 10  # rounds between two reads of the error counters, which take two dozen calls per GPU
_MOST_LINKS = 18
_NO_DRIVER = (9, 12)  # NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND: a host without GPUs


@dataclass(slots=True)
class _Gpu:
    handle: Any
    number: int
    looks: deque[GpuSample] = field(default_factory=lambda: deque[GpuSample](maxlen=_HISTORY))
    processes: frozenset[int] = frozenset()
    errors: dict[str, int] = field(default_factory=dict[str, int])


class Gpus:
    """Samples all GPUs every ``every_s`` seconds, if the driver's ``library`` is there."""

    def __init__(self, library: str = "libnvidia-ml.so.1", every_s: float = 1.0) -> None:
        self._library, self._every_s = library, every_s
        self._gpus: tuple[_Gpu, ...] = ()
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the thread, if there is a driver."""
        try:
            CDLL(self._library)
        except OSError:
            return
        try:
            import pynvml  # pyright: ignore[reportMissingTypeStubs]
        except ImportError:
            logger.warning("the GPUs' clocks and errors are not watched: pip install 'keepstep[gpu]'")
            return
        threading.Thread(target=self._run, args=(pynvml,), name="keepstep-gpus", daemon=True).start()

    def close(self) -> None:
        """Tell the thread to end after its current round."""
        self._closed.set()

    def causes(self, processes: Mapping[int, int]) -> tuple[HostCause, ...]:
        """The ranks whose GPU runs at a reduced clock. ``processes``: process IDs of this node's ranks.

        In a container the driver may list no processes. Then the nth rank is taken to use the nth GPU, if there are as
        many ranks as GPUs.
        """
        now_s, gpus = time.monotonic(), self._gpus
        looks = {gpu.number: list(gpu.looks) for gpu in gpus}
        known = any(gpu.processes.intersection(processes.values()) for gpu in gpus)
        in_order = dict(zip((gpu.number for gpu in gpus), sorted(processes), strict=False))
        found: list[HostCause] = []
        for gpu in gpus:
            recent, before = looks[gpu.number][-_RECENT:], looks[gpu.number][:-_RECENT]
            if not recent or now_s - recent[-1].time_s > _FRESH_S:
                continue
            others = (those[-_RECENT:] for number, those in looks.items() if number != gpu.number)
            neighbours = [clock for those in others if (clock := usual_clock(those))]
            low = low_clock(recent, max(usual_clock(before), median(neighbours or [0])))
            if low is None:
                continue
            ranks: Iterable[int] = ()
            if known:
                ranks = (rank for rank, pid in sorted(processes.items()) if pid in gpu.processes)
            elif len(processes) == len(gpus):
                ranks = (in_order[gpu.number],)
            detail = f"GPU {gpu.number}: {low.detail}"
            found += [replace(low, rank=rank, detail=detail) for rank in ranks]
        return tuple(found)

    def _run(self, nvml: Any) -> None:
        try:
            nvml.nvmlInit()
            numbers = range(nvml.nvmlDeviceGetCount())
            self._gpus = tuple(_Gpu(nvml.nvmlDeviceGetHandleByIndex(number), number) for number in numbers)
        except nvml.NVMLError as error:
            say = logger.info if error.value in _NO_DRIVER else logger.warning  # pyright: ignore[reportAttributeAccessIssue]
            say("the GPUs' clocks and errors are not watched: %s", error)
            return
        events = _register(nvml, self._gpus)
        for turn in count():
            for gpu in self._gpus:
                _look(nvml, gpu)
                if turn % _ERRORS_EVERY == 0:
                    _tell_errors(nvml, gpu)
            _tell_events(nvml, events, self._gpus)
            if self._closed.wait(self._every_s):
                return


def _look(nvml: Any, gpu: _Gpu) -> None:
    """Take one sample of a GPU, leaving out what its driver does not report."""
    handle = gpu.handle
    with suppress(nvml.NVMLError):
        gpu.looks.append(
            GpuSample(
                time.monotonic(),
                nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                nvml.nvmlDeviceGetUtilizationRates(handle).gpu >= _BUSY_PERCENT,
            )
        )
    with suppress(nvml.NVMLError):
        gpu.processes = frozenset(int(one.pid) for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle))


def _tell_errors(nvml: Any, gpu: _Gpu) -> None:
    handle, found = gpu.handle, dict[str, int]()
    with suppress(nvml.NVMLError):
        sort, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        found["uncorrected memory errors"] = nvml.nvmlDeviceGetTotalEccErrors(handle, sort, since)
    for name, counter in (
        ("NVLink replays", nvml.NVML_NVLINK_ERROR_DL_REPLAY),
        ("NVLink recoveries", nvml.NVML_NVLINK_ERROR_DL_RECOVERY),
        ("NVLink CRC errors in flits", nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT),
        ("NVLink CRC errors in data", nvml.NVML_NVLINK_ERROR_DL_CRC_DATA),
    ):
        found[name] = 0
        for link in range(_MOST_LINKS):
            with suppress(nvml.NVMLError):
                found[name] += nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter)
    found["NVLinks inactive"] = 0
    for link in range(_MOST_LINKS):
        with suppress(nvml.NVMLError):
            found["NVLinks inactive"] += not nvml.nvmlDeviceGetNvLinkState(handle, link)
    for name, now in found.items():
        before = gpu.errors.get(name)
        gpu.errors[name] = now
        if before is not None and now > before:
            logger.warning("GPU %d: %d more %s (%d)", gpu.number, now - before, name, now)


def _register(nvml: Any, gpus: Iterable[_Gpu]) -> Any:
    """Register for the driver's error events (XIDs); None if it reports none."""
    try:
        events = nvml.nvmlEventSetCreate()
        for gpu in gpus:
            nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError:
        return None
    return events


def _tell_events(nvml: Any, events: Any, gpus: Iterable[_Gpu]) -> None:
    while events is not None:
        try:
            event = nvml.nvmlEventSetWait(events, 0)
        except nvml.NVMLError:  # no event is waiting
            return
        device = cast(event.device, c_void_p).value
        numbers = [str(gpu.number) for gpu in gpus if cast(gpu.handle, c_void_p).value == device]
        logger.warning("GPU %s: XID %d", ", ".join(numbers) or "?", event.eventData)
