"""Workers that outlive their incarnation, as their launcher keeps them: told to leave, waited for, given the next part.

Who can says so on a connection (``core.staying``); of the others nothing is expected. Whoever has not left in time, or
refuses, is killed, and a standby or a fresh process begins in its place.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from keepstep.core.local_socket import LocalServer
from keepstep.core.ranges import fold_ranks
from keepstep.core.staying import ADDRESS, LEAVE, LEFT, MOST_BYTES, REFUSED, STAYS
from keepstep.launch.command.placement import WorkerPlan
from keepstep.launch.workers.guard import Guard
from keepstep.launch.workers.processes import Child, Processes, signal_group
from keepstep.launch.workers.standbys import hand_over

_UNKILLABLE_S = 10.0
_PREFIX = "survivor, "
_NO_SESSION = "no @keepstep.resilient training runs in it"


@dataclass(slots=True)
class _Survivor:
    """A worker that was told to leave."""

    child: Child
    connection: socket.socket
    state: Literal["leaving", "left", "killed"] = "leaving"

    @property
    def name(self) -> str:
        return self.child.name.removeprefix(_PREFIX)


class Survivors:
    """Those of one node. ``patience_s``: for a training to be left. ``warn``: a line for the operator."""

    def __init__(
        self, processes: Processes, guard: Guard, patience_s: float, *, warn: Callable[[str], None]
    ) -> None:
        self._processes, self._guard, self._patience_s, self._warn = processes, guard, patience_s, warn
        self._connections: dict[int, socket.socket] = {}  # by process
        self._reasons: dict[int, str] = {}  # why a process cannot stay; "": its connection has ended
        self._survivors: dict[int, _Survivor] = {}  # by local rank
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._server = LocalServer(f"keepstep-staying-{secrets.token_hex(16)}", self._heard, MOST_BYTES)

    @property
    def environment(self) -> dict[str, str]:
        """What a worker says by that it can stay."""
        return {ADDRESS: self._server.address}

    @property
    def pids(self) -> frozenset[int]:
        """Processes that wait for their next part, or are on the way there."""
        return frozenset(one.child.pid for one in self._survivors.values())

    def call(self, workers: Mapping[int, Child]) -> frozenset[int]:
        """Tell those of the workers (by local rank) that can stay to leave; their local ranks."""
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
                self._processes.become(child, f"{_PREFIX}{child.name}", self._exited)
                called.add(local_rank)
        for why, ranks in others.items():
            if why:
                verb = "ranks {} begin" if len(ranks) > 1 else "rank {} begins"
                self._warn(f"{verb.format(fold_ranks(ranks))} anew in another process: {why}")
        return frozenset(called)

    async def left(self) -> int:
        """Wait until all that were called have left or ended; who has not in time is killed. How many are there."""
        deadline_s = self._loop.time() + self._patience_s
        while any(one.state != "left" for one in self._survivors.values()):
            self._changed.clear()
            late = [one for one in self._survivors.values() if one.state == "leaving"]
            left_s = deadline_s - self._loop.time() if late else _UNKILLABLE_S
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, left_s))
            except asyncio.TimeoutError:
                if not late:
                    break
                for one in late:
                    self._warn(f"{one.name} does not leave its training: it is ended")
                    self._kill(one)
        return len(self._survivors)

    async def dismiss(self) -> None:
        """End all of them: none plays in what comes next."""
        for one in self._survivors.values():
            self._kill(one)
        await self.left()

    def take(
        self, plan: WorkerPlan, environ: Mapping[str, str], stdout: int | None, stderr: int | None
    ) -> Child | None:
        """Make the survivor of this local rank the worker; None when there is none. See ``Standbys.take``."""
        one = self._survivors.get(plan.local_rank)
        if one is None or one.state != "left":
            return None
        try:
            hand_over(one.connection, plan, environ, stdout, stderr)
        except OSError:
            self._kill(one)
            return None
        del self._survivors[plan.local_rank]
        return one.child

    def end(self) -> None:
        """Kill those that wait, and hear nobody any more."""
        for one in self._survivors.values():
            self._kill(one)
        self._server.close()

    def _kill(self, one: _Survivor) -> None:
        one.state = "killed"
        signal_group(one.child.pid, signal.SIGKILL)

    def _exited(self, child: Child) -> None:
        self._guard.remove(child.pid)
        signal_group(child.pid, signal.SIGKILL)
        self._survivors = {local: one for local, one in self._survivors.items() if one.child is not child}
        self._changed.set()

    def _heard(self, connection: socket.socket, pid: int, message: bytes) -> None:
        word, _, why = message.decode(errors="replace").partition(" ")
        one = next((one for one in self._survivors.values() if one.child.pid == pid), None)
        if word == STAYS:
            if self._connections.setdefault(pid, connection) is not connection:
                self._server.drop(connection)  # one for each process is enough
        elif word == LEFT and one is not None:
            one.state = "left"
            self._changed.set()
        elif word == REFUSED and one is not None:
            self._warn(f"{one.name} begins anew in another process: {why}")
            self._kill(one)
        else:
            self._reasons[pid] = why if word == REFUSED else ""
            self._server.drop(connection)
            self._connections.pop(pid, None)
