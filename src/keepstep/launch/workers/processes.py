"""The launcher's children: how they are started, how their death is noticed, and how they are ended.

Every child leads its own session and process group, and is ended by the kernel when the launcher dies. The launcher
adopts orphans of its children (``PR_SET_CHILD_SUBREAPER``), so that it can end and reap them too. The guard knows all
process groups, and ends them when the launcher cannot.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from keepstep.core.descriptors import give_limit
from keepstep.core.errors import RunError
from keepstep.launch.workers.guard import Guard, signal_group

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4  # flag of a thread that is exiting (linux/sched.h)
_CAP_SYS_NICE = 23
_AGAIN_S = 0.1
UNKILLABLE_S = 10.0  # a process that lives as long after SIGKILL, and does not end, is stuck in the kernel
FREEING_S = 300.0  # most seconds that the kernel may take to free the memory of failed workers
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(eq=False, slots=True)
class Child:
    """A child process; ``status`` is None while it lives, then as ``subprocess``: exit code, or -N for signal N."""

    name: str
    pid: int
    started_s: float  # by CLOCK_MONOTONIC
    status: int | None = None
    ended_s: float = 0.0
    low: bool = False  # whether its priority is to be low
    stdout: IO[bytes] | None = None
    _popen: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def alive(self) -> bool:
        """Whether it has not been reaped yet."""
        return self.status is None


def exit_code(status: int) -> int:
    """A child's status as a shell returns it: 128 + N when signal N ended it."""
    return status if status >= 0 else 128 - status


class Processes:
    """All children of this launcher. ``reap`` is to be called on every SIGCHLD."""

    def __init__(self, guard: Guard, descriptors: int | None = None) -> None:
        """``descriptors``: soft limit of open files that children begin with; None: the launcher's own."""
        self.guard = guard
        self._descriptors = descriptors
        self._children: dict[int, Child] = {}
        self._on_exit: dict[int, Callable[[Child], None]] = {}
        self.gone: dict[int, str] = {}  # processes that were reaped, with the names of children
        self.stuck: set[int] = set()  # children that SIGKILL did not end
        # Of this launcher and its children, also those that have ended: others are of processes that called setsid.
        self.sessions = {os.getsid(0)}
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        on_exit: Callable[[Child], None],
        saves: bool = False,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start a program in just this environment; ``on_exit`` is called from ``reap`` once it has ended.

        ``saves``: whether it has something to save when the launcher dies: it is sent SIGTERM then, and SIGKILL seconds
        later. Others are sent SIGKILL at once. Raises RunError where the program cannot be started.
        """
        launcher, soft = os.getpid(), self._descriptors
        death_signal = signal.SIGTERM if saves else signal.SIGKILL

        def bind_to_launcher() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
            # Lets the agent, a descendant of the launcher, read where its Python is (Yama, ptrace_scope 1).
            _libc.prctl(_PR_SET_PTRACER, launcher, 0, 0, 0)
            if os.getppid() != launcher:  # the launcher died between fork and prctl
                os._exit(1)
            if soft is not None:
                give_limit(soft)

        try:
            popen = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                start_new_session=True,
                # The launcher has one thread, so running Python between fork and exec is safe.
                preexec_fn=bind_to_launcher,
            )
        except OSError as error:
            raise RunError(
                f"{name}: cannot start {command[0]}: {error.strerror}; check the path and its mode"
            ) from None
        child = Child(name, popen.pid, time.monotonic(), stdout=popen.stdout, _popen=popen)
        self._children[child.pid] = child
        self.gone.pop(child.pid, None)
        self.sessions.add(child.pid)
        self._on_exit[child.pid] = on_exit
        self.guard.add(child.pid, at_once=not saves)
        return child

    def become(self, child: Child, name: str, on_exit: Callable[[Child], None]) -> None:
        """Give a living child another name, and let its end be told to another owner."""
        child.name = name
        self._on_exit[child.pid] = on_exit

    def clear(self, child: Child) -> None:
        """Kill what an ended child has left in its process group."""
        signal_group(child.pid, signal.SIGKILL)
        self.guard.remove(child.pid)

    def reap(self) -> list[int]:
        """Collect every child that has ended, in the order in which the kernel tells; returns unknown pids.

        A guard that was killed is started again.
        """
        unknown: list[int] = []
        while True:
            try:
                pid, raw = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return unknown
            if pid == 0:
                return unknown
            if pid == self.guard.pid:
                self.guard.start()
                continue
            child = self._children.pop(pid, None)
            self.gone[pid] = child.name if child else ""
            self.stuck.discard(pid)
            if child is None:
                unknown.append(pid)
                continue
            child.status = os.waitstatus_to_exitcode(raw)
            child.ended_s = time.monotonic()
            if child._popen is not None:  # pyright: ignore[reportPrivateUsage]
                child._popen.returncode = child.status  # pyright: ignore[reportPrivateUsage]
            self._on_exit.pop(pid)(child)


def failing_status(pid: int) -> int | None:
    """The status, as in `Child.status`, of a process that has failed and whose memory is still being freed; else None.

    The kernel reports a death only after that: a quarter of a second later for each GB, or more.
    """
    try:
        status = _exiting(pid, pid)
        if not status or any(
            _exiting(pid, int(thread)) is None for thread in os.listdir(f"/proc/{pid}/task")
        ):
            return None
        return os.waitstatus_to_exitcode(status)
    except (OSError, ValueError, IndexError):  # the process was reaped meanwhile
        return None


def _exiting(pid: int, thread: int) -> int | None:
    """The raw exit status of a thread that exits or has exited; None: it lives."""
    try:
        with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return int(words[49]) if int(words[6]) & _PF_EXITING else None


def give_priority(
    child: Child, *, low: bool, idle: bool = False, then: Callable[[], None] = lambda: None
) -> None:
    """Let a child's session run only on CPU time that others leave (``low``), or as usual; calls ``then`` after that.

    Without privileges the kernel allows one such change in a tenth of a second on the whole machine, so that it is
    tried again, until the next call for this child. Needs a running event loop. ``idle``: whether to use
    ``SCHED_IDLE``, too, which still works where control groups switch autogroups off.
    """
    child.low = low

    def attempt() -> None:
        if not child.alive or child.low != low:
            return
        if _set_priority(child.pid, low, idle):
            then()
        else:
            asyncio.get_running_loop().call_later(_AGAIN_S, attempt)

    attempt()


def _set_priority(leader: int, low: bool, idle: bool) -> bool:
    """Set the priority of a session; False: the kernel refuses now."""
    if not low or (idle and _may_leave_idle()):
        before, after = (os.SCHED_OTHER, os.SCHED_IDLE) if low else (os.SCHED_IDLE, os.SCHED_OTHER)
        with suppress(OSError):
            for thread in map(int, os.listdir(f"/proc/{leader}/task")):
                if os.sched_getscheduler(thread) == before:
                    os.sched_setscheduler(thread, after, os.sched_param(0))
    try:
        with open(f"/proc/{leader}/autogroup", "w") as file:
            file.write("19" if low else "0")
    except OSError as error:
        return error.errno != errno.EAGAIN
    return True


def _may_leave_idle() -> bool:
    """Whether this process may take ``SCHED_IDLE`` back."""
    with suppress(OSError, ValueError, StopIteration), open("/proc/self/status") as file:
        held = next(line for line in file if line.startswith("CapEff:"))
        return bool(int(held.split()[1], 16) >> _CAP_SYS_NICE & 1)
    return False


def end_group(leader: int, number: int) -> bool:
    """Send a process group a signal that ends it; stopped members are continued, so that they can handle it."""
    asked = signal_group(leader, number)
    if asked and number != signal.SIGKILL:
        signal_group(leader, signal.SIGCONT)
    return asked


def descendants(
    root: int, apart_from: frozenset[int] = frozenset(), sessions: Container[int] | None = None
) -> list[int]:
    """Living processes below ``root``, as in ``/proc``; no zombies, and neither ``apart_from`` nor what is below.

    ``sessions``: those of other sessions, which have called setsid, are left out.
    """
    children: dict[int, list[int]] = {}
    left_out: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                state, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        children.setdefault(int(parent), []).append(int(entry))
        if state in (b"Z", b"X") or (sessions is not None and int(session) not in sessions):
            left_out.add(int(entry))
    found: list[int] = []
    pending = [root]
    while pending:
        for pid in children.get(pending.pop(), ()):
            if pid not in apart_from:
                found.append(pid)
                pending.append(pid)
    return [pid for pid in found if pid not in left_out]
