"""What the node's GPUs held of workers that have ended, and whether they have let go of it: successors may need it all.

A driver may free it seconds after the process is gone, or never. Only what NVIDIA's driver says is waited for, or told;
without it, or where it lists the processes of another namespace, as in some containers, nothing is.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from keepstep.core.incident import FreedMemory
from keepstep.core.ranges import fold_ranks
from keepstep.launch.local_run import LocalRun
from keepstep.launch.workers.gpu_driver import Answer, GpuDriver

PATIENCE_S = 30.0
"""Most seconds that the successors of workers wait for a GPU's memory."""
_SAID_AFTER_S = 1.0
_LOOK_S = 0.1
_ANSWER_S = 5.0  # most seconds that the driver may take to answer
_WATCHED_S = 10.0  # from look to look while workers run
_NOT_TOLD = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE; others say 0


@dataclass(frozen=True, slots=True)
class Held:
    """Memory of a GPU that a process of ours which has ended still has.

    Attributes:
        name: of the process, "" where it was no child of the launcher.
        count: bytes; 0 where the driver does not tell.
        is_missed: whether a successor does not find as much beside it; False where that is not known.
    """

    gpu: int
    name: str
    count: int
    is_missed: bool


def held(answer: Answer, gone: Mapping[int, str]) -> Iterator[Held]:
    """What ended processes have: those in ``gone``, with their names. ``answer``: as `gpu_holders` gives it.

    A list with a process that neither lives here nor was ours is one of another namespace: it says nothing.
    """
    dead = _dead(answer)
    if not dead <= gone.keys():
        return
    for gpu, (free, those) in answer.items():
        for pid, told in those:
            if pid in dead:
                count = 0 if told == _NOT_TOLD else told
                yield Held(int(gpu), gone[pid].rpartition(", ")[2], count, 0 <= free < count)


def had(answer: Answer, gone: Mapping[int, str]) -> dict[tuple[int, int], int]:
    """By GPU and process, the bytes that living processes have. Of a list of another namespace: none, as of `held`."""
    dead = _dead(answer)
    if not dead <= gone.keys():
        return {}
    return {
        (int(gpu), pid): told
        for gpu, (_, those) in answer.items()
        for pid, told in those
        if pid not in dead and 0 < told < _NOT_TOLD
    }


def _dead(answer: Answer) -> set[int]:
    return {pid for _, those in answer.values() for pid, _ in those if not _lives(pid)}


def _rank_of(name: str) -> int | None:
    """The rank in the name of a process, ``rank 5`` or ``survivor, rank 5``."""
    word, _, number = name.rpartition(", ")[2].partition(" ")
    return int(number) if word == "rank" else None


def as_text(found: Sequence[Held]) -> str:
    """``GPU 3: 41.0 GB of the process that ended (rank 5)``."""
    gpus = {one.gpu for one in found}
    ranks = {rank for one in found if (rank := _rank_of(one.name)) is not None}
    size = f"{sum(one.count for one in found) / 1e9:.1f} GB" if all(one.count for one in found) else "memory"
    who = f" (rank{'s' if len(ranks) > 1 else ''} {fold_ranks(ranks)})" if ranks else ""
    whose = "the process" if len(found) == 1 else f"{len(found)} processes"
    return f"GPU{'s' if len(gpus) > 1 else ''} {fold_ranks(gpus)}: {size} of {whose} that ended{who}"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


class GpuMemory:
    """Asks the driver what workers have while they run (``watch``), and for it once they have ended (``freed``)."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self._driver = GpuDriver(run)  # from ``open`` until ``freed`` returns
        self._looks = GpuDriver(run)
        self._watching: asyncio.Task[None] | None = None
        self._had: dict[tuple[int, int], int] = {}  # bytes by GPU and process
        self._free: dict[int, int] = {}  # bytes by GPU, as ``freed`` saw it last

    @property
    def pids(self) -> frozenset[int]:
        """The programs that ask, while they run."""
        return self._driver.pids | self._looks.pids

    def watch(self) -> None:
        """Look every ten seconds at what the workers have, from now on until they have ended."""
        if self._watching is None:
            self._had = {}
            self._looks.open()
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        with suppress(asyncio.TimeoutError):
            while (answer := await self._looks.answer(_ANSWER_S)) is not None:
                self._had |= had(answer, self._run.processes.gone)
                await asyncio.sleep(_WATCHED_S)
        self._looks.close()

    def open(self) -> None:
        """Begin to ask, if there is a driver: that takes it a moment, in which workers may end."""
        self._driver.open()

    def close(self) -> None:
        """Ask no more."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        self._looks.close()
        self._driver.close()

    async def freed(self, over: Callable[[], bool]) -> list[Held]:
        """Wait until the driver lists no process of ours that has ended; returns what is held after ``PATIENCE_S``.

        Nothing is waited for where it does not tell, nor once the job is ``over``.
        """
        began_s, has_said = time.monotonic(), False
        self._free = {}
        try:
            while (found := await self._held()) and not over():
                waited_s = time.monotonic() - began_s
                if waited_s >= PATIENCE_S:
                    return found
                if waited_s >= _SAID_AFTER_S and not has_said:
                    has_said, many = True, len(found) > 1
                    waits = "their successors wait" if many else "its successor waits"
                    self._run.say(f"node {self._run.job.node}: {as_text(found)} is not free yet: {waits}")
                await asyncio.sleep(_LOOK_S)
            return []
        finally:
            self.close()

    def told(self) -> tuple[FreedMemory, ...]:
        """What each rank that has ended was last seen to have, and what was free of its GPU when ``freed`` returned."""
        gone, found = self._run.processes.gone, list[FreedMemory]()
        for (gpu, pid), count in sorted(self._had.items()):
            rank, free = _rank_of(gone.get(pid, "")), self._free.get(gpu, -1)
            if rank is not None and free >= 0:
                found.append(FreedMemory(gpu, rank, count, free))
        return tuple(found)

    async def _held(self) -> list[Held]:
        """What is held now; nothing, too, where the driver does not tell."""
        try:
            answer = await self._driver.answer(_ANSWER_S)
        except asyncio.TimeoutError:
            self._run.warn(
                f"node {self._run.job.node}: the GPUs' driver has not answered for {_ANSWER_S:g} s: "
                "the next workers begin though memory of those that ended may not be free"
            )
            return []
        if answer is None:
            return []
        self._free = {int(gpu): free for gpu, (free, _) in answer.items()}
        return list(held(answer, self._run.processes.gone))
