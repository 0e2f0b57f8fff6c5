"""The node's warm standbys, as their launcher keeps them: warmed behind the training, given away at a restart.

Each is bound to a local rank, whose environment it is started with. What it imports is what the worker of that local
rank was seen to have imported; where nothing was seen there is no standby.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.errors import RunError
from keepstep.core.own_folders import make_folder, open_file
from keepstep.core.ranges import fold_ranks
from keepstep.launch.command.placement import ERROR_FILE, IMPORTS, OURS, WorkerPlan
from keepstep.launch.workers.guard import Guard
from keepstep.launch.workers.processes import Child, Processes, restore_priority, signal_group

TRIES = 3
IDLE_S = 20.0  # in which one warms on what the training leaves of the CPUs; then it takes its part, the next sooner
_MOST_WORDS = 4096
PROGRAM = str(Path(__file__).with_name("standby.py"))
# What belongs to one incarnation, or would have a standby do what only a worker does.
_NOT_YET = OURS | {ERROR_FILE, "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"}


@dataclass(slots=True)
class _Standby:
    """One that lives."""

    child: Child
    socket: socket.socket
    warm: bool = False
    hurried: bool = False


@dataclass(slots=True)
class _Seat:
    """A local rank that has a standby, or is to have one."""

    plan: WorkerPlan
    imports: Path
    standby: _Standby | None = None
    deaths: int = 0
    trouble: str = ""


class Standbys:
    """``count`` of them at most, for the first local ranks."""

    def __init__(
        self,
        count: int,
        environ: Mapping[str, str],
        folder: Path,
        processes: Processes,
        guard: Guard,
        *,
        warn: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        """``folder``: for what workers imported, and what standbys say."""
        self._count = count
        self._environ = environ
        self._folder = folder
        self._processes = processes
        self._guard = guard
        self._warn, self._note = warn, note
        self._seats: dict[int, _Seat] = {}
        self._ended = False
        self._busy = False  # no CPU was idle for the last one

    @property
    def pids(self) -> frozenset[int]:
        """Those that wait or are being warmed."""
        return frozenset(seat.standby.child.pid for seat in self._seats.values() if seat.standby)

    @property
    def are_warm(self) -> bool:
        """All wait that there are to be; one that died too often is none of them."""
        seats = self._seats.values()
        return all(seat.deaths >= TRIES or (seat.standby is not None and seat.standby.warm) for seat in seats)

    def environment(self, local_rank: int) -> dict[str, str]:
        """Where the worker is to say what it imports; nothing when that is known, or not needed."""
        path = self._path(local_rank)
        if local_rank >= self._count or path.exists():
            return {}
        make_folder(path.parent)
        return {IMPORTS: str(path)}

    def warm(self, plans: Sequence[WorkerPlan]) -> None:
        """Have a standby for each of these workers, a few at a time; those that are there stay."""
        for plan in plans:
            if plan.local_rank < self._count:
                seat = self._seats.setdefault(plan.local_rank, _Seat(plan, self._path(plan.local_rank)))
                seat.plan = plan
        self._next()

    def take(
        self, plan: WorkerPlan, environ: Mapping[str, str], stdout: int | None, stderr: int | None
    ) -> Child | None:
        """Make the standby of this local rank the worker; None when there is no warm one.

        ``stdout`` and ``stderr`` None: ours. Whoever takes it sees to its end (``Processes.become``).
        """
        seat = self._seats.get(plan.local_rank)
        if seat is None or seat.standby is None or not seat.standby.warm:
            return None
        taken, seat.standby = seat.standby, None
        asyncio.get_running_loop().remove_reader(taken.socket)
        try:
            hand_over(taken.socket, plan, environ, stdout, stderr)
        except OSError:
            signal_group(taken.child.pid, signal.SIGKILL)
            return None
        finally:
            taken.socket.close()
        return taken.child

    def end(self) -> None:
        """Kill all; there are no more."""
        self._ended = True
        for pid in self.pids:
            signal_group(pid, signal.SIGKILL)

    def _path(self, local_rank: int) -> Path:
        return self._folder / "imports" / f"{local_rank}.json"

    def _next(self) -> None:
        """Begin to warm as many as there are CPUs to spare; one in any case."""
        if self._ended:
            return
        spare = len(os.sched_getaffinity(0)) - len(self._seats)
        warming = sum(seat.standby is not None and not seat.standby.warm for seat in self._seats.values())
        for _, seat in sorted(self._seats.items()):
            if warming >= max(spare // 2, 1):
                return
            if seat.standby is None and seat.deaths < TRIES and seat.imports.exists():
                self._start(seat)
                warming += seat.standby is not None

    def _start(self, seat: _Seat) -> None:
        plan = seat.plan
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**self._environ, **plan.environment}
        environment = {name: value for name, value in environment.items() if name not in _NOT_YET}
        log = -1
        try:
            log = open_file(self._folder / "standbys.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            child = self._processes.start(
                f"standby of rank {plan.rank}",
                (*plan.command[:2], PROGRAM, *plan.command[2:]),
                {**environment, IMPORTS: str(seat.imports), "KEEPSTEP_STANDBY": str(theirs.fileno())},
                on_exit=lambda child: self._exited(seat, child),
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
            )
        except (OSError, RunError) as error:
            ours.close()
            self._failed(seat, str(error))
            return
        finally:
            theirs.close()
            if log >= 0:
                os.close(log)
        ours.setblocking(False)
        self._guard.add(child.pid, at_once=True)
        seat.standby = _Standby(child, ours)
        asyncio.get_running_loop().add_reader(ours, self._heard, seat, seat.standby)
        idle_s = 0.1 * IDLE_S if self._busy else IDLE_S
        asyncio.get_running_loop().call_later(idle_s, self._hurry, seat, seat.standby)

    def _hurry(self, seat: _Seat, which: _Standby) -> None:
        """Where no CPU is ever idle it would never be warm, and a restart a cold one."""
        if seat.standby is which and not which.warm:
            self._busy = which.hurried = True
            restore_priority(which.child)

    def _heard(self, seat: _Seat, which: _Standby) -> None:
        try:
            said = which.socket.recv(_MOST_WORDS).decode(errors="replace")
        except OSError:
            said = ""
        if said == "warm":
            which.warm = True
            self._busy = which.hurried
            if all(one.standby and one.standby.warm for one in self._seats.values()):
                ranks = fold_ranks(one.plan.rank for one in self._seats.values())
                self._note(f"standbys are warm for ranks {ranks}")
            self._next()
            return
        asyncio.get_running_loop().remove_reader(which.socket)
        seat.trouble = said or seat.trouble

    def _exited(self, seat: _Seat, child: Child) -> None:
        """One that was not given away has ended."""
        self._guard.remove(child.pid)
        gone, seat.standby = seat.standby, None
        if gone is not None:
            asyncio.get_running_loop().remove_reader(gone.socket)
            with suppress(OSError):  # why it is not fit, when its end is heard of first
                said = gone.socket.recv(_MOST_WORDS).decode(errors="replace").removeprefix("warm")
                seat.trouble = said or seat.trouble
            gone.socket.close()
        if not self._ended:
            self._failed(seat, seat.trouble or f"ended with status {child.status}")

    def _failed(self, seat: _Seat, reason: str) -> None:
        seat.deaths += 1
        if seat.deaths == TRIES:
            self._warn(
                f"no standby for rank {seat.plan.rank}: {reason} (see {self._folder}/standbys.log); "
                "a restart begins it as a fresh process"
            )
        asyncio.get_running_loop().call_soon(self._next)


def hand_over(
    connection: socket.socket,
    plan: WorkerPlan,
    environ: Mapping[str, str],
    stdout: int | None,
    stderr: int | None,
) -> None:
    """Tell the process that waits at the other end to be this worker. Raises OSError: it has ended.

    ``stdout`` and ``stderr`` None: the launcher's own.
    """
    streams = [1 if stdout is None else stdout, 2 if stderr is None else stderr]
    socket.send_fds(connection, [json.dumps({**environ, **plan.environment}).encode()], streams)
