"""Host causes beside training: looks at the kernel's counters once a second and judges the last ten seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

from keepstep.agent.host import CpuCounters, cpu_counters, quota_file
from keepstep.agent.processes import ProcessId
from keepstep.core.summary import HostCause

_WINDOW = 11  # looks, hence ten seconds at one a second
_QUOTA_LOOKS = 10  # a quota may be set while the job runs
_LEAST_SHARE = 0.1  # of the wall time
_LEAST_S = 2.0


class HostSensors:
    """The counters of the node's workers over time."""

    def __init__(self) -> None:
        self._looks: dict[int, deque[tuple[float, CpuCounters]]] = {}
        self._processes: dict[int, ProcessId] = {}
        self._quotas: dict[int, Path | None] = {}
        self._count = 0

    def look(self, now_s: float, processes: Mapping[int, ProcessId]) -> None:
        """Read the counters of every rank's process."""
        for rank, process in processes.items():
            if self._processes.get(rank) != process or self._count % _QUOTA_LOOKS == 0:
                self._quotas[rank] = quota_file(process.pid)
            if self._processes.get(rank) != process:
                self._processes[rank] = process
                self._looks[rank] = deque(maxlen=_WINDOW)
            counters = cpu_counters(process.pid, self._quotas[rank])
            if counters is not None:
                self._looks[rank].append((now_s, counters))
        self._count += 1

    def causes(self) -> tuple[HostCause, ...]:
        """What the host took from the workers lately, where it is a tenth of their time or more."""
        return tuple(cause for rank, looks in self._looks.items() for cause in _judge(rank, list(looks)))


def _judge(rank: int, looks: list[tuple[float, CpuCounters]]) -> list[HostCause]:
    if len(looks) < 2 or looks[-1][0] - looks[0][0] < _LEAST_S:
        return []
    (begin_s, first), (end_s, last) = looks[0], looks[-1]
    wall_s = end_s - begin_s
    found: list[HostCause] = []
    periods = last.periods - first.periods
    throttled = last.throttled_periods - first.throttled_periods
    if periods > 0 and throttled / periods >= _LEAST_SHARE:
        share = min(1.0, (last.throttled_s - first.throttled_s) / wall_s)
        detail = f"the CPU quota ran out in {throttled} of {periods} periods within {wall_s:.0f} s"
        found.append(HostCause(rank, "cpu quota", share, detail))
    waited_s = last.runnable_s - first.runnable_s
    if waited_s / wall_s >= _LEAST_SHARE:
        detail = f"ready but waiting for a CPU for {waited_s:.1f} of {wall_s:.0f} s"
        found.append(HostCause(rank, "run queue", min(1.0, waited_s / wall_s), detail))
    return found
