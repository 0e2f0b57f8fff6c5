"""Asks ranks' processes what torch's flight recorder holds: which calls their devices have not finished.

A process is asked in a thread of its own, since it may be held up. It is only asked while its rank stands still, as its
interpreter is busy for some milliseconds with the answer.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keepstep.core.errors import KeepstepError, TraceError
from keepstep.core.flight_recorder import address_of
from keepstep.core.local_socket import connect
from keepstep.traces.dump_sets import Dump
from keepstep.traces.flight_recorder import parse_dump

Answer = Dump | Literal["mute"] | None
"""What a recorder holds; "mute": the process is there and did not answer in time; None: it cannot be asked."""

_AGAIN_S = 1.0  # between two questions about one rank
_PATIENCE_S = 1.0
_MOST_BYTES = 32 << 20  # of a dump; torch keeps 2000 calls of half a kilobyte each by default


def ask(run_dir: Path, process: int, rank: int) -> Answer:
    """Ask a rank's process. Takes little more than a second at most."""
    try:
        with connect(address_of(str(run_dir), process), "rank", _PATIENCE_S, process) as connection:
            connection.send(b"?")
            _, descriptors, _, _ = socket.recv_fds(connection, 16, 1)
    except TimeoutError:
        return "mute"
    except (OSError, KeepstepError):
        return None
    if not descriptors:
        return None
    with os.fdopen(descriptors[0], "rb") as file:
        data = os.pread(file.fileno(), _MOST_BYTES + 1, 0)
    if len(data) > _MOST_BYTES:
        return None
    try:
        return parse_dump(data, rank)
    except TraceError:
        return None


@dataclass(slots=True)
class _Question:
    """What was asked about a rank that had made so much progress."""

    rank: int
    process: int
    progress: int
    next_s: float
    is_answered: bool = False
    answer: Answer = None


class RecorderSensor:
    """Asks the ranks of a node."""

    def __init__(self, run_dir: Path, ask: Callable[[Path, int, int], Answer] = ask) -> None:
        self._run_dir, self._ask = run_dir, ask
        self._questions: dict[int, _Question] = {}

    def look(self, now_s: float, wanted: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, Dump]]:
        """Ask about ranks, each once a second at most, and return new answers. Never blocks.

        Args:
            now_s: the time on the node's clock.
            wanted: process and progress by rank.

        Returns:
            By rank the progress that it had made when it was asked, and what its recorder held.
        """
        found: dict[int, tuple[int, Dump]] = {}
        for rank, one in list(self._questions.items()):
            if one.is_answered and isinstance(one.answer, Dump):
                found[rank] = one.progress, one.answer
                one.answer = None
            if one.is_answered and (rank not in wanted or now_s >= one.next_s):
                del self._questions[rank]
        for rank, (process, progress) in wanted.items():
            if rank not in self._questions:
                one = self._questions[rank] = _Question(rank, process, progress, now_s + _AGAIN_S)
                name = "keepstep-recorder"
                threading.Thread(target=self._answer, args=(one,), name=name, daemon=True).start()
        return found

    def _answer(self, one: _Question) -> None:
        try:
            one.answer = self._ask(self._run_dir, one.process, one.rank)
        finally:
            one.is_answered = True

    async def answers(self, processes: Mapping[int, int]) -> dict[int, Answer]:
        """The answers of all these processes, by rank; None of those that cannot be asked."""
        asked = [
            asyncio.to_thread(self._ask, self._run_dir, process, rank) for rank, process in processes.items()
        ]
        return dict(zip(processes, await asyncio.gather(*asked), strict=True))
