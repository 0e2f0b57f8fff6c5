"""What the agent hears: lines of its ranks and of the kernel that tell of a failure, as many as are of use."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import merge

from keepstep.agent.sensors.gpus import Gpus
from keepstep.agent.sensors.kernel_sensor import KernelSensor
from keepstep.agent.sensors.late_rows import LateRows
from keepstep.agent.sensors.words_sensor import WordsSensor
from keepstep.core.told import ROLES, Told
from keepstep.detect.secrets import blanked
from keepstep.wire.messages import Said, Words
from keepstep.wire.messages.limits import MOST_SAID

logger = logging.getLogger("keepstep.agent")

A_MINUTE = 64
"""So many lines are sent in a minute."""
KEPT_FREE = 32
"""Lines that only tell of another rank, and notes, leave room for so many that tell more."""
ALIKE = 8
"""So many lines of one rank that match one row are sent in a minute."""
_MOST_WAITING = 256
_MOST_TOLD = 256  # lines that a new controller is told again: the first half, and the newest
_TELLING = ROLES.index("echo")  # Roles before this one tell of who speaks.
_MOST_LINE = 500  # characters
_BLANKED_IN = 2000  # In so many characters secrets are looked for; what is sent is cut out of them.
_MOST_PLACES, _MOST_PLACE = 8, 200
_FRESH_S, _OLD_S = 2.0, 600.0
_MINUTE_S = 60.0


class Hearing:
    """The ears of one node's agent. `poll` is called 20 times a second."""

    def __init__(
        self,
        node_rank: int,
        words: Mapping[int, Sequence[tuple[str, int, str]]],
        kernel_log: str,
        processes: Callable[[], Mapping[int, int]],
        gpus: Gpus | None = None,
        rows: LateRows | None = None,
        incarnation: int = 0,
    ) -> None:
        """``words``: names, beginnings and paths of streams by rank; ``processes()``: process ids by rank, as now.

        ``incarnation``: in which the ranks write to these streams; they have others in the next one.
        """
        rows = rows or LateRows()
        self._node_rank, self._processes, self._incarnation = node_rank, processes, incarnation
        self._words = WordsSensor(words, rows)
        self._kernel = KernelSensor(kernel_log, rows, gpus)
        self._waiting: list[tuple[int, int, Said]] = []  # by weight, then by order
        self._order = 0
        self._told: list[Said] = []
        self._room, self._filled_s = float(A_MINUTE), 0.0
        self._alike: Counter[tuple[int, str]] = Counter()
        self._minute_s = 0.0
        self._left_out = 0
        self._is_deaf = False

    def poll(self, now_s: float, unix_s: float | None = None) -> list[Words]:
        """The messages to be sent now. ``now_s``: CLOCK_MONOTONIC."""
        self._hear(now_s, time.time() if unix_s is None else unix_s, last=False)
        if not self._waiting:
            return []
        self._room = min(self._room + (now_s - self._filled_s) * A_MINUTE / _MINUTE_S, A_MINUTE)
        self._filled_s = now_s
        return self._send(int(self._room))

    def end(self, now_s: float, unix_s: float | None = None) -> list[Words]:
        """The messages to be sent at the end: what was said last, and the weightiest of what waits."""
        self._hear(now_s, time.time() if unix_s is None else unix_s, last=True)
        found = self._send(A_MINUTE)
        self._left_out += len(self._waiting)
        if self._left_out or self._words.passed_over:
            logger.info(
                "%d lines that tell of failures were not sent; %d bytes that ranks wrote were passed over",
                self._left_out,
                self._words.passed_over,
            )
        self._words.close()
        self._kernel.close()
        return found

    def again(self) -> Iterator[Words]:
        """What was sent so far, for a new controller."""
        for first in range(0, len(self._told), MOST_SAID):
            yield self._words_of(tuple(self._told[first : first + MOST_SAID]))

    def _hear(self, now_s: float, unix_s: float, *, last: bool) -> None:
        if self._is_deaf:
            return
        try:
            processes = self._processes()
            heard = self._words.look(now_s, last=last) + self._kernel.look(now_s, processes, last=last)
            if heard:
                self._take(heard, now_s, unix_s)
        except Exception:  # whatever a line holds, the ranks are watched on
            self._is_deaf = True
            logger.exception("ranks and kernel are not listened to any more")

    def _take(self, heard: Sequence[tuple[int, Told]], now_s: float, unix_s: float) -> None:
        if now_s - self._minute_s > _MINUTE_S:
            self._alike.clear()
            self._minute_s = now_s
        new: list[tuple[int, int, Said]] = []
        for rank, told in heard:
            self._alike[rank, told.row.name] += 1
            if self._alike[rank, told.row.name] > ALIKE:
                self._left_out += 1
                continue
            self._order += 1
            new.append((ROLES.index(told.row.role), self._order, said(rank, told, unix_s)))
        self._waiting = list(merge(self._waiting, sorted(new, key=_first), key=_first))
        self._left_out += max(len(self._waiting) - _MOST_WAITING, 0)
        del self._waiting[_MOST_WAITING:]

    def _send(self, room: int) -> list[Words]:
        telling = sum(weight < _TELLING for weight, _, _ in self._waiting)
        count = min(max(min(telling, room), min(len(self._waiting), room - KEPT_FREE)), MOST_SAID)
        if count <= 0:
            return []
        lines = tuple(one for _, _, one in self._waiting[:count])
        del self._waiting[:count]
        self._room = max(self._room - count, 0.0)
        self._told += lines
        if len(self._told) > _MOST_TOLD:
            del self._told[_MOST_TOLD // 2 : len(self._told) - _MOST_TOLD // 2]
        return [self._words_of(lines)]

    def _words_of(self, lines: tuple[Said, ...]) -> Words:
        return Words(self._node_rank, lines, self._incarnation)


def said(rank: int, told: Told, unix_s: float) -> Said:
    """A line as it is sent. ``unix_s``: when it was read."""
    line = told.line if len(told.line) <= _MOST_LINE else told.text
    places = list(told.places.items())[:_MOST_PLACES]
    return Said(
        rank,
        told.row.name,
        _short(line, _MOST_LINE),
        told.source,
        told.number,
        _when(told.time_s, unix_s),
        told.block,
        told.begins,
        told.warned,
        {name: _short(value, _MOST_PLACE) for name, value in places},
    )


def _short(text: str, most: int) -> str:
    text = blanked(text[:_BLANKED_IN])
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _when(written_s: float | None, read_s: float) -> float:
    """When a line was written: mostly just before it was read, as dates have no zone and often no fractions."""
    return written_s if written_s is not None and _FRESH_S < read_s - written_s < _OLD_S else read_s


def _first(one: tuple[int, int, Said]) -> tuple[int, int]:
    return one[:2]
