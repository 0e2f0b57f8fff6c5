"""Whether the node's GPUs have let go of the memory of workers that have ended: their successors may need all of it.

A driver may free it seconds after the process is gone, or never. Only what NVIDIA's driver says is waited for; without
it, or where it lists the processes of another namespace, as in some containers, nothing is.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.errors import RunError
from keepstep.core.ranges import fold_ranks
from keepstep.core.within import within
from keepstep.launch.local_run import LocalRun
from keepstep.launch.workers.gpu_holders import LIBRARY
from keepstep.launch.workers.guard import signal_group
from keepstep.launch.workers.processes import Child

PATIENCE_S = 30.0
"""Most seconds that the successors of workers wait for a GPU's memory."""
_SAID_AFTER_S = 1.0
_LOOK_S = 0.1
_ANSWER_S = 5.0  # most seconds that the driver may take to answer
_PROGRAM = str(Path(__file__).with_name("gpu_holders.py"))
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


def held(
    answer: Mapping[str, tuple[int, Sequence[tuple[int, int]]]], gone: Mapping[int, str]
) -> Iterator[Held]:
    """What ended processes have: those in ``gone``, with their names. ``answer``: as `gpu_holders` gives it.

    A list with a process that neither lives here nor was ours is one of another namespace: it says nothing.
    """
    dead = {pid for _, those in answer.values() for pid, _ in those if not _lives(pid)}
    if not dead <= gone.keys():
        return
    for gpu, (free, those) in answer.items():
        for pid, told in those:
            if pid in dead:
                count = 0 if told == _NOT_TOLD else told
                yield Held(int(gpu), gone[pid].rpartition(", ")[2], count, 0 <= free < count)


def as_text(found: Sequence[Held]) -> str:
    """``GPU 3: 41.0 GB of the process that ended (rank 5)``."""
    gpus, ranks = {one.gpu for one in found}, {int(one.name[5:]) for one in found if one.name[:5] == "rank "}
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
    """Asks the driver, through a program of its own, from ``open`` until ``freed`` returns."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self._child: Child | None = None
        self._socket: socket.socket | None = None

    @property
    def pids(self) -> frozenset[int]:
        """The program that asks, while it runs."""
        return frozenset({self._child.pid}) if self._child and self._child.alive else frozenset()

    def open(self) -> None:
        """Begin to ask, if there is a driver: that takes it a moment, in which workers may end."""
        try:
            ctypes.CDLL(LIBRARY)
            ours, theirs = socket.socketpair()
        except OSError:
            return
        self.close()
        with theirs:
            try:
                self._child = self._run.processes.start(
                    "list of the GPUs' processes",
                    (sys.executable, "-I", "-S", _PROGRAM),
                    os.environ,
                    on_exit=self._run.processes.clear,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                )
            except RunError:
                ours.close()
            else:
                self._socket = ours

    def close(self) -> None:
        """Ask no more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for pid in self.pids:
            signal_group(pid, signal.SIGKILL)

    async def freed(self, over: Callable[[], bool]) -> list[Held]:
        """Wait until the driver lists no process of ours that has ended; returns what is held after ``PATIENCE_S``.

        Nothing is waited for where it does not tell, nor once the job is ``over``.
        """
        if self._socket is None:
            return []
        reader, writer = await asyncio.open_connection(sock=self._socket)
        self._socket = None
        began_s, has_said = time.monotonic(), False
        try:
            while (found := await self._held(reader, writer)) and not over():
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
            writer.close()
            self.close()

    async def _held(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[Held]:
        """What is held now; nothing, too, where the driver does not tell."""
        writer.write(b"\n")
        try:
            answer = json.loads(await within(_ANSWER_S, reader.readline()))
        except asyncio.TimeoutError:
            self._run.warn(
                f"node {self._run.job.node}: the GPUs' driver has not answered for {_ANSWER_S:g} s: "
                "the next workers begin though memory of those that ended may not be free"
            )
            return []
        except (OSError, ValueError):
            return []
        return list(held(answer, self._run.processes.gone))
