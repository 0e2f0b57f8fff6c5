"""Listens to the node's kernel: its log from now on; where that may not be read, how many processes it had to kill.

The log tells of GPUs (Xids), disks, network adapters and processor, and of processes that were killed because memory
was full. Without it the control group tells of the last only, and NVIDIA's driver of Xids. That counts errors of the
GPUs' memory in any case.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from keepstep.agent.sensors.gpus import Gpus
from keepstep.agent.sensors.late_rows import LateRows
from keepstep.agent.sensors.processes import parent_of
from keepstep.core.control_groups import folders
from keepstep.core.kernel_records import KernelLog, Record
from keepstep.core.told import KERNEL_SOURCES, Told
from keepstep.detect.listener import Bounds, Listener

logger = logging.getLogger("keepstep.agent")

SOURCE, DRIVER, GROUP = KERNEL_SOURCES
_BOUNDS = Bounds(1024, 1 << 20, 256)
# At most so many records are read in one poll.
_MOST_RECORDS = 64
_MOST_WAITING = 256  # records that wait until the tables are read
_GROUPS_S = 1.0
_QUIET_S = 60.0  # time without news after which the kernel may tell the same again
_OLDEST = 16  # Parents of a process are looked at up to so many.
_FIRST_NAMESPACE = 0xEFFFFFFC  # inode of the machine's own namespace of processes (linux/proc_ns.h)
_KILLED = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class KernelSensor:
    """The ears for one node's kernel."""

    def __init__(self, path: str, rows: LateRows, gpus: Gpus | None = None) -> None:
        """``path``: of the kernel's log. ``gpus``: tell of Xids where it may not be read."""
        self._path, self._rows, self._gpus = path, rows, gpus
        self._log: KernelLog | None = None
        self._killings: Killings | None = None
        self._knows_pids = True
        self._waiting: deque[Record] = deque(maxlen=_MOST_WAITING)
        self._listener: Listener | None = None
        self._told_s = 0.0
        try:
            self._log = KernelLog(path, from_end=True)
            # The kernel names processes as the machine does, which a container may call otherwise.
            self._knows_pids = not self._log.is_kernels or _in_first_namespace()
        except OSError as error:
            self._do_without(error)

    def look(
        self, now_s: float, processes: Mapping[int, int], *, last: bool = False
    ) -> list[tuple[int, Told]]:
        """What was told since the last look, with the rank whose process it names; -1: it names none.

        ``processes``: process ids by rank. ``last``: nothing follows.
        """
        found = self._look_at_memory(processes)
        if self._log is None:
            return found + self._look_without(now_s, processes, last=last)
        return found + self._look_at_log(now_s, processes, last=last)

    def _look_at_memory(self, processes: Mapping[int, int]) -> list[tuple[int, Told]]:
        """What the driver counts of the GPUs' memory, of which its lines in the kernel's log do not tell all."""
        errors = self._gpus.new_memory_errors(processes) if self._gpus is not None else []
        matcher = self._rows.get(wait=True) if errors else None
        found: list[tuple[int, Told]] = []
        for one in errors if matcher is not None else ():
            assert matcher is not None
            if match := matcher.match(one.line):
                row, places = match
                found.append((one.rank, Told(row, one.line, one.line, 0, DRIVER, places=places)))
        return found

    def _look_at_log(
        self, now_s: float, processes: Mapping[int, int], *, last: bool
    ) -> list[tuple[int, Told]]:
        assert self._log is not None
        try:
            self._waiting.extend(self._log.records(_MOST_RECORDS))
        except OSError as error:
            self._do_without(error)
        matcher = self._rows.get(wait=last) if self._waiting else None
        if matcher is None:
            return []
        if self._listener is None:
            self._listener = Listener(matcher, SOURCE, bounds=_BOUNDS)
        if self._told_s and now_s - self._told_s > _QUIET_S:
            self._listener.forget()
        lines = [f"[{one.at_s:.6f}] {one.text}\n" for one in self._waiting]
        self._waiting.clear()
        self._listener.take("".join(lines).encode())
        news = self._listener.fresh()
        if news:
            self._told_s = now_s
        return [(self._rank(told, processes), told) for told in news]

    def close(self) -> None:
        """Let go of the log."""
        if self._log is not None:
            self._log.close()
        self._log = None

    def _do_without(self, error: OSError) -> None:
        self.close()
        self._killings = Killings()
        instead = ": of memory the control group tells" if self._killings.is_there else ""
        logger.info("the kernel log %s may not be read (%s)%s", self._path, error.strerror, instead)

    def _look_without(
        self, now_s: float, processes: Mapping[int, int], *, last: bool
    ) -> list[tuple[int, Told]]:
        xids = self._gpus.new_xids(processes) if self._gpus is not None else []
        killed = self._killings.look(now_s, now=last) if self._killings is not None else ""
        matcher = self._rows.get(wait=True) if xids or killed else None
        if matcher is None:
            return []
        found: list[tuple[int, Told]] = []
        for one in xids:
            row = next((row for row in matcher.rows if row.name == f"xid-{one.number}"), None)
            if row is not None:
                line = f"GPU {one.gpu}: Xid {one.number}{f' (PCI:{one.pci})' if one.pci else ''}"
                places = {"pci": one.pci} if one.pci else {}
                found.append((one.rank, Told(row, line, line, 0, DRIVER, places=places)))
        if killed and (match := matcher.match(killed)):
            found.append((-1, Told(match[0], killed, killed, 0, GROUP)))
        return found

    def _rank(self, told: Told, processes: Mapping[int, int]) -> int:
        pid = told.places.get("pid", "")
        return rank_of(int(pid), processes) if self._knows_pids and pid.isdecimal() else -1


class Killings:
    """How many processes of this process's control group the kernel has killed because memory was full."""

    def __init__(self, files: tuple[Path, ...] | None = None) -> None:
        """``files``: those that have the number, first the one to be used; None: those of the control group."""
        if files is None:
            groups = [group[0] for group in folders("memory") if group]
            files = tuple(
                group / name for group in groups for name in ("memory.events", "memory.oom_control")
            )
        self._file = next((file for file in files if _killed(file) is not None), None)
        self._count = _killed(self._file) if self._file is not None else None
        self._next_s = 0.0

    @property
    def is_there(self) -> bool:
        """Whether the kernel tells the number."""
        return self._file is not None

    def look(self, now_s: float, *, now: bool = False) -> str:
        """A line where there are more than at the last look, else empty; ``now``: also if that was a moment ago."""
        if self._file is None or (now_s < self._next_s and not now):
            return ""
        self._next_s = now_s + _GROUPS_S
        before, count = self._count, _killed(self._file)
        if count is None:
            return ""
        self._count = count
        if before is None or count <= before:
            return ""
        more = count - before
        many = f"{more} processes were" if more > 1 else "a process was"
        return f"oom_kill event: {many} killed for want of memory in control group {self._file.parent}"


def rank_of(pid: int, processes: Mapping[int, int]) -> int:
    """The rank to which a process belongs, as its own or a child of it; -1: to none that is known."""
    ranks = {process: rank for rank, process in processes.items()}
    for parent in islice(_upwards(pid), _OLDEST):
        if parent in ranks:
            return ranks[parent]
    return -1


def _upwards(pid: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        pid = parent_of(pid)


def _killed(file: Path) -> int | None:
    with suppress(OSError):
        if found := _KILLED.search(file.read_text()):
            return int(found[1])
    return None


def _in_first_namespace() -> bool:
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_NAMESPACE
    return False
