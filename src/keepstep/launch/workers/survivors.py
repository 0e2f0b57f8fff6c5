"""Workers that outlive their incarnation: told to leave their training, waited for, made a worker of the next one.

A worker that can do so says it on a connection (``core.staying``). One that has not left in time, or refuses, is
killed, and a standby or a fresh process begins in its place.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from keepstep.core.local_socket import LocalServer
from keepstep.core.ranges import fold_ranks
from keepstep.core.staying import ADDRESS, LEAVE, LEFT, LOST, MOST_BYTES, REFUSED, STAYS
from keepstep.core.within import within
from keepstep.launch.local_run import LocalRun
from keepstep.launch.workers.guard import signal_group
from keepstep.launch.workers.processes import FREEING_S, UNKILLABLE_S, Child, failing_status

_PREFIX = "survivor, "
_NO_SESSION = "no @keepstep.resilient training runs in it"


@dataclass(slots=True)
class _Survivor:
    """A worker that was told to leave its training."""

    child: Child
    connection: socket.socket
    state: Literal["leaving", "left", "killed"] = "leaving"

    @property
    def name(self) -> str:
        return self.child.name.removeprefix(_PREFIX)


class Survivors:
    """The survivors of one node."""

    def __init__(
        self, run: LocalRun, lost: Callable[[int, str], object] = lambda _process, _error: None
    ) -> None:
        """``lost`` is called with a worker's process and error when its training has ended as it lost others."""
        self._run, self._lost = run, lost
        self._connections: dict[int, socket.socket] = {}  # connections of workers that can leave, by process
        self._reasons: dict[int, str] = {}  # why a process cannot survive; "": it has only gone
        self._survivors: dict[int, _Survivor] = {}  # all survivors, by local rank
        self._changed = asyncio.Event()
        self._server = LocalServer(f"keepstep-staying-{secrets.token_hex(16)}", self._heard, MOST_BYTES)

    @property
    def environment(self) -> dict[str, str]:
        """The variable by which workers find the launcher's socket."""
        return {ADDRESS: self._server.address}

    @property
    def pids(self) -> frozenset[int]:
        """Processes that leave their training, or wait to be a worker again."""
        return frozenset(one.child.pid for one in self._survivors.values())

    def call(self, workers: Mapping[int, Child]) -> frozenset[int]:
        """Tell those of the workers, by local rank, to leave that can; returns their local ranks."""
        called: set[int] = set()
        others: dict[str, list[int]] = {}
        for local_rank, child in workers.items():
            connection = self._connections.get(child.pid)
            if not child.alive:
                continue
            if connection is None:
                why = self._reasons.get(child.pid, _NO_SESSION)
                others.setdefault(why, []).append(int(child.name.removeprefix("rank ")))
                continue
            with suppress(OSError):
                connection.send(LEAVE.encode())
                self._survivors[local_rank] = _Survivor(child, connection)
                self._run.processes.become(child, f"{_PREFIX}{child.name}", self._exited)
                called.add(local_rank)
        for why, ranks in others.items():
            if why:
                verb = "ranks {} begin" if len(ranks) > 1 else "rank {} begins"
                self._run.warn(f"{verb.format(fold_ranks(ranks))} anew in another process: {why}")
        return frozenset(called)

    async def left(self) -> list[Child]:
        """Wait until all that were called have left their training, or ended.

        One that has not left in time is killed. Returns those that even SIGKILL did not end (stuck in the kernel).
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._run.job.leave_s
        freed_s = deadline_s + FREEING_S
        while any(one.state != "left" for one in self._survivors.values()):
            self._changed.clear()
            late = [one for one in self._survivors.values() if one.state == "leaving"]
            left_s = deadline_s - loop.time() if late else UNKILLABLE_S
            try:
                await within(max(0.0, left_s), self._changed.wait())
            except asyncio.TimeoutError:
                for one in late:
                    self._run.warn(f"{one.name} does not leave its training: it is ended")
                    self._kill(one)
                if not late and (loop.time() > freed_s or not self._are_freed):
                    break
        return self._given_up()

    async def dismiss(self) -> list[Child]:
        """End all survivors, because none of them can play in the next incarnation; returns what ``left`` does."""
        for one in self._survivors.values():
            self._kill(one)
        return await self.left()

    def take(self, local_rank: int, environment: Mapping[str, str], outputs: Sequence[int]) -> Child | None:
        """Make the survivor of a local rank a worker again, as ``Restarts.take`` says; None when there is none."""
        one = self._survivors.get(local_rank)
        if one is None or one.state != "left":
            return None
        try:
            socket.send_fds(one.connection, [json.dumps(environment).encode()], outputs)
        except OSError:
            self._kill(one)
            return None
        del self._survivors[local_rank]
        return one.child

    def end(self) -> None:
        """Kill all survivors, and end all connections."""
        for one in self._survivors.values():
            self._kill(one)
        self._server.close()

    @property
    def _are_freed(self) -> bool:
        """Whether the kernel frees the memory of all that were killed."""
        killed = [one.child for one in self._survivors.values() if one.state == "killed"]
        return all(failing_status(child.pid) for child in killed)

    def _given_up(self) -> list[Child]:
        """Those that were killed and live: others begin in their places."""
        stuck = [one for one in self._survivors.values() if one.state == "killed"]
        for one in stuck:
            self._run.processes.become(one.child, one.name, self._run.processes.clear)
        self._survivors = {local: one for local, one in self._survivors.items() if one not in stuck}
        return [one.child for one in stuck]

    def _kill(self, one: _Survivor) -> None:
        one.state = "killed"
        signal_group(one.child.pid, signal.SIGKILL)

    def _exited(self, child: Child) -> None:
        self._run.processes.clear(child)
        self._survivors = {local: one for local, one in self._survivors.items() if one.child is not child}
        self._changed.set()

    def _heard(self, connection: socket.socket, pid: int, message: bytes) -> None:
        word, _, why = message.decode(errors="replace").partition(" ")
        one = next((one for one in self._survivors.values() if one.child.pid == pid), None)
        if word == STAYS:
            if self._connections.setdefault(pid, connection) is not connection:
                self._server.drop(connection)  # one for each process is enough
        elif word in (LEFT, REFUSED) and one is not None:
            if one.state == "killed":  # the message was sent before the process was killed
                return
            if word == LEFT:
                one.state = "left"
            else:
                self._run.warn(f"{one.name} begins anew in another process: {why}")
                self._kill(one)
            self._changed.set()
        elif word == LOST:
            if pid in self._connections and one is None:
                self._lost(pid, why)
        else:
            self._reasons[pid] = why if word == REFUSED else ""
            self._server.drop(connection)
            self._connections.pop(pid, None)
