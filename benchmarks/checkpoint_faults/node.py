"""Stands in for the launcher of one node whose job goes on after another node was lost.

``keepstep run`` gives a lost node's place to a spare; here the node itself returns, empty. So this program holds the
cache and does what the launcher would: it starts the real controller (node 0), agent and workers, with the command
lines and environments that the launcher makes; workers are forked, since torch has been imported here. Whenever
``FOLDER/incarnation`` names a later one it ends the workers and the agent and starts them again. All of it ends with
the host.

Arguments: folder, node rank, first master port, then what ``keepstep run`` is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.checkpoint_faults.nursery import Nursery

from keepstep import wire
from keepstep.checkpoint.memory.cache import Backing, Cache
from keepstep.checkpoint.memory.cache_server import CacheServer
from keepstep.launch.command import addresses, run_folder
from keepstep.launch.command.job import Job, job_from_command_line
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.command.placement import (
    CACHE,
    ERROR_FILE,
    INCARNATION,
    RING,
    RUN_DIR,
    Place,
    worker_plan,
)
from keepstep.launch.node.programs import agent_command, controller_command, environment
from keepstep.ring import create

_LOOK_S = 0.01
_CACHE_BYTES = 2 << 30
_AGENT_S = 5.0


class Node:
    """One node's programs."""

    def __init__(self, folder: Path, node_rank: int, master_port: int, job: Job, nursery: Nursery) -> None:
        assert job.rendezvous.endpoint
        assert job.run_dir
        self._folder, self._rank, self._port, self._job = folder, node_rank, master_port, job
        self._run_dir, self._secret = job.run_dir, job.run_dir / "secret"
        endpoint = job.rendezvous.endpoint
        self._controller = Endpoint(addresses.resolve(endpoint.host)[0], endpoint.port)
        self._cache = Cache(_CACHE_BYTES, Backing(job.nproc, job.checkpoint_backups))
        self._server = CacheServer(self._cache)
        self._rings: list[int] = []
        self._agent: subprocess.Popen[bytes] | None = None
        self._nursery = nursery
        self._workers: list[int] = []  # processes

    async def main(self) -> None:
        """For ever."""
        if self._rank == 0:
            run_folder.ensure_secret(self._secret)
            command = controller_command(self._job, self._run_dir, self._secret, self._controller)
            subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
        while not self._secret.exists():
            await asyncio.sleep(_LOOK_S)
        client = wire.Client(  # kept: it is made again for as long as it is there
            (self._controller.host, self._controller.port),
            wire.RunKey(wire.read_secret(self._secret), self._job.run_id),
            role="launcher",
            greet=lambda: [wire.Hello("launcher", self._job.node, self._rank, os.getpid())],
            message=lambda message: None,
        )
        current = -1
        assert client
        while True:
            with contextlib.suppress(OSError, ValueError):
                wanted = int((self._folder / "incarnation").read_text())
                if wanted > current:
                    current = wanted
                    await self._end()
                    self._begin(current)
            self._tell(current)
            await asyncio.sleep(_LOOK_S)

    async def _end(self) -> None:
        for worker in self._workers:
            self._nursery.end(worker)
        if self._agent:
            self._agent.terminate()
            for _ in range(round(_AGENT_S / _LOOK_S)):
                if self._agent.poll() is not None:
                    break
                await asyncio.sleep(_LOOK_S)  # the cache is served meanwhile
            self._agent.kill()
            self._agent.wait()
        for descriptor in self._rings:
            os.close(descriptor)

    def _begin(self, incarnation: int) -> None:
        job, count = self._job, self._job.nproc
        first, world = self._rank * count, job.max_nodes * count
        self._rings = [create(job.ring_records) for _ in range(count)]
        rings = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._rings]
        place = Place(
            self._rank,
            first,
            world,
            job.max_nodes,
            job.master_addr,
            self._port + incarnation,
            incarnation,
        )
        command = agent_command(
            job,
            self._run_dir,
            self._secret,
            self._controller,
            place,
            {"ring": {first + local: path for local, path in enumerate(rings)}},
            cache=self._server.address,
        )
        log = self._run_dir / "nodes" / str(self._rank) / "agent.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._agent = subprocess.Popen(command, env=environment(), stdout=output, stderr=output)
        plans = [
            worker_plan(
                *(job, place, local, os.environ),
                {
                    ERROR_FILE: str(self._folder / f"error-{first + local}-{incarnation}"),
                    RUN_DIR: str(self._run_dir),
                    RING: path,
                    CACHE: self._server.address,
                    INCARNATION: str(incarnation),
                },
            )
            for local, path in enumerate(rings)
        ]
        self._workers = [
            self._nursery.start(
                Path(job.script),
                job.arguments,
                {**os.environ, **plan.environment},
                self._folder / f"console-{plan.rank}",
            )
            for plan in plans
        ]

    def _tell(self, incarnation: int) -> None:
        """Once all workers have ended, their exit codes."""
        codes = [self._nursery.poll(worker) for worker in self._workers]
        path = self._folder / f"ended-{self._rank}-{incarnation}"
        if codes and None not in codes and not path.exists():
            draft = path.with_name(f".{path.name}")
            draft.write_text(" ".join(map(str, codes)))
            draft.rename(path)


def main(words: Sequence[str]) -> None:
    """See the module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = job_from_command_line(words[3:], os.environ)
    folder, node_rank, master_port = Path(words[0]), int(words[1]), int(words[2])
    nursery = Nursery()

    async def run() -> None:
        await Node(folder, node_rank, master_port, job, nursery).main()

    asyncio.run(run())
