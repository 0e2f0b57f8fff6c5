"""The node's warm standbys: warmed behind the training, made workers at a restart.

Each standby is bound to a local rank, with whose environment it is started, and imports what the worker of that local
rank has imported. Where that is not known there is no standby.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from keepstep.core.errors import RunError
from keepstep.core.own_folders import make_folder, open_file, write_whole
from keepstep.core.ranges import fold_ranks
from keepstep.launch.command.placement import BY_PLACE, ERROR_FILE, IMPORTS, OURS, WorkerPlan
from keepstep.launch.local_run import LocalRun
from keepstep.launch.workers.guard import signal_group
from keepstep.launch.workers.processes import Child, give_priority

TRIES = 3
_MOST_BYTES = 4096
Imports: TypeAlias = "tuple[Sequence[str], Mapping[str, str]]"
"""Modules in the order in which they are imported, and variables that a script sets before."""
PROGRAM = str(Path(__file__).with_name("standby.py"))
# Variables that belong to one incarnation, or that would have a standby do what only a worker does.
_NOT_YET = OURS | {ERROR_FILE, "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"}


@dataclass(slots=True)
class _Standby:
    """A standby that lives."""

    child: Child
    socket: socket.socket
    warm: bool = False
    hurried: bool = False  # the standby has the usual priority already


@dataclass(slots=True)
class _LocalRank:
    """A local rank that has a standby, or is to have one."""

    plan: WorkerPlan
    imports: Path
    standby: _Standby | None = None
    deaths: int = 0
    trouble: str = ""


def _named(plan: WorkerPlan) -> str:
    return f"rank {plan.rank}" if plan.rank >= 0 else f"local rank {plan.local_rank}"


class Standbys:
    """At most ``count`` standbys, for the first local ranks. ``folder`` is this node's, for imports and logs."""

    def __init__(self, run: LocalRun, count: int, environ: Mapping[str, str]) -> None:
        """``environ``: of every standby, beside what the place of its rank adds."""
        self._run, self._count, self._environ = run, count, environ
        self.folder = run.folder
        self._local_ranks: dict[int, _LocalRank] = {}
        self._ended = False
        self._busy = False  # the last standby found no CPU idle for long

    @property
    def pids(self) -> frozenset[int]:
        """Standbys that wait or are being warmed."""
        return frozenset(local.standby.child.pid for local in self._local_ranks.values() if local.standby)

    @property
    def are_warm(self) -> bool:
        """Whether all standbys are warm, apart from those that died too often."""
        ranks = self._local_ranks.values()
        return all(rank.deaths >= TRIES or (rank.standby is not None and rank.standby.warm) for rank in ranks)

    def environment(self, local_rank: int) -> dict[str, str]:
        """The variable that has a worker say what it imports; empty when that is known, or not needed."""
        path = self._path(local_rank)
        if local_rank >= self._count or path.exists():
            return {}
        make_folder(path.parent)
        return {IMPORTS: str(path)}

    def warm(self, plans: Sequence[WorkerPlan]) -> None:
        """Warm a standby for each of these workers, a few at a time; those that are there stay."""
        for plan in plans:
            if plan.local_rank < self._count:
                local = self._local_ranks.setdefault(
                    plan.local_rank, _LocalRank(plan, self._path(plan.local_rank))
                )
                local.plan, local.imports = plan, self._path(plan.local_rank)
        self._next()

    @property
    def imports(self) -> Imports | None:
        """What all workers of this node that standbys are kept for import; None while one has not said it."""
        try:
            told = [json.loads(local.imports.read_bytes()) for local in self._local_ranks.values()]
        except (OSError, ValueError):
            return None
        if not told:
            return None
        if any(one["environment"] != told[0]["environment"] for one in told):  # they follow from the rank
            return None
        common = set[str].intersection(*(set(one["modules"]) for one in told))
        first = told[0]
        return [name for name in first["modules"] if name in common], first["environment"]

    def warm_for_spare(self, imports: Imports, plans: Sequence[WorkerPlan]) -> None:
        """Warm standbys for these workers, which have no rank yet, by what those of another node import."""
        modules, environment = imports
        content = json.dumps({"modules": modules, "environment": environment, "unknown": sorted(BY_PLACE)})
        for plan in plans:
            make_folder(self._path(plan.local_rank).parent)
            write_whole(self._path(plan.local_rank), content.encode())
        self.warm(plans)

    def take(self, local_rank: int, environment: Mapping[str, str], outputs: Sequence[int]) -> Child | None:
        """Make the standby of a local rank a worker, as ``Restarts.take`` says; None when there is no warm one."""
        local = self._local_ranks.get(local_rank)
        if local is None or local.standby is None or not local.standby.warm:
            return None
        taken, local.standby = local.standby, None
        asyncio.get_running_loop().remove_reader(taken.socket)
        try:
            socket.send_fds(taken.socket, [json.dumps(environment).encode()], outputs)
        except OSError:
            signal_group(taken.child.pid, signal.SIGKILL)
            return None
        finally:
            taken.socket.close()
        return taken.child

    def end(self) -> None:
        """Kill all standbys, and warm none any more."""
        self._ended = True
        for pid in self.pids:
            signal_group(pid, signal.SIGKILL)

    def _path(self, local_rank: int) -> Path:
        return self.folder / "imports" / f"{local_rank}.json"

    def _next(self) -> None:
        """Begin to warm as many as there are CPUs to spare, but always one."""
        if self._ended:
            return
        spare = len(os.sched_getaffinity(0)) - len(self._local_ranks)
        warming = sum(
            local.standby is not None and not local.standby.warm for local in self._local_ranks.values()
        )
        for _, local in sorted(self._local_ranks.items()):
            if warming >= max(spare // 2, 1):
                return
            if local.standby is None and local.deaths < TRIES and local.imports.exists():
                self._start(local)
                warming += local.standby is not None

    def _start(self, local: _LocalRank) -> None:
        plan = local.plan
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**self._environ, **plan.environment}
        hidden = _NOT_YET if plan.rank >= 0 else _NOT_YET | BY_PLACE
        environment = {name: value for name, value in environment.items() if name not in hidden}
        log = -1
        try:
            log = open_file(self.folder / "standbys.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            child = self._run.processes.start(
                f"standby of {_named(plan)}",
                (*plan.command[:2], PROGRAM, *plan.command[2:]),
                {**environment, IMPORTS: str(local.imports), "KEEPSTEP_STANDBY": str(theirs.fileno())},
                on_exit=lambda child: self._exited(local, child),
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
            )
        except (OSError, RunError) as error:
            ours.close()
            self._failed(local, str(error))
            return
        finally:
            theirs.close()
            if log >= 0:
                os.close(log)
        ours.setblocking(False)
        give_priority(child, low=True, idle=True)
        local.standby = _Standby(child, ours)
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, self._heard, local, local.standby)
        idle_s = self._run.job.standby_idle_s
        loop.call_later(0.1 * idle_s if self._busy else idle_s, self._hurry, local, local.standby)

    def _hurry(self, local: _LocalRank, which: _Standby) -> None:
        """Give a standby that is not warm yet the usual priority: where no CPU is ever idle it never would be."""
        if local.standby is which and not which.warm:
            self._busy = which.hurried = True
            give_priority(which.child, low=False)

    def _heard(self, local: _LocalRank, which: _Standby) -> None:
        try:
            said = which.socket.recv(_MOST_BYTES).decode(errors="replace")
        except OSError:
            said = ""
        if said == "warm":
            give_priority(which.child, low=False, then=lambda: self._warmed(which))
            return
        asyncio.get_running_loop().remove_reader(which.socket)
        local.trouble = said or local.trouble

    def _warmed(self, which: _Standby) -> None:
        """Note that a standby is warm and has the priority of a worker."""
        which.warm = True
        self._busy = which.hurried
        if all(one.standby and one.standby.warm for one in self._local_ranks.values()):
            plans = [one.plan for one in self._local_ranks.values()]
            is_spare = any(one.rank < 0 for one in plans)
            ranks = fold_ranks(one.local_rank if is_spare else one.rank for one in plans)
            self._run.note(f"standbys are warm for {'local ' if is_spare else ''}ranks {ranks}")
        self._next()

    def _exited(self, local: _LocalRank, child: Child) -> None:
        """Note the end of a standby that has not become a worker."""
        self._run.processes.clear(child)
        gone, local.standby = local.standby, None
        if gone is not None:
            asyncio.get_running_loop().remove_reader(gone.socket)
            with suppress(OSError):  # the end of a standby may be seen before its message why it is not fit
                said = gone.socket.recv(_MOST_BYTES).decode(errors="replace").removeprefix("warm")
                local.trouble = said or local.trouble
            gone.socket.close()
        if not self._ended:
            self._failed(local, local.trouble or f"ended with status {child.status}")

    def _failed(self, local: _LocalRank, reason: str) -> None:
        local.deaths += 1
        if local.deaths == TRIES:
            self._run.warn(
                f"no standby for {_named(local.plan)}: {reason} (see {self.folder}/standbys.log); "
                "a restart begins it as a fresh process"
            )
        asyncio.get_running_loop().call_soon(self._next)
