"""Why a worker on a busy host is slow: its CPU quota is used up, or it waits for a CPU that others hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

HostCauseKind = Literal["cpu-quota", "run-queue"]


@dataclass(frozen=True, slots=True)
class HostSample:
    """What the kernel counted for one worker during ``window_s`` seconds (differences, not totals).

    ``periods``, ``throttled_periods`` and ``throttled_us`` are ``nr_periods``, ``nr_throttled`` and
    ``throttled_usec`` of the worker's ``cpu.stat``; ``queue_wait_ns`` and ``on_cpu_ns`` the second and first
    field of ``/proc/PID/schedstat``.
    """

    rank: int
    window_s: float
    periods: int = 0
    throttled_periods: int = 0
    throttled_us: int = 0
    queue_wait_ns: int = 0
    on_cpu_ns: int = 0


@dataclass(frozen=True, slots=True)
class HostCause:
    """``share`` (0 to 1) of the time of ``rank``, the worst of ``ranks``, that was lost to ``kind``.

    ``cpu-quota``: throttled by the cgroup's CPU limit. ``run-queue``: ready to run, but every allowed CPU was
    taken.
    """

    kind: HostCauseKind
    share: float
    rank: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        what = "CPU quota throttled" if self.kind == "cpu-quota" else "run-queue delay (CPU contention)"
        return f"{what}: rank {self.rank} lost {self.share:.0%} of its time"


def host_cause(samples: Sequence[HostSample], *, least_share: float = 0.05) -> HostCause | None:
    """The host's part in a slowdown, from samples of some seconds per worker; None when no worker lost ``least_share``.

    Samples of one rank are added up. A throttled process also waits in the run queue, so throttled time is
    taken off its queue time first. The kernel adds throttled time over CPUs; the share is capped at 1. Raises
    ValueError for a window that is not positive or a negative count.
    """
    window_s: dict[int, float] = {}
    throttled_s: dict[int, float] = {}
    queued_s: dict[int, float] = {}
    for sample in samples:
        counts = (
            sample.periods,
            sample.throttled_periods,
            sample.throttled_us,
            sample.queue_wait_ns,
            sample.on_cpu_ns,
        )
        if not sample.window_s > 0 or min(counts) < 0:
            raise ValueError(
                f"rank {sample.rank}: a host sample needs a positive window and counts >= 0, got {sample}"
            )
        window_s[sample.rank] = window_s.get(sample.rank, 0.0) + sample.window_s
        throttled_s[sample.rank] = throttled_s.get(sample.rank, 0.0) + (
            sample.throttled_us / 1e6 if sample.throttled_periods else 0.0
        )
        queued_s[sample.rank] = queued_s.get(sample.rank, 0.0) + sample.queue_wait_ns / 1e9
    losses: list[tuple[float, int, HostCauseKind]] = []
    for rank, window in window_s.items():
        throttled = min(1.0, throttled_s[rank] / window)
        queued = min(1.0, max(0.0, queued_s[rank] - throttled_s[rank]) / window)
        losses.append((throttled, rank, "cpu-quota") if throttled >= queued else (queued, rank, "run-queue"))
    hit = [loss for loss in losses if loss[0] >= least_share]
    if not hit:
        return None
    share, rank, kind = max(hit, key=lambda loss: (loss[0], -loss[1]))
    return HostCause(kind, share, rank, tuple(sorted(other for _, other, why in hit if why == kind)))
