"""Why a worker failed, from its error file, else its stderr or exit code; and which of several failures came first."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from keepstep.core.finding import Finding
from keepstep.core.lost_connection import tells_of_another
from keepstep.launch.command.placement import ERROR_FILE, WorkerPlan
from keepstep.launch.workers.processes import exit_code

_LARGEST_ERROR_FILE_BYTES = 1 << 20
_STDERR_TAIL_BYTES = 16384
_STDERR_LINES = 20
_SAME_MOMENT_S = 0.5


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker that failed."""

    rank: int
    local_rank: int
    pid: int
    status: int  # exit code, or -N for signal N
    unix_s: float  # when its error file was written, else when it died
    message: str  # its error in one line; "" when it left none
    detail: str  # the traceback, or what else there is
    error_file: Path | None
    by_keepstep: bool = False  # whether keepstep ended the process itself

    @property
    def text(self) -> str:
        """The failure in one line."""
        return self.message or _by_status(self.status, self.pid)

    @property
    def exit_code(self) -> int:
        """The exit code that the run returns for it."""
        return exit_code(self.status)


def examine(plan: WorkerPlan, pid: int, status: int, died_unix_s: float, stderr: Path | None) -> Failure:
    """The failure of a dead worker; ``stderr`` is the file with its stderr, None when that was the console."""
    failure = partial(Failure, plan.rank, plan.local_rank, pid, status)
    error_file = Path(plan.environment[ERROR_FILE])
    written = _error_file(error_file)
    if written:
        message, detail, at_s = written
        return failure(min(at_s, died_unix_s), message, detail, error_file)
    tail = _last_lines(stderr) if stderr else []
    if tail:
        return failure(died_unix_s, tail[-1], "\n".join(tail), None)
    detail = _by_status(status, pid)
    if status > 0:
        detail += "; its traceback is on stderr above (to keep it: @record on main, or --redirects 3)"
    return failure(died_unix_s, "", detail, None)


def _by_status(status: int, pid: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    return f"signal {-status} ({_signal_name(-status)}) received by process {pid}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "real-time signal"


def _error_file(path: Path) -> tuple[str, str, float] | None:
    """Message, traceback and time in Unix seconds, from the file that torch's ``@record`` writes; None without one."""
    try:
        with open(path, "rb") as file:
            at_s = os.fstat(file.fileno()).st_mtime
            content: Any = json.loads(file.read(_LARGEST_ERROR_FILE_BYTES))
    except (OSError, ValueError):
        return None
    said = _field(content, "message")
    text = said if isinstance(said, str) else str(_field(said, "message") or "")
    trace = str(_field(_field(said, "extraInfo"), "py_callstack") or text)
    if isinstance(said, dict) or text:
        lines = [line.strip() for line in (text or trace).splitlines() if line.strip()]
        return lines[0][:500] if lines else "", trace.strip(), at_s
    return None


def _field(value: Any, name: str) -> Any:
    """A field of what may be an object of JSON; None where it is none, or has no such field."""
    return cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None


def _last_lines(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _STDERR_TAIL_BYTES))
            text = file.read(_STDERR_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-_STDERR_LINES:]


def first(failures: Sequence[Failure]) -> Failure:
    """The root cause: the failure that came first in time.

    Among failures of one moment it is rather that of a process that keepstep ended itself, then one whose error does
    not tell of another's death: workers may notice a death before the launcher does.
    """
    earliest_s = min(failure.unix_s for failure in failures)
    together = [failure for failure in failures if failure.unix_s - earliest_s <= _SAME_MOMENT_S]
    return min(
        together,
        key=lambda failure: (not failure.by_keepstep, tells_of_another(failure.message), failure.unix_s),
    )


def finding(failure: Failure, node: str, incarnation: int) -> Finding:
    """The failure as evidence for the controller."""
    return Finding(
        kind="crash",
        rank=failure.rank,
        node=node,
        time_s=time.monotonic() - (time.time() - failure.unix_s),
        step=-1,
        exit_code=failure.exit_code,
        message=failure.message,
        incarnation=incarnation,
    )


def render(job: str, host: str, failures: Sequence[Failure]) -> str:
    """The failures in torchrun's form: the root cause after the others."""
    root = first(failures)
    others = sorted((one for one in failures if one is not root), key=lambda one: one.unix_s)
    listed = [_render_one(number, host, failure) for number, failure in enumerate(others, start=1)]
    wide, thin = "=" * 60, "-" * 60
    before = [wide, f"{job} FAILED", thin, "Failures:", *(listed or ["  <NO_OTHER_FAILURES>"]), thin]
    return "\n".join([*before, "Root Cause (first observed failure):", _render_one(0, host, root), wide])


def _render_one(number: int, host: str, failure: Failure) -> str:
    when = time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(failure.unix_s))
    name = f" ({_signal_name(-failure.status)})" if failure.status < 0 else ""
    fields = {
        "time": when,
        "host": host,
        "rank": f"{failure.rank} (local_rank: {failure.local_rank})",
        "exitcode": f"{failure.status} (pid: {failure.pid}){name}",
        "error_file": str(failure.error_file or "<N/A>"),
        "traceback": failure.detail.replace("\n", "\n  "),
    }
    return "\n".join([f"[{number}]:", *(f"  {label:<10}: {text}" for label, text in fields.items())])


def hand_up(failure: Failure, target: str) -> None:
    """Copy the root cause to the launcher's own error file, where the program that started the launcher finds it.

    ``target``: ``TORCHELASTIC_ERROR_FILE`` of the launcher. Nothing is said where it cannot be written.
    """
    try:
        content: Any = json.loads(failure.error_file.read_bytes()) if failure.error_file else None
        if not isinstance(content, dict):
            content = {
                "message": {"message": failure.text, "extraInfo": {"timestamp": str(int(failure.unix_s))}}
            }
        said = _field(content, "message")
        if isinstance(said, dict):
            said["errorCode"] = failure.exit_code
        Path(target).write_text(json.dumps(content))
    except (OSError, ValueError):
        return
