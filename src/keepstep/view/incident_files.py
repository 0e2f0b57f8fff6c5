"""Follows ``RUN/incidents``: reads what is new or has changed, and shows the rest where a file cannot be read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from keepstep.core.errors import RunError
from keepstep.core.incident import Incident
from keepstep.report.incidents import read_incident

MOST_BYTES = 40 << 20  # of files whose incidents are kept; of more, the oldest are left out
_FEW = 1000  # with more files the folder is only listed when it has changed, or after a while
_LIST_S = 10.0
_MOST_TROUBLES = 5  # files that are named one by one
_MANY, _MOST_SHARED = 1000, 1 << 20
_Mark = tuple[int, int, int]  # time of the last change in ns, size, inode


class IncidentFiles:
    """The incidents of a run, by number."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._marks: dict[str, _Mark] = {}  # of the files that were read
        self._waiting: list[tuple[int, str, _Mark]] = []  # not read yet, with their numbers, the newest last
        self._incidents: dict[str, Incident] = {}
        self._sizes: dict[str, int] = {}
        self._broken: dict[str, str] = {}  # why a file cannot be read
        self._listed: tuple[int, float] | None = None  # time of the folder's change, and when it was listed
        self._left_out = 0
        self._numbers: list[int] = []  # each number as one object, which all incidents share
        self._sorted: tuple[Incident, ...] = ()
        self._trouble = ""

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Oldest first; the same object until something changes."""
        return self._sorted

    @property
    def is_whole(self) -> bool:
        """Whether all files that were listed have been looked at."""
        return not self._waiting

    @property
    def troubles(self) -> list[str]:
        """What could not be read, a line each."""
        lines = [self._trouble] if self._trouble else []
        broken = sorted(self._broken.items())
        lines += [why for _, why in broken[:_MOST_TROUBLES]]
        if len(broken) > _MOST_TROUBLES:
            lines.append(f"{len(broken) - _MOST_TROUBLES} more files of incidents cannot be read")
        if self._left_out:
            lines.append(
                f"the oldest {self._left_out} incidents are not shown: together they are too large; "
                "`keepstep report` prints them"
            )
        return lines

    def take(self, found: list[Incident]) -> None:
        """Have incidents that were told by other means, until their files are read again."""
        for one in found:
            self._incidents[f"{one.number:04d}.json"] = one
        if found:
            self._sort()

    def look(self, budget_s: float) -> None:
        """Read files that are new or have changed, newest first, for about so many seconds."""
        self._list()
        until_s = self._clock() + budget_s
        changed = False
        while self._waiting:
            _, name, mark = self._waiting.pop()
            self._read(name, mark)
            changed = True
            if self._clock() >= until_s:
                break
        if changed:
            self._sort()

    def _list(self) -> None:
        now_s = self._clock()
        try:
            mark = os.stat(self._folder).st_mtime_ns
            if len(self._marks) > _FEW and self._listed is not None:
                changed_ns, listed_s = self._listed
                if mark == changed_ns and now_s < listed_s + _LIST_S:
                    return
            with os.scandir(self._folder) as entries:
                marks = {entry.name: _mark(entry) for entry in entries if _number(entry.name) >= 0}
        except FileNotFoundError:
            marks, mark = {}, 0
        except OSError as error:
            self._trouble = f"{self._folder}: cannot be read: {error.strerror}"
            return
        self._trouble, self._listed = "", (mark, now_s)
        self._waiting = sorted(
            (_number(name), name, one) for name, one in marks.items() if self._marks.get(name) != one
        )
        gone = [name for name in self._marks if name not in marks]
        for name in gone:
            for table in (self._marks, self._incidents, self._sizes, self._broken):
                table.pop(name, None)
        if gone:
            self._sort()

    def _read(self, name: str, mark: _Mark) -> None:
        self._marks[name] = mark
        try:
            self._incidents[name] = self._with_shared_numbers(read_incident(self._folder / name))
            self._sizes[name] = mark[1]
            self._broken.pop(name, None)
        except RunError as error:  # what was known of it before is still shown
            self._broken[name] = str(error)

    def _with_shared_numbers(self, incident: Incident) -> Incident:
        """The same, of a large job with a fifth of the memory: many incidents have the same victims."""
        victims = incident.victims
        if len(victims) < _MANY or not 0 <= min(victims) <= max(victims) < _MOST_SHARED:
            return incident
        self._numbers.extend(range(len(self._numbers), max(victims) + 1))
        return replace(incident, victims=tuple(map(self._numbers.__getitem__, victims)))

    def _sort(self) -> None:
        total, kept = 0, list[Incident]()
        self._left_out = 0
        for name in sorted(self._incidents, key=_number, reverse=True):
            total += self._sizes.get(name, 0)
            if total > MOST_BYTES and kept:
                del self._incidents[name]
                self._sizes.pop(name, None)
            else:
                kept.append(self._incidents[name])
        self._left_out = len(self._marks.keys() - self._incidents.keys() - self._broken.keys())
        self._sorted = tuple(sorted(kept, key=lambda one: one.number))


def _mark(entry: os.DirEntry[str]) -> _Mark:
    try:
        told = entry.stat()
    except OSError:  # why it cannot be read is told when it is tried
        return 0, 0, 0
    return told.st_mtime_ns, told.st_size, told.st_ino


def _number(name: str) -> int:
    """The number of an incident's file; -1 for any other file."""
    stem, _, suffix = name.partition(".")
    return int(stem) if suffix == "json" and stem.isascii() and stem.isdigit() and len(stem) < 10 else -1
