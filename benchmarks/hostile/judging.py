"""What a command may do with a hostile file, and a run of it under limits."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_S = 10  # processor time: the machine may be busy with other things
MOST_BYTES = 1 << 30
WALL_S = 60  # what waits for ever (a FIFO) takes no processor time
# Threads of numerical libraries map memory that they do not use.
SINGLE = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "ARROW_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}


@dataclass(frozen=True)
class Ended:
    """How a command ended. ``code``: its exit code, negative for a signal, None for one that had to be killed."""

    code: int | None
    out: str
    err: str
    cpu_s: float
    peak_bytes: int


def limit(cpu_s: int = MOST_S + 1) -> None:
    """Bound what this process may use from here on: memory, and ``cpu_s`` more seconds of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + cpu_s)
    _set(resource.RLIMIT_DATA, _held_bytes() + MOST_BYTES)
    _set(resource.RLIMIT_CORE, 0)


def _held_bytes() -> int:
    """The data that this process has mapped already, more than a command's that has just begun."""
    text = Path("/proc/self/status").read_text()
    held = next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmData")), 0)
    return max(held - (64 << 20), 0)


def unlimit() -> None:
    """Take the limits back."""
    for which in (resource.RLIMIT_CPU, resource.RLIMIT_DATA):
        _set(which, resource.getrlimit(which)[1])


def _set(which: int, most: int) -> None:
    resource.setrlimit(which, (most, resource.getrlimit(which)[1]))


def run(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Ended:
    """Run ``keepstep ARGUMENTS`` under the limits."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "keepstep.cli", *arguments],
            cwd=ROOT,
            env={**os.environ, **SINGLE, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            preexec_fn=limit,
        )
        until_s = time.monotonic() + WALL_S
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        while not pid and time.monotonic() < until_s:
            time.sleep(0.02)
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
        late = not pid
        if late:
            process.kill()
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        return Ended(
            None if late else process.returncode,
            out.read(1 << 20).decode(errors="replace"),
            err.read(1 << 20).decode(errors="replace"),
            used.ru_utime + used.ru_stime,
            used.ru_maxrss << 10,
        )


def faults(ended: Ended, codes: Sequence[int] = (0, 1, 2)) -> list[str]:
    """What was wrong with the way in which a command ended; empty: nothing."""
    found: list[str] = []
    if ended.code is None:
        found.append(f"did not end within {WALL_S} s")
    elif ended.code not in codes:
        found.append(f"exit code {ended.code}, not one of {', '.join(map(str, codes))}")
    if "Traceback" in ended.err + ended.out:
        found.append("a traceback: " + ended.err.strip().rsplit("\n", 1)[-1][:200])
    if ended.code == 2 and len(ended.err.strip().split("\n")) != 1:
        found.append(f"{len(ended.err.strip().splitlines())} lines on stderr, not one")
    if ended.code == 2 and not ended.err.strip():
        found.append("nothing said")
    if "more memory than" in ended.err:
        found.append("ended by the limit of memory, not by a bound of its own")
    if ended.cpu_s > MOST_S:
        found.append(f"{ended.cpu_s:.1f} s of processor time")
    if ended.peak_bytes > MOST_BYTES:
        found.append(f"{ended.peak_bytes >> 20} MiB of memory")
    return found
