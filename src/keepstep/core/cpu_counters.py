"""What the kernel counts for a worker: time it waited for a CPU, and time its control group was kept from running."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.control_groups import PROC, folders

_SCHEDSTAT_BYTES = 256  # more than it has


@dataclass(frozen=True, slots=True)
class CpuCounters:
    """Counters of one worker; all only grow."""

    runnable_ns: int  # the main thread was ready to run and waited for a CPU
    throttled_periods: int = 0  # periods in which the quota of the control group ran out
    throttled_us: int = 0  # time the control group was kept off its CPUs, summed over these


def cpu_counters(pid: int, quota: Path | None, proc: Path = PROC) -> CpuCounters | None:
    """The counters of ``pid`` now; ``quota`` is its ``cpu.stat`` file (``quota_file``). None when it is gone."""
    runnable_ns = _runnable_ns(proc / str(pid))
    if runnable_ns is None:
        return None
    _, throttled_periods, throttled_us = _throttling(quota) if quota is not None else (0, 0, 0)
    return CpuCounters(runnable_ns, throttled_periods, throttled_us)


def queued_ns() -> int:
    """How long the calling thread has waited for a CPU since it began; 0 where the kernel does not count it."""
    return _runnable_ns(PROC / "thread-self") or 0


def quota_file(pid: int, proc: Path = PROC, mounts: Path | None = None) -> Path | None:
    """The ``cpu.stat`` of the control group (v2, or v1's cpu controller) that limits ``pid``; None when none does.

    A quota may be set on any ancestor; the nearest one that counts periods is taken.
    """
    for upwards in folders("cpu", pid, proc=proc, mounts=mounts):
        for folder in upwards:
            if _throttling(folder / "cpu.stat")[0] > 0:
                return folder / "cpu.stat"
    return None


def _runnable_ns(process: Path) -> int | None:
    """The second field of ``schedstat``; None where it cannot be read."""
    try:  # once a second for each rank: a text file would cost more than the rest
        file = os.open(f"{process}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.read(file, _SCHEDSTAT_BYTES).split()[1])
        finally:
            os.close(file)
    except (OSError, ValueError, IndexError):
        return None


def _throttling(file: Path) -> tuple[int, int, int]:
    """(periods, throttled periods, throttled microseconds) of a ``cpu.stat``; zeros where it cannot be read."""
    try:
        lines = (line.split() for line in file.read_text().splitlines())
        counts = {name: int(value) for name, value in lines}
    except (OSError, ValueError):
        return 0, 0, 0
    throttled_us = counts.get("throttled_usec", counts.get("throttled_time", 0) // 1000)
    return counts.get("nr_periods", 0), counts.get("nr_throttled", 0), throttled_us
