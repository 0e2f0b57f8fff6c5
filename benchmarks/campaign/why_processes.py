"""The processes of a job's ranks, seen from outside: which they are, and when each of them ended."""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = "CAMPAIGN_TRIAL"  # in the environment of all processes of a trial
_SETTLED_S = 3.0  # a process that is no rank by then will be none
_ENDED_S = 2.0
_NICE = -10
_RANK = re.compile(rb"(?:^|\0)RANK=(\d+)\0")


class RankProcesses:
    """Looks at ``/proc`` now and then; a rank may have several lives."""

    def __init__(self, folder: Path, script: str) -> None:
        self._mark = f"{MARK}={folder}\0".encode()
        self._script = script.encode()
        self._first_seen: dict[int, float] = {}
        self._rank: dict[int, int] = {}  # process to rank
        self._living: set[int] = set()
        self._waiting: list[threading.Thread] = []
        self.died: list[tuple[int, float]] = []  # rank and Unix time, in the order of the deaths

    def look(self) -> None:
        """Find new ranks."""
        now_s = time.monotonic()
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        for pid in present - self._rank.keys():
            if now_s - self._first_seen.setdefault(pid, now_s) < _SETTLED_S:
                self._take(pid)
        self._first_seen = {pid: seen for pid, seen in self._first_seen.items() if pid in present}

    def _take(self, pid: int) -> None:
        with suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            found = _RANK.search(environment)
            if not found or self._mark not in environment:
                return
            if self._script not in Path(f"/proc/{pid}/cmdline").read_bytes() or parent_of(pid) in self._rank:
                return
            descriptor = os.pidfd_open(pid)
            self._rank[pid] = int(found[1])
            self._living.add(pid)
            self._waiting.append(threading.Thread(target=self._wait_for, args=(pid, descriptor), daemon=True))
            self._waiting[-1].start()

    def _wait_for(self, pid: int, descriptor: int) -> None:
        """Its end, in a thread of its own, so that its time is right however busy the driver is."""
        with promptly():
            select.select([descriptor], [], [])
            self.died.append((self._rank[pid], time.time()))
        self._living.discard(pid)
        os.close(descriptor)

    def living(self) -> list[int]:
        """Processes of ranks that have not ended."""
        return list(self._living)

    def pid(self, rank: int) -> int:
        """The newest process of a rank, as this machine numbers it. Raises LookupError where none lives."""
        return sorted(pid for pid in self._living if self._rank[pid] == rank)[-1]

    def pid_on_host(self, rank: int) -> int:
        """The same, as its own host numbers it."""
        status = Path(f"/proc/{self.pid(rank)}/status").read_text()
        numbers = re.search(r"^NSpid:(.*)$", status, re.MULTILINE)
        return int(numbers[1].split()[-1]) if numbers else self.pid(rank)

    def close(self) -> None:
        """Once the processes have ended."""
        for waiting in self._waiting:
            waiting.join(_ENDED_S)


@contextmanager
def promptly() -> Iterator[None]:
    """This thread goes before others, where it may: a job keeps all processors busy."""
    own = threading.get_native_id()
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, own, _NICE)
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, own, 0)


def parent_of(pid: int) -> int:
    """The parent of a process. Raises OSError where it is gone."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int) -> list[int]:
    """Direct children of all of a process's threads."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    return found
