"""Will a process that makes no progress go on by itself? Judged by what it has done from one look to the next."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from keepstep.core.summary import How, Stillness

# What waiting costs, measured over idle processes: Gloo's loop makes a hundred context switches a second and 2 ms of
# CPU, NCCL's watchdog polls ten times a second, a data loader looks for its dead worker every 5 s.
_IDLE_CPU = 0.03  # share of one CPU
_IDLE_SWITCHES = 2.0  # times a second that a waiting thread wakes up
_IDLE_BYTES = 512.0  # bytes a second read, written, sent and received
_QUEUED = 0.3  # share of the time for which a thread that has little to do waits for a CPU at most
_SPINS_CPU = 0.5  # share of one CPU from which a process computes
_LONGEST_GAP_S = 30.0  # between two looks; more is no unbroken observation
# Seconds of stillness after which the frames are read once, because a debugger's prompt looks like a hang.
_ASK_STACK_S = 10.0
# Functions of the kernel in which a process waits that others will wake up, though nothing of it moves: file servers,
# file systems of user space (the bytes are moved by another process), a frozen control group.
_SERVED = re.compile(
    r"fuse|request_wait_answer|nfs|rpc_|ceph|cifs|smb|ptlrpc|lustre|osc_|cl_sync|gpfs|beegfs|9p_|p9_|virtio_fs"
    r"|freezer_trap|refrigerator"
)
# The kernel's function in which a process waits for a child's end, and the module that waits for what one writes.
_CHILD_ENDS, _CHILD_WRITES = "(do_wait)", re.compile(r"\((?:.*/)?subprocess\.py:\d+\)")
_DEBUGGER = re.compile(r"\((?:.*/)?(?:pdb|bdb|ipdb|pudb|pydevd\w*|debugpy)(?:/.*)?\.py:\d+\)", re.MULTILINE)


def is_served(place: str) -> bool:
    """Whether a thread that waits at this place of the kernel is let go by somebody else, though it does not move."""
    return _SERVED.search(place) is not None


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process had done by a moment. Counters only grow while it lives.

    ``thread`` in names: the training thread, which owes the next operation, and the main thread where that is another.
    """

    at_s: float
    state: str  # state of the training thread, as in ``/proc/PID/stat``; "D" if any thread of it or a child is in it
    thread_cpu_s: float
    thread_switches: int  # context switches
    cpu_s: float  # CPU time of all its threads
    children: frozenset[int] = frozenset()  # process ids of all descendants
    children_cpu_s: float = 0.0
    moved_bytes: int = 0  # read, written, sent and received, by it and its descendants
    place: str = ""  # where the kernel keeps the training thread waiting, or whoever a file server keeps
    queued_s: float = 0.0  # time in which its threads were ready to run and waited for a CPU
    thread_queued_s: float = 0.0
    stack: str = ""  # Python frames of the training thread, innermost first; "" where they were not read


_STATES: dict[str, How] = {"T": "stopped", "t": "traced", "D": "kernel"}


class StillnessJudge:
    """Follows one process. A look at which it did something else than at the last one begins a new time."""

    def __init__(self) -> None:
        self._last: Activity | None = None
        self._progress = -1
        self._stack = ""  # frames in which the training thread has been since the time began
        self._asked = False  # whether they were read although it has not run
        self.judged: Stillness | None = None

    def must_read_stack(self, now: Activity) -> bool:
        """Whether only the frames tell more: the training thread has run since the last look, or is still for long."""
        if self._last is None:
            return False
        if _ran(self._last, now):
            return True
        judged = self.judged
        if (
            judged is None
            or judged.how != "still"
            or self._asked
            or now.at_s - judged.since_s <= _ASK_STACK_S
        ):
            return False
        self._asked = True
        return True

    def take(self, now: Activity, progress: int) -> Stillness:
        """Judge the process at a look. ``progress``: a number that grows whenever its rank makes progress."""
        last, self._last = self._last, now
        if last is None or progress != self._progress or now.at_s - last.at_s > _LONGEST_GAP_S:
            self._progress, self._stack, self.judged, last = progress, "", None, None
            self._asked = False
        how, why = self._compared(last, now)
        if how == "stopped" and last is not None and _did_something(last, now):
            self.judged = None  # the process ran between the two looks
        begun_s = last.at_s if last is not None and how in ("still", "spins") else now.at_s
        judged = self._note(how, begun_s, why, now.at_s)
        if how == "still" and now.children and self._waits_for_child(now):
            judged = self.judged = replace(judged, awaits_child=True)
        return judged

    def unread(self, at_s: float, why: str) -> Stillness:
        """Note that the process could not be read, which breaks any proof."""
        self._last = None
        return self._note("unread", at_s, why, at_s)

    def _note(self, how: How, begun_s: float, why: str, at_s: float) -> Stillness:
        before = self.judged
        since_s = before.since_s if before is not None and before.how == how else begun_s
        self.judged = Stillness(how, since_s, why, at_s)
        return self.judged

    def _compared(self, last: Activity | None, now: Activity) -> tuple[How, str]:
        """What the process has done from one look to the next, and the words for it."""
        known, ran = self._stack, last is not None and _ran(last, now)
        if ran or now.stack:
            self._stack = now.stack
        if now.state in _STATES:
            return _STATES[now.state], now.place
        if is_served(now.place):
            return "kernel", now.place
        if _DEBUGGER.search(self._stack):
            return "traced", "its frames show a debugger's prompt"
        if last is None:
            return "still", now.place
        seconds = max(now.at_s - last.at_s, 1e-3)
        if moved := _moved(last, now, seconds):
            return "moves", moved
        if now.cpu_s - last.cpu_s > _IDLE_CPU * seconds:
            return self._computes(last, now, seconds, known)
        if now.state == "R" or now.thread_queued_s - last.thread_queued_s > _QUEUED * seconds:
            return "moves", "its training thread waits for a CPU"
        if ran:
            if now.thread_switches - last.thread_switches > 1 + _IDLE_SWITCHES * seconds:
                return "moves", "its training thread wakes up many times a second"
            if not now.stack:
                return "moves", "its training thread wakes up, and its Python stack cannot be read (py-spy)"
            if now.stack != known:
                return "moves", "its training thread moves on"
        return "still", _innermost(self._stack) or now.place

    def _waits_for_child(self, now: Activity) -> bool:
        return _CHILD_ENDS in now.place or _CHILD_WRITES.search(self._stack) is not None

    def _computes(self, last: Activity, now: Activity, seconds: float, known: str) -> tuple[How, str]:
        """Whether the training thread spins. ``known``: the frames in which it was at the last look."""
        ran_s = now.cpu_s - last.cpu_s
        if ran_s + now.queued_s - last.queued_s < _SPINS_CPU * seconds:
            return "moves", "it computes now and then"
        if 2 * (now.thread_cpu_s - last.thread_cpu_s) < ran_s:
            return "moves", "another thread of it computes"
        if not now.stack:
            return "moves", "it computes, and its Python stack cannot be read (py-spy)"
        if _functions(now.stack) != _functions(known):
            return "moves", "it computes, in one function after the other"
        return "spins", _innermost(now.stack)


def _innermost(stack: str) -> str:
    return stack.partition("\n")[0].strip()


def _functions(stack: str) -> list[str]:
    """The functions of these frames, without the lines that a loop in one of them goes through."""
    return [frame.rpartition(":")[0] for frame in stack.splitlines()]


def _moved(last: Activity, now: Activity, seconds: float) -> str:
    """What shows that the process works on, whatever its own threads do; "": nothing."""
    if now.children != last.children:
        return "its child processes begin and end"
    if now.children_cpu_s - last.children_cpu_s > _IDLE_CPU * seconds:
        return "its child processes compute"
    if now.moved_bytes - last.moved_bytes > _IDLE_BYTES * seconds:
        return "it reads, writes or sends"
    return ""


def _did_something(last: Activity, now: Activity) -> bool:
    return _ran(last, now) or now.cpu_s > last.cpu_s or now.moved_bytes != last.moved_bytes


def _ran(last: Activity, now: Activity) -> bool:
    """Whether the training thread has run between two looks."""
    return now.thread_cpu_s > last.thread_cpu_s or now.thread_switches != last.thread_switches
