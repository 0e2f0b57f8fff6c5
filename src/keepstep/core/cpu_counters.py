"""What the kernel counts for a worker: time it waited for a CPU, and time its cgroup was kept from running."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keepstep.core.control_groups import PROC, folders


@dataclass(frozen=True, slots=True)
class CpuCounters:
    """Counters of one worker; all only grow."""

    running_ns: int  # main thread on a CPU
    runnable_ns: int  # main thread ready, waiting for a CPU
    periods: int = 0  # cgroup quota periods that passed
    throttled_periods: int = 0  # those in which the quota ran out
    throttled_us: int = 0  # time the cgroup was kept off its CPUs, summed over these


def cpu_counters(pid: int, quota: Path | None, proc: Path = PROC) -> CpuCounters | None:
    """The counters of ``pid`` now; ``quota`` is its ``cpu.stat`` file (``quota_file``). None when it is gone."""
    try:
        words = (proc / str(pid) / "schedstat").read_text().split()
        running_ns, runnable_ns = int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):
        return None
    throttling = _throttling(quota) if quota is not None else (0, 0, 0)
    return CpuCounters(running_ns, runnable_ns, *throttling)


def queued_ns(proc: Path = PROC) -> int:
    """How long the calling thread has waited for a CPU since it began; 0 where the kernel does not count it."""
    try:
        return int((proc / "thread-self" / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def quota_file(pid: int, proc: Path = PROC, mounts: Path | None = None) -> Path | None:
    """The ``cpu.stat`` of the cgroup (v2, or v1's cpu controller) that limits ``pid``; None when none does.

    A quota may be set on any ancestor; the nearest one that counts periods is taken.
    """
    for upwards in folders("cpu", pid, proc=proc, mounts=mounts):
        for folder in upwards:
            if _throttling(folder / "cpu.stat")[0] > 0:
                return folder / "cpu.stat"
    return None


def _throttling(file: Path) -> tuple[int, int, int]:
    """(periods, throttled periods, throttled microseconds) of a ``cpu.stat``; zeros where it cannot be read."""
    try:
        counts = {
            name: int(value) for name, value in (line.split() for line in file.read_text().splitlines())
        }
    except (OSError, ValueError):
        return 0, 0, 0
    throttled_us = counts.get("throttled_usec", counts.get("throttled_time", 0) // 1000)
    return counts.get("nr_periods", 0), counts.get("nr_throttled", 0), throttled_us
