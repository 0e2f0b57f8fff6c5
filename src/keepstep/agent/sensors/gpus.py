"""Watches the node's GPUs through NVIDIA's driver once a second, in a thread, because a driver may hang.

This needs ``nvidia-ml-py`` (the extra ``gpu``) and the driver's library; without them no GPU is watched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
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
_ERRORS_EVERY = 10  # rounds between two reads of the counters of NVLink, which take two dozen calls per GPU
_MOST_LINKS = 18
# At most so many Xids, and errors of memory, are kept until somebody asks for them.
_MOST_XIDS = 64
UNCORRECTED = "uncorrected memory errors"
_NO_DRIVER = (9, 12)  # NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND: a host without GPUs


@dataclass(slots=True)
class _Gpu:
    handle: Any
    number: int
    pci: str = ""
    looks: deque[GpuSample] = field(default_factory=lambda: deque[GpuSample](maxlen=_HISTORY))
    processes: frozenset[int] = frozenset()
    errors: dict[str, int] = field(default_factory=dict[str, int])
    remapping: dict[str, bool] = field(default_factory=dict[str, bool])

    @property
    def name(self) -> str:
        """Its number, and where it is."""
        return f"GPU {self.number}{f' (PCI:{self.pci})' if self.pci else ''}"


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that NVIDIA's driver told of.

    Attributes:
        pci: the GPU's address; empty where it is not known.
        rank: that uses the GPU; -1 where that is not known, or where several do.
    """

    number: int
    gpu: int
    pci: str = ""
    rank: int = -1


@dataclass(frozen=True, slots=True)
class GpuMemoryError:
    """A line about errors of a GPU's memory, as the driver counts them; ``rank`` as of `Xid`."""

    line: str
    rank: int = -1


class Gpus:
    """Samples all GPUs every ``every_s`` seconds, if the driver's ``library`` is there."""

    def __init__(self, library: str = "libnvidia-ml.so.1", every_s: float = 1.0) -> None:
        self._library, self._every_s = library, every_s
        self._gpus: tuple[_Gpu, ...] = ()
        self._closed = threading.Event()
        self._xids: deque[tuple[_Gpu, int]] = deque(maxlen=_MOST_XIDS)
        self._memory_errors: deque[tuple[_Gpu, str]] = deque(maxlen=_MOST_XIDS)

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
            detail = f"GPU {gpu.number}: {low.detail}"
            found += [replace(low, rank=rank, detail=detail) for rank in self._ranks(gpu, processes)]
        return tuple(found)

    def new_xids(self, processes: Mapping[int, int]) -> list[Xid]:
        """The Xids since the last call. ``processes`` as in `causes`."""
        found: list[Xid] = []
        while self._xids:
            gpu, number = self._xids.popleft()
            found.append(Xid(number, gpu.number, gpu.pci, self._rank(gpu, processes)))
        return found

    def new_memory_errors(self, processes: Mapping[int, int]) -> list[GpuMemoryError]:
        """The errors of memory since the last call. ``processes`` as in `causes`."""
        found: list[GpuMemoryError] = []
        while self._memory_errors:
            gpu, line = self._memory_errors.popleft()
            found.append(GpuMemoryError(line, self._rank(gpu, processes)))
        return found

    def _rank(self, gpu: _Gpu, processes: Mapping[int, int]) -> int:
        """The rank that uses a GPU; -1 where that is not known, or where several do."""
        ranks = self._ranks(gpu, processes)
        return ranks[0] if len(ranks) == 1 else -1

    def _ranks(self, gpu: _Gpu, processes: Mapping[int, int]) -> list[int]:
        if any(one.processes.intersection(processes.values()) for one in self._gpus):
            return [rank for rank, pid in sorted(processes.items()) if pid in gpu.processes]
        in_order = dict(zip((one.number for one in self._gpus), sorted(processes), strict=False))
        return [in_order[gpu.number]] if len(processes) == len(self._gpus) else []

    def _run(self, nvml: Any) -> None:
        try:
            nvml.nvmlInit()
            self._gpus = tuple(_found(nvml, number) for number in range(nvml.nvmlDeviceGetCount()))
        except nvml.NVMLError as error:
            say = logger.info if error.value in _NO_DRIVER else logger.warning  # pyright: ignore[reportAttributeAccessIssue]
            say("the GPUs' clocks and errors are not watched: %s", error)
            return
        events = _register(nvml, self._gpus)
        for turn in count():
            for gpu in self._gpus:
                _look(nvml, gpu)
                self._memory_errors.extend((gpu, line) for line in _memory_errors(nvml, gpu))
                if turn % _ERRORS_EVERY == 0:
                    _tell_errors(nvml, gpu)
            self._xids.extend(_tell_events(nvml, events, self._gpus))
            if self._closed.wait(self._every_s):
                return


def _found(nvml: Any, number: int) -> _Gpu:
    gpu = _Gpu(nvml.nvmlDeviceGetHandleByIndex(number), number)
    with suppress(nvml.NVMLError):
        info = nvml.nvmlDeviceGetPciInfo(gpu.handle)
        # The driver's own lines have an address in this form.
        gpu.pci = f"{info.domain & 0xFFFF:04x}:{info.bus:02x}:{info.device:02x}"
    return gpu


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


def _memory_errors(nvml: Any, gpu: _Gpu) -> Iterator[str]:
    """Lines about what is new of the GPU's memory: errors that were not corrected, rows that were not remapped.

    What was there before the first look is logged, and is no news. An old driver or GPU tells nothing.
    """
    with suppress(nvml.NVMLError):
        sort, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        now = int(nvml.nvmlDeviceGetTotalEccErrors(gpu.handle, sort, since))
        if more := _more(gpu, UNCORRECTED, now):
            yield f"NVML: {gpu.name}: {more} more {UNCORRECTED} ({now})"
    with suppress(nvml.NVMLError):
        _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(gpu.handle)
        for is_so, what in (
            (has_failed, "a row of memory could not be remapped"),
            (is_pending, "a row of memory is to be remapped at the next reset"),
        ):
            before = gpu.remapping.get(what)
            gpu.remapping[what] = bool(is_so)
            if is_so and not before:
                logger.warning("%s: %s", gpu.name, what)
                if before is not None:
                    yield f"NVML: {gpu.name}: {what}"


def _more(gpu: _Gpu, name: str, now: int) -> int:
    """By how much a counter has grown since the last look; that is logged."""
    before = gpu.errors.get(name, now)
    gpu.errors[name] = now
    if now > before:
        logger.warning("GPU %d: %d more %s (%d)", gpu.number, now - before, name, now)
    return max(now - before, 0)


def _tell_errors(nvml: Any, gpu: _Gpu) -> None:
    handle, found = gpu.handle, dict[str, int]()
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
        _more(gpu, name, now)


def _register(nvml: Any, gpus: Iterable[_Gpu]) -> Any:
    """Register for the driver's error events (XIDs); None if it reports none."""
    try:
        events = nvml.nvmlEventSetCreate()
        for gpu in gpus:
            nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError:
        return None
    return events


def _tell_events(nvml: Any, events: Any, gpus: Iterable[_Gpu]) -> Iterator[tuple[_Gpu, int]]:
    while events is not None:
        try:
            event = nvml.nvmlEventSetWait(events, 0)
        except nvml.NVMLError:  # no event is waiting
            return
        device = cast(event.device, c_void_p).value
        of = [gpu for gpu in gpus if cast(gpu.handle, c_void_p).value == device]
        logger.warning("GPU %s: XID %d", ", ".join(str(gpu.number) for gpu in of) or "?", event.eventData)
        yield from ((gpu, int(event.eventData)) for gpu in of)
