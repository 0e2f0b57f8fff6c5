"""What /proc tells about a worker: is it that process still, is it stopped, what of its time did the host take."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that cannot be taken for a later one with the same pid: ``started`` is in clock ticks after boot."""

    pid: int
    started: int


def identify(pid: int, proc: Path = PROC) -> ProcessId | None:
    """The process that has ``pid`` now; None when there is none."""
    fields = _stat(pid, proc)
    return ProcessId(pid, int(fields[19])) if fields is not None else None


def state_of(process: ProcessId, proc: Path = PROC) -> str:
    """R, S, D, T, Z as in ``/proc/PID/stat``; empty when it is gone or the pid is another's now."""
    fields = _stat(process.pid, proc)
    return fields[0] if fields is not None and int(fields[19]) == process.started else ""


def carries(pid: int, name: str, value: str, proc: Path = PROC) -> bool:
    """Whether the process was started with environment variable ``name`` = ``value``."""
    try:
        content = (proc / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return f"{name}={value}".encode() in content.split(b"\0")


def kill_group(process: ProcessId, proc: Path = PROC) -> bool:
    """SIGKILL the process and the process group that it leads; False when it is gone already."""
    if not state_of(process, proc):
        return False
    try:
        leads = os.getpgid(process.pid) == process.pid
        if leads:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _stat(pid: int, proc: Path) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` from the state on (the name before it may hold blanks and brackets)."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > 19 else None
