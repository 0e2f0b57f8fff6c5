"""Why a worker on a busy host is slow: its CPU quota is used up, or it waits for a CPU that others hold."""

from __future__ import annotations

from keepstep.core.cpu_counters import CpuCounters
from keepstep.core.summary import HostCause

LEAST_SHARE = 0.05  # part of a worker's time; a smaller loss is no cause


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
