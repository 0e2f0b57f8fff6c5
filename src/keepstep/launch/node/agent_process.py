"""Watching on one node: a ring for each worker, and the agent that reads them. Each incarnation has its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from keepstep.core.errors import KeepstepError
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.command.placement import Place, keeping
from keepstep.launch.local_run import LocalRun
from keepstep.launch.node.node_cache import NodeCache
from keepstep.launch.node.programs import Companion, agent_command, environment
from keepstep.launch.node.waiting_program import Waiting
from keepstep.launch.workers.rings import LD_PRELOAD, Rings, preload, shim

if TYPE_CHECKING:
    from keepstep.launch.workers.incarnation import Workers

_GIVES_WAY_S = 1.5
_FAILURES = (KeepstepError, OSError, ImportError)  # exceptions that do not end the job


class Watching:
    """The agent, and the ``rings`` of the newest incarnation. What fails of them is said once, and the job runs on."""

    def __init__(
        self,
        run: LocalRun,
        caching: NodeCache,
        where: Callable[[], tuple[Place | None, Endpoint | None]],
        workers: Callable[[], Workers | None],
    ) -> None:
        """``where``: tells this node's place and the controller's address, ``workers`` the newest ones, as now."""
        self._workers = workers
        self._run, self._caching, self._where = run, caching, where
        self.rings = Rings()
        self._agent: Companion | None = None
        self._waiting = Waiting([sys.executable, "-m", "keepstep.agent"], environment(), run.processes)
        self._renewal: asyncio.Task[None] | None = None  # ends the old agent and starts the next
        self._gave_up = False  # the agent died too often

    @property
    def pids(self) -> frozenset[int]:
        """The processes of the agent and of the one that waits to follow it."""
        agent = self._agent.pid if self._agent else None
        return frozenset(pid for pid in (agent, self._waiting.pid) if pid)

    @property
    def is_steady(self) -> bool:
        """Whether there is an agent, and it is started again when it dies."""
        return self._agent is not None and not self._gave_up

    def make_rings(self, place: Place, environ: Mapping[str, str]) -> dict[int, dict[str, str]]:
        """Make a ring for each worker; returns the variables that it is watched by, by local rank.

        Empty, with a word about it, when they cannot be made. ``environ``: what the workers are started with.
        """
        job = self._run.job
        try:
            self.rings.make(place, job.nproc, job.ring_records)
        except (*_FAILURES, ValueError) as error:
            self._run.warn(f"the workers train unwatched, no ring can be made: {error}")
            return {}
        library = shim()
        preloaded = preload(environ, library)
        if preloaded or (library and str(library) in environ.get(LD_PRELOAD, "")):
            kept = keeping(job, environ)
            preloaded = {**preloaded, **kept}
            if kept and place.incarnation == 0:
                given = " ".join(f"{name}={value}" for name, value in kept.items())
                self._run.note(f"where workers use NCCL its watchdog ends no process that can go on: {given}")
        found_by = self.rings.environment(place, self._run.folder, environ)
        return {local: {**one, **preloaded} for local, one in found_by.items()}

    def attempt(self, step: Callable[[], object]) -> None:
        """Take a step towards a watched job; where it fails, say that the job is not watched."""
        try:
            step()
        except _FAILURES as error:
            self._run.warn(f"the job is not watched: {error}")

    def start(self) -> None:
        """Start the agent, unless it is there already or there is nothing to be read."""
        self.attempt(self._start)

    def renew(self) -> None:
        """Have the agent of the next incarnation follow that of the old one; workers wait for neither."""
        old, self.rings = self.rings, Rings()

        async def renew() -> None:  # where CPUs are few, workers that begin again come first
            if self._agent:
                self._agent.give_way(_GIVES_WAY_S)
            await self._stop()
            old.close()
            self.start()
            if self._agent:
                self._agent.give_way(_GIVES_WAY_S)

        self._then(renew)

    def expect(self) -> None:
        """Have the agent of the next incarnation do its imports, because this one will soon be over."""
        if self._agent and not self._gave_up:
            self._waiting.start()

    def expect_first(self) -> None:
        """Have the first agent do its imports, because this node waits for a place."""
        if self._run.job.watch:
            self._waiting.start()

    @property
    def is_ready(self) -> bool:
        """Whether the agent that was expected has done its imports, or none was."""
        return self._waiting.is_ready

    def restart(self) -> None:
        """Start the agent again, because the controller is elsewhere than when the agent began."""

        async def restart() -> None:
            if self._agent:
                await self._stop()
                self.start()

        self._then(restart)

    async def renewed(self) -> None:
        """Wait until the agent of the old incarnation has ended."""
        if self._renewal:
            await self._renewal

    async def end(self) -> None:
        """End the agent for good; the rings stay until ``close``."""
        await self.renewed()
        await self._stop()
        self._waiting.end()

    def close(self) -> None:
        """Let go of the rings."""
        self.rings.close()

    def _then(self, work: Callable[[], Awaitable[None]]) -> None:
        before = self._renewal

        async def after() -> None:
            if before:
                await before
            await work()

        self._renewal = asyncio.get_running_loop().create_task(after())

    def _start(self) -> None:
        run, pages = self._run, self.rings.pages
        place, controller = self._where()
        if self._agent or not pages["ring"] or place is None or controller is None:
            return
        cache = self._caching.address
        log = run.folder / "nodes" / str(place.node_rank) / "agent.log"

        words = (run.job, run.folder, run.secret, controller, place, pages, cache, self._workers)
        command = partial(agent_command, *words)

        def gave_up(reason: str) -> None:
            self._gave_up = True
            run.warn(f"the agent {reason} (see {log}): this node trains on unwatched")

        self._agent = Companion(
            *("agent", command, run.processes), gave_up=gave_up, log=log, waiting=self._waiting
        )
        self._agent.start()

    async def _stop(self) -> None:
        if self._agent:
            await self._agent.stop(self._run.job.linger_s)
            self._agent = None
