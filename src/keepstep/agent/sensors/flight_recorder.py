"""Asks ranks' processes what torch's flight recorder holds: which calls their devices have not finished.

A process is asked in a thread of its own, since it may be held up. It is only asked while its rank stands still, as its
interpreter is busy for some milliseconds with the answer.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keepstep.core.errors import KeepstepError, TraceError
from keepstep.core.flight_recorder import TELL_CALLS, TIME_CALLS, address_of
from keepstep.core.local_socket import connect
from keepstep.traces.dump_sets import Dump
from keepstep.traces.flight_recorder import parse_newest

Answer = Dump | Literal["mute"] | None
"""What a recorder holds; "mute": the process is there and did not answer in time; None: it cannot be asked."""

# Two events with times a call take 4 us of the device: below so many calls a second that is 0.1 % of its time.
_MOST_TIMED = 250.0
_PACE_S = 5.0  # for so long the calls of a rank are counted
_AGAIN_S = 2.0  # between two questions about one rank
_PATIENCE_S = 1.0
_AT_ONCE_S = 0.5  # the controller waits a second for all that it has asked
_OLD_S = 6.0  # until then an answer stands for one that does not come, if its rank has made no call since
_MOST_BYTES = 32 << 20  # largest dump; torch keeps 2000 calls of half a kilobyte each by default


def ask(run_dir: Path, process: int, rank: int) -> Answer:
    """Ask a rank's process. Takes little more than a second at most."""
    try:
        with connect(address_of(str(run_dir), process), "rank", _PATIENCE_S, process) as connection:
            connection.send(TELL_CALLS)
            _, descriptors, _, _ = socket.recv_fds(connection, 16, 1)
    except TimeoutError:
        return "mute"
    except (OSError, KeepstepError):
        return None
    if not descriptors:
        return None
    try:
        with os.fdopen(descriptors[0], "rb") as file:
            data = os.pread(file.fileno(), _MOST_BYTES + 1, 0)
        return parse_newest(data, rank) if len(data) <= _MOST_BYTES else None
    except (OSError, TraceError):
        return None


def time_calls(run_dir: Path, process: int) -> None:
    """Have a rank's recorder note from now on when its device begins a call, for as long as the process lives."""
    with (
        suppress(OSError, KeepstepError),
        connect(address_of(str(run_dir), process), "rank", _PATIENCE_S, process) as connection,
    ):
        connection.send(TIME_CALLS)
        connection.recv(1)  # returns when that is done


@dataclass(frozen=True, slots=True)
class _Last:
    """The last answer of a process, when it came, and the counts of its rank when it was asked."""

    answer: Answer
    at_s: float
    counts: int


@dataclass(slots=True)
class _Question:
    """What was asked about a rank that had these counts."""

    rank: int
    process: int
    counts: int
    next_s: float
    is_answered: bool = False
    answer: Answer = None


class RecorderSensor:
    """Asks the ranks of a node."""

    def __init__(
        self,
        run_dir: Path,
        ask: Callable[[Path, int, int], Answer] = ask,
        time_calls: Callable[[Path, int], None] = time_calls,
    ) -> None:
        self._run_dir, self._ask, self._time_calls = run_dir, ask, time_calls
        self._questions: dict[int, _Question] = {}
        self._last: dict[int, _Last] = {}  # by process
        self._paces: dict[
            int, tuple[float, int]
        ] = {}  # by process: since when calls are counted, and their number
        self._timed: set[int] = set()  # processes

    def look(self, now_s: float, wanted: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, Dump]]:
        """Ask about ranks, each once every two seconds at most, and return new answers. Never blocks.

        Args:
            now_s: the time on the node's clock.
            wanted: process and counts by rank; the counts change with every call of the rank.

        Returns:
            By rank its counts when it was asked, and what its recorder held.
        """
        found: dict[int, tuple[int, Dump]] = {}
        for rank, one in list(self._questions.items()):
            if one.is_answered and isinstance(one.answer, Dump):
                found[rank] = one.counts, one.answer
                one.answer = None
            if one.is_answered and (rank not in wanted or now_s >= one.next_s):
                del self._questions[rank]
        for rank, (process, counts) in wanted.items():
            if rank not in self._questions:
                one = self._questions[rank] = _Question(rank, process, counts, now_s + _AGAIN_S)
                name = "keepstep-recorder"
                threading.Thread(target=self._answer, args=(one,), name=name, daemon=True).start()
        return found

    def time(self, now_s: float, records: Mapping[int, int]) -> None:
        """Have recorders note when devices begin calls, of processes that make so few that it costs next to nothing.

        ``records``: by process, how many records its ring has had, which are at least as many as its calls.
        """
        for process, count in records.items():
            since_s, before = self._paces.setdefault(process, (now_s, count))
            if process in self._timed or now_s - since_s < _PACE_S:
                continue
            self._paces[process] = now_s, count
            if count - before <= _MOST_TIMED * (now_s - since_s):
                self._timed.add(process)
                arguments, name = (self._run_dir, process), "keepstep-recorder"
                threading.Thread(target=self._time_calls, args=arguments, name=name, daemon=True).start()

    def _answer(self, one: _Question) -> None:
        try:
            one.answer = self._ask(self._run_dir, one.process, one.rank)
            self._last[one.process] = _Last(one.answer, time.monotonic(), one.counts)
        finally:
            one.is_answered = True

    async def answers(self, ranks: Mapping[int, tuple[int, int]]) -> dict[int, Answer]:
        """The answers that come within half a second, by rank. ``ranks``: process and counts of those to ask."""
        asked = {
            rank: asyncio.ensure_future(asyncio.to_thread(self._ask, self._run_dir, process, rank))
            for rank, (process, _) in ranks.items()
        }
        if asked:
            await asyncio.wait(asked.values(), timeout=_AT_ONCE_S)
        for task in asked.values():
            task.cancel()
        return {rank: task.result() for rank, task in asked.items() if task.done()}

    def with_last(
        self, now_s: float, fresh: Mapping[int, Answer], ranks: Mapping[int, tuple[int, int]]
    ) -> dict[int, Answer]:
        """These answers, and for those that did not come the last ones, as far as they still hold.

        Args:
            now_s: the time on the node's clock.
            fresh: what `answers` returned.
            ranks: process and counts, after the answers came, of all ranks that were asked.
        """
        found = dict(fresh)
        for rank, (process, counts) in ranks.items():
            last = self._last.get(process)
            holds = last is not None and last.counts == counts and now_s - last.at_s < _OLD_S
            if last is not None and holds and rank not in found:
                found[rank] = last.answer
        return found
