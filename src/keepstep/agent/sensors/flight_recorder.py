"""Asks ranks' processes what torch's flight recorder holds: which calls their devices have not finished.

A process is asked in a thread of its own, since it may be held up. It is only asked while its rank stands still, as
torch's recorder is busy with the answer: for some milliseconds, or for a second where torch was told to keep very many
calls (``TORCH_FR_BUFFER_SIZE``). So the times that answers take are added up, and kept to a thousandth of all time, or
to a fiftieth of the time for which the rank has called nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keepstep.core.device_questions import CALLS, MOST_BYTES, TIMES, address_of
from keepstep.core.errors import KeepstepError, TraceError
from keepstep.core.local_socket import connect
from keepstep.traces.dump_sets import Dump
from keepstep.traces.flight_recorder import parse_newest

Answer = Dump | Literal["mute"] | None
"""What a recorder holds; "mute": the process is there and did not answer in time; None: it cannot be asked."""

# Two events with times a call take 4 us of the device: below so many calls a second that is 0.1 % of its time.
_MOST_TIMED = 250.0
_PACE_S = 2.0  # for so long the calls of a rank are counted
_AGAIN_S = 2.0  # between two questions about one rank
_PATIENCE_S = 1.0
_AT_ONCE_S = 0.5  # the controller waits a second for all that it has asked
_OLD_S = 6.0  # until then an answer stands for one that does not come, if its rank has made no call since
_STILL_NS = 5 * 10**9
_SHARE = 1e-3  # part of a process's time that its answers may take, the agent's time for them included
_STILL_SHARE = (
    0.02  # likewise while its rank calls nothing: it loses little then, and the verdict needs the answer
)
_SAVED_S = 0.05  # most time for answers that is saved up
_CALLS = re.compile(rb"calls(?: (\d{1,9}))?")  # what comes with a dump: the microseconds that it took


def ask(run_dir: Path, process: int, rank: int) -> tuple[Answer, float]:
    """Ask a rank's process. Takes little more than a second at most.

    Returns:
        The answer, and the seconds that it has cost: of a thread of the process, and of this one.
    """
    try:
        with connect(address_of(CALLS, str(run_dir), process), "rank", _PATIENCE_S, process) as connection:
            message, descriptors, _, _ = socket.recv_fds(connection, 32, 1)
    except TimeoutError:
        return "mute", 0.0
    except (OSError, KeepstepError):
        return None, 0.0
    if not descriptors:
        return None, 0.0
    begun_s = time.thread_time()
    answer: Answer = None
    with os.fdopen(descriptors[0], "rb") as file, suppress(OSError, TraceError):
        data = os.pread(file.fileno(), MOST_BYTES + 1, 0)
        answer = parse_newest(data, rank) if len(data) <= MOST_BYTES else None
    told = _CALLS.fullmatch(message)
    theirs_s = int(told[1]) * 1e-6 if told is not None and told[1] else 0.0
    return answer, theirs_s + time.thread_time() - begun_s


def time_calls(run_dir: Path, process: int) -> None:
    """Have a rank's recorder note from now on when its device begins a call, for as long as the process lives."""
    with (
        suppress(OSError, KeepstepError),
        connect(address_of(TIMES, str(run_dir), process), "rank", _PATIENCE_S, process) as connection,
    ):
        connection.recv(1)  # returns when that is done


def _stands_still(answer: Answer) -> bool:
    """Whether the device had ended nothing for seconds: then the answer is as good later, if the host calls nothing."""
    return isinstance(answer, Dump) and 0 < answer.moved_ns <= time.time_ns() - _STILL_NS


@dataclass(frozen=True, slots=True)
class _Last:
    """The last answer of a process, until when it may stand for one that does not come, and the rank's counts then."""

    answer: Answer
    until_s: float
    counts: int

    def holds(self, now_s: float, counts: int) -> bool:
        return counts == self.counts and now_s < self.until_s


@dataclass(slots=True)
class _Account:
    """The time that answers of a process may still take."""

    at_s: float
    counts: int
    left_s: float = _SAVED_S

    def affords(self, now_s: float, counts: int) -> bool:
        share = _STILL_SHARE if counts == self.counts else _SHARE
        self.left_s = min(self.left_s + share * (now_s - self.at_s), _SAVED_S)
        self.at_s, self.counts = now_s, counts
        return self.left_s > 0


@dataclass(slots=True)
class _Question:
    """What was asked about a rank that had these counts."""

    rank: int
    process: int
    counts: int
    asked_s: float
    is_answered: bool = False
    answer: Answer = None


class RecorderSensor:
    """Asks the ranks of a node."""

    def __init__(
        self,
        run_dir: Path,
        ask: Callable[[Path, int, int], tuple[Answer, float]] = ask,
        time_calls: Callable[[Path, int], None] = time_calls,
    ) -> None:
        self._run_dir, self._ask, self._time_calls = run_dir, ask, time_calls
        self._questions: dict[int, _Question] = {}
        self._last: dict[int, _Last] = {}  # by process
        self._accounts: dict[int, _Account] = {}  # by process
        self._lock = threading.Lock()  # guards the accounts, since answers are waited for in threads
        self._paces: dict[
            int, tuple[float, int]
        ] = {}  # by process: since when calls are counted, and their number
        self._next_time_s = 0.0
        self._timed: dict[
            int, int
        ] = {}  # by process, how many groups it had: those made later are not timed yet

    def look(self, now_s: float, wanted: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, Dump]]:
        """Ask about ranks, each once every two seconds at most, or as they can afford it, and return new answers.

        Never blocks.

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
            if one.is_answered and (rank not in wanted or now_s >= one.asked_s + _AGAIN_S):
                del self._questions[rank]
        for rank, (process, counts) in wanted.items():
            if rank not in self._questions and self._affords(process, now_s, counts):
                one = self._questions[rank] = _Question(rank, process, counts, now_s)
                name = "keepstep-recorder"
                threading.Thread(target=self._answer, args=(one,), name=name, daemon=True).start()
        return found

    def is_time_due(self, now_s: float) -> bool:
        """Whether `time` has something to find out."""
        return now_s >= self._next_time_s

    def time(self, now_s: float, calls: Mapping[int, tuple[int, int]]) -> None:
        """Have recorders note when devices begin calls, of processes that make so few that it costs next to nothing.

        ``calls``: by process, how many it has made as far as is known, and how many groups it has.
        """
        self._next_time_s = now_s + _PACE_S
        for process, (count, groups) in calls.items():
            since_s, before = self._paces.setdefault(process, (now_s, count))
            if groups <= self._timed.get(process, 0) or now_s - since_s < _PACE_S:
                continue
            self._paces[process] = now_s, count
            if count - before <= _MOST_TIMED * (now_s - since_s):
                self._timed[process] = groups
                arguments, name = (self._run_dir, process), "keepstep-recorder"
                threading.Thread(target=self._time_calls, args=arguments, name=name, daemon=True).start()

    def _affords(self, process: int, now_s: float, counts: int) -> bool:
        with self._lock:
            return self._accounts.setdefault(process, _Account(now_s, counts)).affords(now_s, counts)

    def _answer(self, one: _Question) -> None:
        try:
            one.answer = self._told(one.process, one.rank, one.counts, one.asked_s)
        finally:
            one.is_answered = True

    def _told(self, process: int, rank: int, counts: int, now_s: float) -> Answer:
        """The answer of a process, which is waited for."""
        answer, cost_s = self._ask(self._run_dir, process, rank)
        with self._lock:
            self._accounts[process].left_s -= cost_s
        holds_s = max(_OLD_S, cost_s / _SHARE) if _stands_still(answer) else _OLD_S
        last = self._last.get(process)
        if isinstance(answer, Dump) or last is None or not last.holds(now_s, counts):
            self._last[process] = _Last(answer, now_s + holds_s, counts)
        return answer

    async def answers(self, now_s: float, ranks: Mapping[int, tuple[int, int]]) -> dict[int, Answer]:
        """The answers that come within half a second, by rank.

        Args:
            now_s: the time on the node's clock.
            ranks: process and counts by rank; those that cannot afford another answer now are not asked.
        """
        asked = {
            rank: asyncio.ensure_future(asyncio.to_thread(self._told, process, rank, counts, now_s))
            for rank, (process, counts) in ranks.items()
            if self._affords(process, now_s, counts)
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
            ranks: process and counts by rank, after the answers came.
        """
        found = dict(fresh)
        for rank, (process, counts) in ranks.items():
            last = self._last.get(process)
            if last is not None and last.holds(now_s, counts) and not isinstance(found.get(rank), Dump):
                found[rank] = last.answer
        return found
