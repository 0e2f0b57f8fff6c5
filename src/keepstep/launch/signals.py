"""Who sends the launcher its signals, and what they mean: an end, its time limit, or a warning for the workers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, cast

from keepstep.core.errors import UsageError
from keepstep.core.exit_codes import TEMPORARY_FAILURE, TemporaryKind
from keepstep.core.log_lines import one_line
from keepstep.launch.schedulers.slurm import job_of
from keepstep.launch.schedulers.slurm_preemption import Preemption, preemption_in

if TYPE_CHECKING:
    from keepstep.detect.failure_rows import RowMatcher

TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""How a worker ends that was sent SIGTERM, too, and does nothing about it."""
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which schedulers warn of an end; they are the workers', and end no job."""
END_TIME = "SLURM_JOB_END_TIME"
_KERNEL = 0x80  # SI_KERNEL of asm-generic/siginfo.h: a terminal's key, or its hang-up
_MOST_NAME = 15  # characters of a process's name that the kernel keeps
# Slurm may send --signal up to a minute early, and kills after KillWait; beyond that somebody else ended the job.
_EARLY_S, _LATE_S = 180.0, 600.0
ROWS = {"time-limit": "slurm-time-limit", "preempted": "slurm-preempted"}
"""Rows of the tables of messages by their kind, where the scheduler ends the job."""
_LAST_LINES = 30
_ASKING_S = 10.0
"""Most seconds that Slurm's answer is waited for. It is busy as it ends jobs, and leaves them 30 s (KillWait)."""
_LAST_WORDS_S = 5.0  # what the end of the launcher itself may take
_KILL_WAIT_S = 20.0  # between SIGTERM and SIGKILL Slurm leaves 30 s (KillWait) where nothing else is set
_RESTART_S = 30.0  # what is left of the job's time below which a restart is in vain


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sent a signal.

    Attributes:
        pid: 0 where the kernel did, or a process that this one cannot see, as of the host outside a container.
        name: of its program; empty where it is gone.
    """

    pid: int
    uid: int
    name: str = ""
    by_kernel: bool = False

    def __str__(self) -> str:
        if self.by_kernel:
            return "the kernel (a key of the terminal, or its end)"
        if self.pid == 0:
            return f"a process outside this container, uid {self.uid}"
        return f"pid {self.pid} ({self.name or 'gone'}), uid {self.uid}"


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a signal ends the job. ``kind``: of class "other" in the tables of messages, where the scheduler does it."""

    number: signal.Signals
    text: str
    kind: TemporaryKind = ""
    of_pod: bool = False  # Kubernetes ends this node's pod; whether it ends the job is not known
    end_unix_s: float | None = None  # when the scheduler kills what is left, where it tells

    def left_s(self, now_unix_s: float) -> float:
        """How long a scheduler that ends the job leaves for bringing a step to storage; 0 where it ends none."""
        if not self.kind or self.of_pod:
            return 0.0
        left_s = 0.0 if self.end_unix_s is None else self.end_unix_s - now_unix_s - _LAST_WORDS_S
        return max(left_s, _KILL_WAIT_S)

    @property
    def exit_code(self) -> int:
        """What the launcher returns."""
        return TEMPORARY_FAILURE if self.kind else 128 + self.number


def watch(numbers: Iterable[int]) -> None:
    """Note from now on who sends these signals, whose handlers are set already."""
    from keepstep.launch._senders import watch as watched  # pyright: ignore[reportMissingModuleSource]

    for number in numbers:
        with suppress(OSError):
            watched(number)


def sender_of(number: int) -> Sender | None:
    """Who has sent a signal last; None where that is not known."""
    from keepstep.launch._senders import sender  # pyright: ignore[reportMissingModuleSource]

    found = sender(number)
    if found is None:
        return None
    code, pid, uid = found
    name = ""
    with suppress(OSError):
        if pid > 0:
            with open(f"/proc/{pid}/comm", "rb") as file:
                name = one_line(file.read(_MOST_NAME + 1).decode(errors="replace").strip())
    return Sender(pid, uid, name, code == _KERNEL)


def end_time(environ: Mapping[str, str], given_unix_s: float = 0.0) -> float | None:
    """When the job's time is over, in Unix seconds: as given, else as Slurm tells; None where nobody does."""
    if given_unix_s:
        return given_unix_s
    text = environ.get(END_TIME, "")
    return float(text) if text.isascii() and text.isdigit() and 0 < len(text) < 12 and int(text) else None


def restart_is_vain(end_unix_s: float | None, now_unix_s: float, status: int) -> bool:
    """Whether too little of the job's time is left for a restart.

    ``status``: of the worker that failed; one that SIGTERM ended may have been sent that by the scheduler.
    """
    left_s = _EARLY_S if status in TERMINATED else _RESTART_S
    return end_unix_s is not None and -_LATE_S <= end_unix_s - now_unix_s < left_s


def ending(
    number: signal.Signals,
    sender: Sender | None,
    end_unix_s: float | None,
    now_unix_s: float,
    words: Callable[[], Iterable[str]] = lambda: (),
    *,
    in_pod: bool = False,
    preempted: Callable[[], Preemption | None] = lambda: None,
) -> Ending:
    """What a signal that ends the job means.

    Args:
        number: the signal; ``sender``: who sent it.
        end_unix_s: when the job's time is over.
        now_unix_s: when the signal came.
        words: what each worker has written last; schedulers announce a preemption there.
        in_pod: whether this process runs in a pod, which the kubelet ends with SIGTERM from outside.
        preempted: asks the scheduler whether it ends the job before its time.
    """
    text = f"{number.name} from {sender}" if sender is not None else f"signal {number.name}"
    if not _may_be_schedulers(number, sender):
        return Ending(number, text)
    if end_unix_s is not None and -_EARLY_S <= now_unix_s - end_unix_s <= _LATE_S:
        left_s = end_unix_s - now_unix_s
        when = f"{left_s:.0f} s before" if left_s >= 0 else f"{-left_s:.0f} s after"
        return Ending(
            number, f"the job's time is over ({text}, {when} its end)", "time-limit", end_unix_s=end_unix_s
        )
    if told := preempted():
        return Ending(number, f"{told.text} ({text})", "preempted", end_unix_s=told.end_unix_s)
    if found := _announced(words()):
        kind, line = found
        why = "the job was preempted" if kind == "preempted" else "the job's time is over"
        return Ending(number, f"{why} ({text}; {line})", kind)
    if in_pod and number == signal.SIGTERM and sender is not None and sender.pid == 0:
        return Ending(number, f"the pod is ended ({text})", "preempted", of_pod=True)
    return Ending(number, text)


def preemption_of(environ: Mapping[str, str]) -> Preemption | None:
    """Ask Slurm about this launcher's job, as SIGTERM does not tell; None where it is not preempted, or Slurm away."""
    if not environ.get("SLURM_JOB_ID"):
        return None
    with suppress(OSError, subprocess.SubprocessError, UsageError):
        asking = ["scontrol", "show", "job", job_of(environ)]
        done = subprocess.run(
            asking, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_ASKING_S
        )
        return preemption_in(done.stdout.decode(errors="replace"), environ.get("SLURM_RESTART_COUNT", ""))
    return None


def _may_be_schedulers(number: signal.Signals, sender: Sender | None) -> bool:
    """Whether a scheduler may have sent a signal: those run as root, or where this process cannot see them."""
    if sender is None:
        return number != signal.SIGINT
    return not sender.by_kernel and (sender.pid == 0 or sender.uid == 0 or sender.name.startswith("slurm"))


def _announced(words: Iterable[str]) -> tuple[TemporaryKind, str] | None:
    """The kind of the newest line in which a scheduler announces the end, and the line."""
    matcher: RowMatcher | None = None
    for text in words:
        for line in reversed(text.splitlines()[-_LAST_LINES:]):
            matcher = matcher or _schedulers_rows()
            found = matcher.match(line[:500])
            if found is not None:
                return cast("TemporaryKind", found[0].kind), one_line(line.strip())[:200]
    return None


@cache
def _schedulers_rows() -> RowMatcher:
    from keepstep.detect.failure_rows import RowMatcher, shipped_rows

    return RowMatcher([row for row in shipped_rows() if row.kind in ROWS])


def pass_on(number: signal.Signals, processes: Mapping[int, int]) -> list[int]:
    """Send a signal to those workers that handle it, as it would end the others; returns their ranks.

    ``processes``: process ids by rank.
    """
    told: list[int] = []
    for rank, pid in sorted(processes.items()):
        if number in caught(pid):
            with suppress(OSError):
                os.kill(pid, number)
                told.append(rank)
    return told


def caught(pid: int) -> Collection[int]:
    """The signals for which a process has a handler."""
    with suppress(OSError, ValueError):
        with open(f"/proc/{pid}/status", "rb") as file:
            line = next(line for line in file if line.startswith(b"SigCgt:"))
        mask = int(line.split()[1], 16)
        return frozenset(number for number in range(1, 65) if mask >> (number - 1) & 1)
    return frozenset()
