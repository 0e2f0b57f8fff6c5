"""Why a worker failed, and which of several failures came first.

Its error file tells why, else what it said as it was aborted, its stderr, or its exit code.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from keepstep.core.abort_file import last_words
from keepstep.core.budgets import LEFT_EARLY
from keepstep.core.finding import Finding
from keepstep.core.lost_connection import tells_of_a_timeout, tells_of_another
from keepstep.core.ranges import fold_ranks
from keepstep.core.steady_time import monotonic_s
from keepstep.launch.command.placement import ERROR_FILE, WorkerPlan
from keepstep.launch.workers import error_text
from keepstep.launch.workers.processes import exit_code

_LARGEST_ERROR_FILE_BYTES = 1 << 20
_STDERR_TAIL_BYTES = 16384
_STDERR_LINES = 20
_LAST_WORDS_BYTES = 65536
_LAST_WORDS_LINES = 200
_STANDBY = str(Path(__file__).with_name("standby.py"))
_SAME_MOMENT_S = 0.5
_SEEN_LATE_S = (
    10.0  # for so long after an error that only tells of another worker, that one's end may be seen
)
_SHOWN_S = 0.05  # shortest time that is told in tenths of a second


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker that failed, or that left early."""

    rank: int
    local_rank: int
    pid: int
    status: int  # exit code, or -N for signal N; 0: it left early
    unix_s: float  # when its error file, or what it said as it was aborted, was written, else when it died
    message: str  # its error in one line; "" when it left none
    detail: str  # the traceback, or what else there is
    error_file: Path | None
    by_keepstep: bool = False  # whether keepstep ended the process itself
    late: bool = False  # the launcher had begun to end all workers before, and it may have died of that

    @property
    def is_echo(self) -> bool:
        """Whether its error only tells of another worker."""
        return tells_of_another(self.message)

    @property
    def text(self) -> str:
        """The failure in one line."""
        return self.message or _by_status(self.status, self.pid)

    @property
    def exit_code(self) -> int:
        """The exit code that the run returns for it."""
        return exit_code(self.status)


def examine(
    plan: WorkerPlan,
    pid: int,
    status: int,
    died_unix_s: float,
    stderr: Path | None,
    kept: str | None = None,
) -> Failure:
    """The failure of a dead worker; ``stderr`` is the file with its stderr, None when that was the console.

    ``kept``: the end of what it wrote there, None where that is not known.
    """
    failure = partial(Failure, plan.rank, plan.local_rank, pid, status)
    error_file = Path(plan.environment[ERROR_FILE])
    written = _error_file(error_file)
    if written:
        message, detail, at_s = written
        return failure(min(at_s, died_unix_s), message, detail, error_file)
    words, said_unix_s = _last_words(last_words(error_file, pid)) if status < 0 else ("", died_unix_s)
    died_unix_s = min(said_unix_s, died_unix_s)
    tail = "\n".join(last_lines(stderr)) if stderr else ""
    message = error_text.of_last_words(words) or (error_text.of_stderr(tail, status) if tail else "")
    if tail or words:
        return failure(died_unix_s, message, "\n".join(filter(None, (tail, words))), None)
    detail = _by_status(status, pid)
    if kept and status > 0 and (trace := error_text.last_traceback(kept)):
        # Only a traceback: the last line of what a program says as it ends well or is ended tells nothing for sure.
        return failure(died_unix_s, error_text.of_stderr(trace, status), trace, None)
    if kept:
        said = "\n".join(_lines(kept)[-_STDERR_LINES:])
        return failure(
            died_unix_s, error_text.of_last_words(kept), f"{detail}; its last words:\n{said}", None
        )
    if status > 0 and kept is None:
        detail += "; its traceback is on stderr above (to keep it: @record on main, or --redirects 3)"
    return failure(died_unix_s, "", detail, None)


def left_early(plan: WorkerPlan, pid: int, ended_unix_s: float) -> Failure:
    """A worker that has ended well while others were still training, as the cause of failures that follow."""
    return Failure(plan.rank, plan.local_rank, pid, 0, ended_unix_s, LEFT_EARLY, LEFT_EARLY, None)


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
        return error_text.of_traceback(trace) or error_text.of_message(text or trace), trace.strip(), at_s
    return None


def _field(value: Any, name: str) -> Any:
    """A field of what may be an object of JSON; None where it is none, or has no such field."""
    return cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None


def last_lines(path: Path) -> list[str]:
    return _lines(_end_of(path, _STDERR_TAIL_BYTES))[-_STDERR_LINES:]


def _last_words(path: Path) -> tuple[str, float]:
    """What is in the file, without the frames of a standby below those of the script, and when it was written."""
    lines = [line for line in _lines(_end_of(path, _LAST_WORDS_BYTES)) if _STANDBY not in line]
    said_unix_s = math.inf
    if lines:
        with suppress(OSError):
            said_unix_s = path.stat().st_mtime
    return "\n".join(lines[:_LAST_WORDS_LINES]), said_unix_s


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _end_of(path: Path, most_bytes: int) -> str:
    """The last bytes of a file as text; empty where it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


def first(failures: Sequence[Failure]) -> Failure:
    """The root cause: the failure that came first in time.

    Among failures of one moment it is rather that of a process that keepstep ended itself, then one that neither tells
    of another's death nor may be due to the end of all. Such a one also counts before errors up to 10 s older that only
    tell of another worker: on a busy machine they are seen before the death that they tell of.
    """
    earliest_s = min(failure.unix_s for failure in failures)
    together = [failure for failure in failures if failure.unix_s - earliest_s <= _SAME_MOMENT_S]
    if all(failure.late or failure.is_echo for failure in together):
        own = (failure for failure in failures if not (failure.late or failure.is_echo))
        together += [failure for failure in own if failure.unix_s - earliest_s <= _SEEN_LATE_S]
    return min(
        together,
        key=lambda failure: (not failure.by_keepstep, failure.late or failure.is_echo, failure.unix_s),
    )


def seem_left(failures: Sequence[Failure]) -> bool:
    """Whether all failures so far are lost connections: then a worker that ends well now has ended before them."""
    return all(failure.is_echo and not tells_of_a_timeout(failure.message) for failure in failures)


def to_blame(failures: Sequence[Failure], left: Sequence[Failure], workers: int) -> Failure:
    """The failure for which the job begins again: the root cause, or a worker that left early.

    That is to blame where all errors only tell of another worker. ``left``: workers that have ended well, of so many
    on this node; where more than half have, those that remained are the odd ones.
    """
    is_known = any(not (failure.late or failure.is_echo) for failure in failures)
    if is_known or not left or 2 * len(left) > workers:
        return first(failures)
    return min(left, key=lambda failure: failure.unix_s)


def finding(failure: Failure, node: str, incarnation: int, step: int) -> Finding:
    """The failure as evidence for the controller. ``step``: the one that its rank was in; -1: not known."""
    return Finding(
        kind="crash" if failure.status else "exit",
        rank=failure.rank,
        node=node,
        time_s=monotonic_s(failure.unix_s),
        step=step,
        exit_code=failure.exit_code,
        message=failure.message if failure.status else "",
        incarnation=incarnation,
    )


def render(job: str, host: str, failures: Sequence[Failure], left: Sequence[Failure] = ()) -> str:
    """The failures in torchrun's form: the root cause after the others. ``left``: workers that have ended well."""
    root = first(failures)
    others = sorted((one for one in failures if one is not root), key=lambda one: one.unix_s)
    listed = [_render_one(number, host, failure) for number, failure in enumerate(others, start=1)]
    wide, thin = "=" * 60, "-" * 60
    before = [wide, f"{job} FAILED", thin, "Failures:", *(listed or ["  <NO_OTHER_FAILURES>"]), thin]
    found = _render_one(0, host, root, _note(root, left) if root.is_echo else "")
    return "\n".join([*before, "Root Cause (first observed failure):", found, wide])


def _note(echo: Failure, left: Sequence[Failure]) -> str:
    """What is known of the cause, where the first error only tells of another worker."""
    if not left:
        return "the cause is not known: this error only tells of another rank"
    ranks = f"rank{'s' if len(left) > 1 else ''} {fold_ranks(one.rank for one in left)}"
    before_s = echo.unix_s - min(one.unix_s for one in left)
    when = f"{before_s:.1f} s before" if before_s >= _SHOWN_S else "just then"
    return f"this error only tells of another rank; {ranks} left with exit code 0 {when}"


def _render_one(number: int, host: str, failure: Failure, note: str = "") -> str:
    when = time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(failure.unix_s))
    name = f" ({_signal_name(-failure.status)})" if failure.status < 0 else ""
    fields = {
        "time": when,
        "host": host,
        "rank": f"{failure.rank} (local_rank: {failure.local_rank})",
        "exitcode": f"{failure.status} (pid: {failure.pid}){name}",
        "error_file": str(failure.error_file or "<N/A>"),
        **({"note": note} if note else {}),
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
