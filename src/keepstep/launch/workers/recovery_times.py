"""How long a restart took, phase by phase: from the failure until every rank of this node has made a step again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

from keepstep.core.incident import FreedMemory, Recovery
from keepstep.launch.command.placement import INCARNATION, MILESTONES
from keepstep.launch.workers.rings import path_of
from keepstep.launch.workers.root_cause import Failure

_MARKS = {"groups": "groups", "state": "state", "step": "first step"}
_MOST_BYTES = 1 << 16


class Restart:
    """One restart, as its milestones come in. Times are CLOCK_MONOTONIC in seconds; phases add up to the whole.

    The last milestone of each phase ends it. A phase whose milestone not all ranks have told counts to the next one.
    """

    def __init__(
        self,
        failure: Failure,
        failed_s: float,
        ended_s: float,
        incarnation: int,
        gpu_memory: tuple[FreedMemory, ...] = (),
    ) -> None:
        """``incarnation``: the one that begins. ``ended_s``: when all workers of the one before had gone."""
        self._failure = failure
        self._failed_s = failed_s
        self._incarnation, self._gpu_memory = incarnation, gpu_memory
        self._ends = {"ended": ended_s}
        self._ranks: frozenset[int] = frozenset()
        self._standbys = self._survived = 0
        self._marks: dict[str, dict[int, float]] = {name: {} for name in _MARKS}

    def started(self, ranks: frozenset[int], standbys: int, survived: int, now_s: float) -> None:
        """Note that the workers of ``ranks`` run: so many of them in standbys, so many in processes that survived."""
        self._ranks, self._standbys, self._survived = ranks, standbys, survived
        self._ends["standbys" if standbys + survived == len(ranks) else "started"] = now_s

    def reached(self, name: str, rank: int, at_s: float) -> Recovery | None:
        """Note a rank's milestone; returns the whole recovery once all ranks have made their first step, else None."""
        marks = self._marks.get(name)
        if marks is None or rank not in self._ranks or rank in marks:
            return None
        marks[rank] = at_s
        return self._recovery() if name == "step" and marks.keys() == self._ranks else None

    def _recovery(self) -> Recovery:
        for name, title in _MARKS.items():
            marks = self._marks[name]
            if marks.keys() == self._ranks:
                self._ends[title] = max(marks.values())
        phases: list[tuple[str, float]] = []
        last_s = self._failed_s
        for title, end_s in self._ends.items():
            phases.append((title, round(max(end_s - last_s, 0.0), 3)))
            last_s = max(last_s, end_s)
        seconds = round(last_s - self._failed_s, 3)
        return Recovery(
            self._incarnation,
            self._failure.rank,
            _how_it_ended(self._failure.status),
            seconds,
            tuple(phases),
            self._standbys,
            len(self._ranks),
            self._survived,
            self._gpu_memory,
        )


def _how_it_ended(status: int) -> str:
    if status == 0:
        return "left early"
    return "was killed" if status < 0 else "failed"


def sentence(recovery: Recovery) -> str:
    """``training again 0.29 s after rank 2 was killed (ended 0.07, standbys 0.01, …)``."""
    phases = ", ".join(f"{title} {seconds:.2f}" for title, seconds in recovery.phases)
    return f"training again {recovery.seconds:.2f} s after rank {recovery.rank} {recovery.what} ({phases})"


class Milestones:
    """The pipe that workers write their milestones into, each opening it anew."""

    def __init__(self, reached: Callable[[str, int, int, float, int], None]) -> None:
        """``reached`` is called with name, rank, incarnation, time (CLOCK_MONOTONIC, seconds) and the state's step."""
        self._reached = reached
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(self._reader, self._read)

    def environment(self, incarnation: int) -> dict[str, str]:
        """Variables by which workers find the pipe."""
        return {MILESTONES: path_of(self._writer), INCARNATION: str(incarnation)}

    def _read(self) -> None:
        with suppress(BlockingIOError):
            for line in os.read(self._reader, _MOST_BYTES).splitlines():
                with suppress(ValueError):
                    name, rank, incarnation, at_ns, step = line.decode().split()
                    self._reached(name, int(rank), int(incarnation), int(at_ns) * 1e-9, int(step))

    def close(self) -> None:
        """Hear no milestones any more."""
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)
        os.close(self._writer)
