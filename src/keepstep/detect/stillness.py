"""Will a process that makes no progress go on by itself? Judged by what it has done from one look to the next."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.core.summary import How, Stillness

# What waiting costs, measured over idle processes: Gloo's loop makes a hundred context switches a second and 2 ms of
# CPU, NCCL's watchdog polls ten times a second, a data loader looks for its dead worker every 5 s.
_IDLE_CPU = 0.03  # share of one CPU
_IDLE_SWITCHES = 2.0  # times a second that a waiting thread wakes up
_IDLE_BYTES = 512.0  # bytes a second read, written, sent and received
_SPINS_CPU = 0.5  # share of one CPU from which a process computes
_LONGEST_GAP_S = 30.0  # between two looks; more is no unbroken observation


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process had done by a moment. Counters only grow while it lives.

    ``thread`` in names: the training thread, which owes the next operation, and the main thread where that is another.
    """

    at_s: float
    state: str  # state of the training thread, as in ``/proc/PID/stat``
    thread_cpu_s: float
    thread_switches: int  # context switches
    cpu_s: float  # CPU time of all its threads
    children: frozenset[int] = frozenset()  # process ids of all descendants
    children_cpu_s: float = 0.0
    moved_bytes: int = 0  # read, written, sent and received, by it and its descendants
    place: str = ""  # where the kernel keeps the training thread waiting
    queued_s: float = 0.0  # time in which its threads were ready to run and waited for a CPU
    stack: str = ""  # Python frames of the training thread, innermost first; "" where they were not read


_STATES: dict[str, How] = {"T": "stopped", "t": "traced", "D": "kernel"}


class StillnessJudge:
    """Follows one process. A look at which it did something else than at the last one begins a new time."""

    def __init__(self) -> None:
        self._last: Activity | None = None
        self._progress = -1
        self._stack = ""  # frames in which the training thread has been since the time began
        self.judged: Stillness | None = None

    def must_read_stack(self, now: Activity) -> bool:
        """Whether the training thread has run since the last look, so that only its frames tell whether it moved on."""
        return self._last is not None and _ran(self._last, now)

    def take(self, now: Activity, progress: int) -> Stillness:
        """Judge the process at a look. ``progress``: a number that grows whenever its rank makes progress."""
        last, self._last = self._last, now
        if last is None or progress != self._progress or now.at_s - last.at_s > _LONGEST_GAP_S:
            self._progress, self._stack, self.judged, last = progress, "", None, None
        how, why = self._compared(last, now)
        begun_s = last.at_s if last is not None and how in ("still", "spins") else now.at_s
        return self._note(how, begun_s, why)

    def unread(self, at_s: float, why: str) -> Stillness:
        """Note that the process could not be read, which breaks any proof."""
        self._last = None
        return self._note("unread", at_s, why)

    def _note(self, how: How, begun_s: float, why: str) -> Stillness:
        before = self.judged
        since_s = before.since_s if before is not None and before.how == how else begun_s
        self.judged = Stillness(how, since_s, why)
        return self.judged

    def _compared(self, last: Activity | None, now: Activity) -> tuple[How, str]:
        """What the process has done from one look to the next, and the words for it."""
        if now.state in _STATES:
            return _STATES[now.state], now.place
        if last is None:
            return "still", now.place
        seconds = max(now.at_s - last.at_s, 1e-3)
        if moved := _moved(last, now, seconds):
            return "moves", moved
        ran_s = now.cpu_s - last.cpu_s
        if ran_s > _IDLE_CPU * seconds:
            spins = ran_s + now.queued_s - last.queued_s >= _SPINS_CPU * seconds
            return ("spins", "it computes") if spins else ("moves", "it computes now and then")
        if _ran(last, now):
            known, self._stack = self._stack, now.stack
            if now.thread_switches - last.thread_switches > 1 + _IDLE_SWITCHES * seconds:
                return "moves", "its training thread wakes up many times a second"
            if not now.stack:
                return "moves", "its training thread wakes up, and its Python stack cannot be read (py-spy)"
            if now.stack != known:
                return "moves", "its training thread moves on"
        return "still", self._stack.partition("\n")[0].strip() or now.place


def _moved(last: Activity, now: Activity, seconds: float) -> str:
    """What shows that the process works on, whatever its own threads do; "": nothing."""
    if now.children != last.children:
        return "its child processes begin and end"
    if now.children_cpu_s - last.children_cpu_s > _IDLE_CPU * seconds:
        return "its child processes compute"
    if now.moved_bytes - last.moved_bytes > _IDLE_BYTES * seconds:
        return "it reads, writes or sends"
    return ""


def _ran(last: Activity, now: Activity) -> bool:
    """Whether the training thread has run between two looks."""
    return now.thread_cpu_s > last.thread_cpu_s or now.thread_switches != last.thread_switches
