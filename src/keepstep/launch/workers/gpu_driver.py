"""Asks NVIDIA's driver who has memory of this node's GPUs, through a program of its own: a driver may hang."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from keepstep.core.errors import RunError
from keepstep.core.within import within
from keepstep.launch.local_run import LocalRun
from keepstep.launch.workers.gpu_holders import LIBRARY
from keepstep.launch.workers.guard import signal_group
from keepstep.launch.workers.processes import Child

Answer = Mapping[str, tuple[int, Sequence[tuple[int, int]]]]
"""By number of the GPU, its free bytes (-1: unknown), and the processes that have memory there with their bytes."""
_PROGRAM = str(Path(__file__).with_name("gpu_holders.py"))


class GpuDriver:
    """Answers from ``open`` until ``close``, if there is a driver."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self._child: Child | None = None
        self._socket: socket.socket | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def pids(self) -> frozenset[int]:
        """The program that asks, while it runs."""
        return frozenset({self._child.pid}) if self._child and self._child.alive else frozenset()

    def open(self) -> None:
        """Begin to ask, if there is a driver: that takes it a moment."""
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

    async def answer(self, within_s: float) -> Answer | None:
        """What the driver says now; None: it is not asked, or does not tell.

        Raises asyncio.TimeoutError where it has not answered for so many seconds: then it is to be closed.
        """
        try:
            if self._socket is not None:
                ours, self._socket = self._socket, None
                self._streams = await asyncio.open_connection(sock=ours)
            if self._streams is None:
                return None
            reader, writer = self._streams
            writer.write(b"\n")
            return json.loads(await within(within_s, reader.readline()))
        except asyncio.TimeoutError:  # from Python 3.11 on an OSError
            raise
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Ask no more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
        for pid in self.pids:
            signal_group(pid, signal.SIGKILL)
