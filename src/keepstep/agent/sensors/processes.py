"""Finds processes in /proc: whether a worker still runs, whether it is stopped, and which processes are workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
GONE = ("", "Z", "X")  # states of a process that does not run any more
_KILLING_S = 2.0
_STAT_BYTES = 4096  # more than ``/proc/PID/stat`` has


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, distinguished from later ones with the same pid by its start in clock ticks after boot."""

    pid: int
    started: int

    @property
    def started_s(self) -> float:
        """When it began; CLOCK_MONOTONIC, but for time in which the machine was suspended."""
        suspended_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
        return self.started / os.sysconf("SC_CLK_TCK") - suspended_s


def identify(pid: int, proc: Path = PROC) -> ProcessId | None:
    """The process that has this pid now, if there is one."""
    fields = _stat(pid, proc)
    return ProcessId(pid, int(fields[19])) if fields is not None else None


def state_of(process: ProcessId, proc: Path = PROC) -> str:
    """The state letter of a process (R, S, D, T, Z) as in ``/proc/PID/stat``; empty if the process is gone."""
    fields = _stat(process.pid, proc)
    return fields[0] if fields is not None and int(fields[19]) == process.started else ""


def alive(process: ProcessId) -> bool:
    """Whether a process still runs or is stopped; a zombie does not count."""
    return state_of(process) not in GONE


def parent_of(pid: int, proc: Path = PROC) -> int:
    """The parent of a process, also of one that is a zombie; 0 if it is gone."""
    fields = _stat(pid, proc)
    return int(fields[1]) if fields is not None else 0


def carriers(environment: Mapping[str, Container[str]]) -> list[int]:
    """Pids of readable processes that have, for each variable in ``environment``, one of the given values."""
    return [int(one.name) for one in PROC.iterdir() if one.name.isdigit() and _carries(one, environment)]


def kill_carriers(environment: Mapping[str, Container[str]]) -> int:
    """Kill every process except this one that ``carriers`` finds, until there is none; return how many were killed.

    A process is held by a descriptor while its environment is read again, so that no process with a reused pid is hit.
    """
    killed: set[int] = set()
    deadline_s = time.monotonic() + _KILLING_S
    while time.monotonic() < deadline_s:
        found = [pid for pid in carriers(environment) if pid != os.getpid()]
        if not found:
            break
        for pid in found:
            if _kill_if_carries(pid, environment):
                killed.add(pid)
        time.sleep(0.02)
    return len(killed)


def _kill_if_carries(pid: int, environment: Mapping[str, Container[str]]) -> bool:
    with suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if _carries(PROC / str(pid), environment):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False


def _carries(entry: Path, environment: Mapping[str, Container[str]]) -> bool:
    try:
        content = (entry / "environ").read_bytes()
    except OSError:
        return False
    found = dict(pair.split("=", 1) for pair in content.decode(errors="replace").split("\0") if "=" in pair)
    return all(found.get(name) is not None and found[name] in values for name, values in environment.items())


def _stat(pid: int, proc: Path) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` from the state on; the name before it may contain blanks and brackets."""
    try:  # many times a second: a Path or a text file would cost more than the rest
        file = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(file, _STAT_BYTES)
        finally:
            os.close(file)
    except OSError:
        return None
    fields = text.rpartition(b")")[2].decode("ascii", "replace").split()
    return fields if len(fields) > 19 else None
