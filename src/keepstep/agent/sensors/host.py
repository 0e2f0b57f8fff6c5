"""Finds what the host takes from workers, by the kernel's counters of the last ten seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

from keepstep.agent.sensors.processes import ProcessId
from keepstep.core.control_groups import groups_of
from keepstep.core.cpu_counters import CpuCounters, cpu_counters, quota_file
from keepstep.core.summary import HostCause
from keepstep.detect import host_cause

_WINDOW = 11  # number of samples that are judged: ten seconds, at one a second
_QUOTA_LOOKS = 10  # samples between two searches for a CPU quota, which may be set while the job runs
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
        found: dict[bytes, Path | None] = {}  # the quota of each control group: most ranks share one
        for rank, process in processes.items():
            known = self._processes.get(rank) == process
            if not known or self._count % _QUOTA_LOOKS == 0:
                group = groups_of(process.pid)
                if group not in found:
                    found[group] = quota_file(process.pid)
                quota = found[group]
                if not known or quota != self._quotas.get(rank):  # another cgroup has counters of its own
                    self._looks[rank] = deque(maxlen=_WINDOW)
                self._processes[rank], self._quotas[rank] = process, quota
            counters = cpu_counters(process.pid, self._quotas[rank])
            if counters is not None:
                self._looks[rank].append((now_s, counters))
        self._count += 1

    def causes(self) -> tuple[HostCause, ...]:
        """What the host has taken from each worker recently, if it is enough to matter."""
        found: list[HostCause] = []
        for rank, looks in sorted(self._looks.items()):
            if len(looks) < 2 or looks[-1][0] - looks[0][0] < _LEAST_S:
                continue
            (begin_s, first), (end_s, last) = looks[0], looks[-1]
            cause = host_cause(rank, end_s - begin_s, first, last)
            if cause is not None:
                found.append(cause)
        return tuple(found)
