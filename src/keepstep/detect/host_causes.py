"""Why a worker is slow: its CPU quota is used up, it waits for a CPU that others hold, or its GPU's clock is low."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from keepstep.core.cpu_counters import CpuCounters
from keepstep.core.summary import HostCause

LEAST_SHARE = 0.05  # part of a worker's time, or of what its GPU could compute; a smaller loss is no cause
_REASONS = {  # bits that NVML sets when it holds the clock down, the graver first
    0x08: "hardware slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x20: "thermal slowdown",
    0x400: "reliability limit",
    0x04: "power cap",
    0x100: "display clock setting",
    0x02: "application clock setting",
}
_ANY = sum(_REASONS)
_FEWEST = 3  # looks with a low clock that are proof


def host_cause(rank: int, window_s: float, before: CpuCounters, now: CpuCounters) -> HostCause | None:
    """What the host took from a rank's worker between two looks, ``window_s`` seconds apart; None when hardly anything.

    ``cpu quota``: the worker's control group was throttled. ``run queue``: the worker was ready to run, but every CPU
    that it may use was taken. A throttled process also waits in the run queue, so its throttled time is taken off its
    queue time first. The kernel adds throttled time over CPUs; the share is capped at 1.
    """
    was_throttled = now.throttled_periods > before.throttled_periods
    throttled_s = max(now.throttled_us - before.throttled_us, 0) / 1e6 if was_throttled else 0.0
    queued_s = max((now.runnable_ns - before.runnable_ns) / 1e9 - throttled_s, 0.0)
    cause, lost_s = ("cpu quota", throttled_s) if throttled_s >= queued_s else ("run queue", queued_s)
    share = min(1.0, lost_s / window_s)
    return HostCause(rank, cause, share) if share >= LEAST_SHARE else None


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One look at a GPU.

    ``clock``: that of its multiprocessors, in MHz. ``reasons``: NVML's bits. ``busy``: the GPU is computing.
    """

    time_s: float
    clock: int
    reasons: int
    celsius: int
    busy: bool


def usual_clock(samples: Sequence[GpuSample]) -> float:
    """The median clock in MHz while the GPU was computing; 0 when it never was."""
    return median([one.clock for one in samples if one.busy] or [0])


def low_clock(samples: Sequence[GpuSample], usual_mhz: float) -> HostCause | None:
    """What a GPU of this node loses if the driver held its clock down in most looks; None: it did not, or hardly.

    ``usual_mhz``: the clock that this GPU had before, or that its neighbours have. Not the highest possible one: a GPU
    that works hard is at its power cap, and no slower for it than it always was.
    """
    busy = [one for one in samples if one.busy]
    held = [one for one in busy if one.clock < usual_mhz and one.reasons & _ANY]
    if len(held) < _FEWEST or 2 * len(held) < len(busy):
        return None
    share = 1 - fmean(one.clock for one in held) / usual_mhz
    if share < LEAST_SHARE:
        return None
    last = held[-1]
    why = ", ".join(text for bit, text in _REASONS.items() if any(one.reasons & bit for one in held))
    detail = f"{last.clock} MHz, usually {usual_mhz:.0f}: {why}, {last.celsius} °C"
    return HostCause(-1, "GPU clock", share, detail)
