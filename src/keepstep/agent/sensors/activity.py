"""Reads what suspected processes do, and judges whether they will go on by themselves.

It reads /proc, the kernel's list of TCP connections and, where a thread has woken up, its Python frames (py-spy). Such
a read may block, for example on a process that is dying or waits for a dead file server. So it is done in a thread of
its own; where that is late, nothing is known of these processes.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from keepstep.agent.sensors.processes import PROC, ProcessId, identify
from keepstep.agent.sensors.sockets import MOST_SOCKETS, connections
from keepstep.core.descriptors import socket_inodes
from keepstep.core.summary import Stillness
from keepstep.detect import Activity, StillnessJudge, is_served

logger = logging.getLogger("keepstep.agent")

_EVERY_S = 2.5
_LATE_S = 10.0  # a look that takes longer is given up
_MOST_LATE = 4  # looks that may block; until one of them ends nothing is read
_STACK_S = 5.0
_MOST_STACK = 20_000  # characters of py-spy's output
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Suspect:
    """A process to look at."""

    process: ProcessId
    threads: tuple[int, ...]  # ids of the main thread and, where that is another, of the training thread
    progress: int  # a number that grows whenever its rank makes progress


@dataclass(slots=True)
class _Look:
    """One look at all suspects, in a thread of its own."""

    begun_s: float
    suspects: Mapping[int, Suspect]
    judges: Mapping[int, StillnessJudge]
    answers: dict[int, Activity | str] | None = None  # by rank; a text says what could not be read


class ActivitySensor:
    """Looks at the suspected processes of a node every 2.5 s."""

    def __init__(self, read: Callable[..., dict[int, Activity | str]] | None = None) -> None:
        self._read = read or _read_all
        self._judges: dict[int, tuple[ProcessId, StillnessJudge]] = {}
        self._look: _Look | None = None
        self._next_s = 0.0
        self._late: list[_Look] = []  # looks that were given up, and have not ended yet

    def look(self, now_s: float, suspects: Mapping[int, Suspect]) -> None:
        """Take in the answers of the last look, and begin another when it is time. Never blocks.

        ``suspects``, by rank: a rank that is left out is not suspected any more, and what was known of it is forgotten.
        """
        for rank in [rank for rank in self._judges if rank not in suspects]:
            del self._judges[rank]
        if self._look is not None:
            self._take(self._look, now_s)
        self._late = [look for look in self._late if look.answers is None]
        if self._look is None and suspects and now_s >= self._next_s and len(self._late) < _MOST_LATE:
            self._next_s = now_s + _EVERY_S
            judges = {rank: known[1] for rank, known in self._judges.items()}
            self._look = _Look(now_s, dict(suspects), judges)
            threading.Thread(target=self._run, args=(self._look,), name="keepstep-look", daemon=True).start()

    def stillness(self, rank: int) -> Stillness | None:
        """What is known of a rank's process; None: nothing, or it is not suspected."""
        known = self._judges.get(rank)
        return known[1].judged if known is not None else None

    def _run(self, look: _Look) -> None:
        judges = look.judges

        def must_read_stack(rank: int, now: Activity) -> bool:
            judge = judges.get(rank)
            return judge is not None and judge.must_read_stack(now)

        try:
            look.answers = self._read(look.suspects, must_read_stack)
        except Exception as error:
            logger.exception("suspected processes could not be read")
            look.answers = dict.fromkeys(look.suspects, f"{type(error).__name__}: {error}")

    def _take(self, look: _Look, now_s: float) -> None:
        answers = look.answers
        if answers is None:
            if now_s - look.begun_s < _LATE_S:
                return
            self._late.append(look)
            logger.warning("looking at suspected processes takes over %.0f s and is given up", _LATE_S)
            answers = dict.fromkeys(look.suspects, f"reading it takes over {_LATE_S:.0f} s")
        self._look = None
        for rank, answer in answers.items():
            suspect = look.suspects[rank]
            known = self._judges.get(rank)
            if known is None or known[0] != suspect.process:
                known = self._judges[rank] = suspect.process, StillnessJudge()
            if isinstance(answer, str):
                known[1].unread(now_s, answer)
            else:
                known[1].take(answer, suspect.progress)


def _read_all(
    suspects: Mapping[int, Suspect], must_read_stack: Callable[[int, Activity], bool]
) -> dict[int, Activity | str]:
    families = _families([one.process.pid for one in suspects.values()])
    seen = list(connections())
    if len(seen) >= MOST_SOCKETS:
        return dict.fromkeys(suspects, f"there are more than {MOST_SOCKETS} TCP connections")
    carried = {one.inode: one.acked_bytes + one.received_bytes for one in seen}
    found: dict[int, Activity | str] = {}
    for rank, one in suspects.items():
        try:
            now = _activity(one, families[one.process.pid], carried)
        except (OSError, ValueError, IndexError) as error:
            found[rank] = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
            continue
        if must_read_stack(rank, now):
            now = replace(now, stack=python_frames(one.process.pid, one.threads))
        found[rank] = now
    return found


def _activity(one: Suspect, family: list[int], carried: Mapping[int, int]) -> Activity:
    """Raises OSError or ValueError where the process cannot be read. ``carried``: bytes, by inode of the socket."""
    pid = one.process.pid
    tasks = PROC / str(pid) / "task"
    threads = [path for thread in one.threads if (path := tasks / str(thread)).exists()]
    states = [_state(path) for path in threads]
    times_s = [_times_s(path) for path in threads]
    held = [(state, place) for member in family for state, place in _held(member)]
    sockets = {inode for member in family for inode in socket_inodes(member).values()}
    activity = Activity(
        at_s=time.monotonic(),
        state="D" if held and held[0][0] == "D" else next((one for one in states if one in "TtR"), states[0]),
        thread_cpu_s=sum(ran_s for ran_s, _ in times_s),
        thread_queued_s=sum(queued_s for _, queued_s in times_s),
        thread_switches=sum(map(_switches, threads)),
        cpu_s=_cpu_s(pid),
        queued_s=sum(map(_queued_s, tasks.iterdir())),
        children=frozenset(family[1:]),
        children_cpu_s=sum(map(_cpu_s, family[1:])),
        moved_bytes=_file_bytes(pid)
        + sum(map(_bytes_of_child, family[1:]))
        + sum(carried.get(inode, 0) for inode in sockets),
        place=held[0][1] if held else _place(threads[0]),
    )
    if identify(one.process.pid) != one.process:
        raise ProcessLookupError(3, "it has ended")
    return activity


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def _held(pid: int) -> list[tuple[str, str]]:
    """State and place of each thread of a process that the kernel holds for others to let go; state D first."""
    found: list[tuple[str, str]] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in (PROC / str(pid) / "task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                state, place = _state(thread), _place(thread)
                if state == "D" or is_served(place):
                    found.append((state, place))
    return sorted(found)


def _times_s(thread: Path) -> tuple[float, float]:
    """Time that a thread ran, and time that it was ready to run and waited for a CPU."""
    ran, queued = (thread / "schedstat").read_text().split()[:2]
    return int(ran) * 1e-9, int(queued) * 1e-9


def _queued_s(thread: Path) -> float:
    with suppress(FileNotFoundError, ProcessLookupError):
        return _times_s(thread)[1]
    return 0.0


def _switches(thread: Path) -> int:
    lines = (thread / "status").read_text().splitlines()
    counts = [int(line.split()[1]) for line in lines if "ctxt_switches" in line]
    if not counts:
        raise OSError(2, "the kernel counts no context switches")
    return sum(counts)


def _place(thread: Path) -> str:
    with suppress(OSError):
        name = (thread / "wchan").read_text().strip()
        return f"waits in the kernel ({name})" if name not in ("", "0") else ""
    return ""


def _cpu_s(pid: int) -> float:
    """CPU time of a process, with that of its children that have ended; 0 when it is gone."""
    with suppress(OSError, ValueError, IndexError):
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS
    return 0.0


def _families(pids: Iterable[int]) -> dict[int, list[int]]:
    """Each process with its descendants, itself first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir(PROC):
        if entry.isdigit():
            with suppress(OSError, ValueError, IndexError):
                text = (PROC / entry / "stat").read_text().rpartition(")")[2].split()
                if text[0] not in ("Z", "X"):
                    children.setdefault(int(text[1]), []).append(int(entry))
    found: dict[int, list[int]] = {}
    for pid in pids:
        family = [pid]
        for one in family:
            family += [child for child in children.get(one, ()) if child not in family]
        found[pid] = family
    return found


def _file_bytes(pid: int) -> int:
    """Bytes that a process has read and written: through system calls, and from and to disks by other ways, too."""
    lines = (PROC / str(pid) / "io").read_text().splitlines()
    wanted = ("rchar", "wchar", "read_bytes", "write_bytes")
    return sum(int(line.split()[1]) for line in lines if line.startswith(wanted))


def _bytes_of_child(pid: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        return _file_bytes(pid)
    return 0


def py_spy() -> str | None:
    """The program that reads Python frames, of this Python's environment or on the PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def python_frames(pid: int, threads: Collection[int]) -> str:
    """Python frames of these threads, innermost first, as py-spy prints them; "" where they cannot be had."""
    program = py_spy()
    if program is None:
        return ""
    words = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_STACK_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    wanted = tuple(f"Thread {thread} " for thread in threads)
    lines, inside = list[str](), False
    for line in done.stdout[:_MOST_STACK].decode(errors="replace").splitlines():
        if line.startswith("Thread "):
            inside = line.startswith(wanted)
        elif inside and line.startswith(" "):
            lines.append(line.strip())
    return "\n".join(lines)
