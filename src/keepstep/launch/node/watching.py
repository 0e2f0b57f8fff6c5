"""Watching on one node: a ring for each worker, and the agent that reads them. Each incarnation has its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from keepstep.core.errors import KeepstepError
from keepstep.launch.command.job import Job
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.command.placement import Place
from keepstep.launch.node.node_cache import NodeCache
from keepstep.launch.node.preloaded import Waiting
from keepstep.launch.node.programs import Companion, agent_command, environment
from keepstep.launch.workers.guard import Guard
from keepstep.launch.workers.preload import preload, shim
from keepstep.launch.workers.processes import Processes
from keepstep.launch.workers.rings import Rings

_GIVES_WAY_S = 1.5
FAILURES = (KeepstepError, OSError, ImportError)  # of watching, that do not end the job


class Watching:
    """Optional at every point: what fails of it is said once, and the job runs on."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        secret: Path,
        processes: Processes,
        guard: Guard,
        caching: NodeCache,
        where: Callable[[], tuple[Place | None, Endpoint | None]],
        warn: Callable[[str], None],
    ) -> None:
        """``where``: this node's place and the controller's, now."""
        self._job, self._folder, self._secret = job, folder, secret
        self._processes, self._guard, self._caching = processes, guard, caching
        self._where, self._warn = where, warn
        self._rings = Rings()
        self._agent: Companion | None = None
        self._waiting = Waiting([sys.executable, "-m", "keepstep.agent"], environment(), processes, guard)
        self._renewal: asyncio.Task[None] | None = None  # of the agent
        self._gave_up = False  # the agent died too often

    @property
    def rings(self) -> dict[int, str]:
        """Paths of the rings by rank; empty: nobody is watched."""
        return self._rings.paths

    @property
    def agent(self) -> int | None:
        """The process."""
        return self._agent.pid if self._agent else None

    @property
    def pids(self) -> frozenset[int]:
        """The agent's process, and that of the next one."""
        return frozenset(pid for pid in (self.agent, self._waiting.pid) if pid)

    @property
    def is_steady(self) -> bool:
        """There is an agent, and it will be."""
        return self._agent is not None and not self._gave_up

    def steps(self, rank: int) -> int:
        """Optimizer steps that a rank has made in this incarnation, also after its death; -1: nobody counts."""
        return self._rings.steps(rank)

    @property
    def steps_made(self) -> int:
        """Those of all ranks here together; 0 or less: none is known."""
        return sum(self._rings.steps(rank) for rank in self._rings.paths)

    def make_rings(self, place: Place, environ: Mapping[str, str]) -> dict[int, dict[str, str]]:
        """One for each worker: what they find it by, and what they write it with besides the probe.

        Empty, with a word about it, when they cannot be made. ``environ``: what the workers are started with.
        """
        try:
            self._rings.make(place, self._job.nproc, self._job.ring_records)
        except (*FAILURES, ValueError) as error:
            self._warn(f"the workers train unwatched, no ring can be made: {error}")
            return {}
        preloaded = preload(environ, shim())
        found_by = self._rings.environment(place, self._folder, environ)
        return {local: {**one, **preloaded} for local, one in found_by.items()}

    def start(self) -> None:
        """The agent, when it is not there and something is to be read."""
        try:
            self._start()
        except FAILURES as error:
            self._warn(f"the job is not watched: {error}")

    def renew(self) -> None:
        """The agent of the incarnation that ended ends, one of the next follows it; workers wait for neither."""
        old, self._rings = self._rings, Rings()

        async def renew() -> None:
            await self._stop()
            old.close()
            self.start()
            if self._agent:  # where CPUs are few, workers that begin again have them first
                self._agent.give_way(_GIVES_WAY_S)

        self._then(renew)

    def expect(self) -> None:
        """The incarnation will soon be over: the agent of the next one may import what it needs."""
        if self._agent and not self._gave_up:
            self._waiting.start()

    @property
    def is_ready(self) -> bool:
        """The agent that was expected has imported what it needs, or there is none."""
        return self._waiting.is_ready

    def restart(self) -> None:
        """It looks for the controller where that was when it began."""

        async def restart() -> None:
            if self._agent:
                await self._stop()
                self.start()

        self._then(restart)

    async def renewed(self) -> None:
        """The agent that was there has ended."""
        if self._renewal:
            await self._renewal

    async def end(self) -> None:
        """For good; the rings stay until ``close``."""
        await self.renewed()
        await self._stop()
        self._waiting.end()

    def close(self) -> None:
        """Let go of the rings."""
        self._rings.close()

    def _then(self, work: Callable[[], Awaitable[None]]) -> None:
        before = self._renewal

        async def after() -> None:
            if before:
                await before
            await work()

        self._renewal = asyncio.get_running_loop().create_task(after())

    def _start(self) -> None:
        paths = self._rings.paths
        place, controller = self._where()
        if self._agent or not paths or place is None or controller is None:
            return
        orders, links, cache = self._rings.orders, self._rings.links, self._caching.address
        log = self._folder / "nodes" / str(place.node_rank) / "agent.log"

        def command() -> list[str]:
            return agent_command(
                *(self._job, self._folder, self._secret, controller, place.node_rank, paths, orders, links),
                world_size=place.world_size,
                cache=cache,
            )

        def gave_up(reason: str) -> None:
            self._gave_up = True
            self._warn(f"the agent {reason} (see {log}): this node trains on unwatched")

        self._agent = Companion(
            *("agent", command, self._processes, self._guard), gave_up=gave_up, log=log, waiting=self._waiting
        )
        self._agent.start()

    async def _stop(self) -> None:
        if self._agent:
            await self._agent.stop(self._job.linger_s)
            self._agent = None
