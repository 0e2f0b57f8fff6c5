"""The workers of one node through all incarnations: begun, shown on the console, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from keepstep.core.incident import Recovery
from keepstep.launch.command import run_folder
from keepstep.launch.command.job import Job
from keepstep.launch.command.placement import OURS, Place, worker_plans
from keepstep.launch.workers.guard import Guard
from keepstep.launch.workers.incarnation import Workers, sweep
from keepstep.launch.workers.processes import Child, Processes
from keepstep.launch.workers.restarts import Restarts
from keepstep.launch.workers.root_cause import Failure
from keepstep.launch.workers.streams import Following, worker_streams


class Crew:
    """``workers``: those of the newest incarnation. ``restarts``: what is kept so that the next one begins quickly."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        environ: Mapping[str, str],
        processes: Processes,
        guard: Guard,
        *,
        failed: Callable[[Failure], None],
        finished: Callable[[], None],
        recovered: Callable[[Recovery], None],
        note: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        """``environ``: of each worker, beside what its place adds.

        ``failed`` is told the first failure of an incarnation, ``finished`` that all its workers ended well, and
        ``recovered`` that all ranks train again after a restart.
        """
        self._job, self._folder = job, folder
        self.environ = environ
        self._processes, self._guard = processes, guard
        self._failed, self._finished, self._recovered = failed, finished, recovered
        self._note, self._warn = note, warn
        self._logs = run_folder.LogFiles(folder, job.streams.log_dir, job.run_id)
        self._following = Following(job, self._logs)
        self.workers: Workers | None = None
        self.restarts: Restarts | None = None

    @property
    def failures(self) -> list[Failure]:
        """Of the newest incarnation, in the order in which they were seen."""
        return self.workers.failures if self.workers else []

    def prepare(self, place: Place) -> Restarts:
        """Before the first incarnation: what a restart will need."""
        self.restarts = Restarts(
            self._job,
            self.environ,
            self._folder / "nodes" / str(place.node_rank),
            self._processes,
            self._guard,
            warn=self._warn,
            note=self._note,
            recovered=self._recovered,
            raised=lambda rank: self.workers and self.workers.raised(rank),
        )
        return self.restarts

    def start(self, place: Place, environment: Mapping[int, Mapping[str, str]]) -> Workers:
        """Begin an incarnation. ``environment``: what is told to one worker alone, by local rank.

        Raises:
            RunError: a worker cannot be started; those that were are to be ended with ``end``.
        """
        job, restarts, attempt = self._job, self.restarts, place.incarnation
        assert restarts is not None
        ranks = {local_rank: place.first_rank + local_rank for local_rank in range(job.nproc)}
        error_files = {
            local: str(self._logs.error_file(rank, local, attempt)) for local, rank in ranks.items()
        }
        plans = worker_plans(
            job,
            place,
            self.environ,
            error_files=error_files,
            restart_count=attempt,
            extra={local: {**environment[local], **restarts.environment(place, local)} for local in ranks},
        )
        streams = {
            local: worker_streams(job, self._logs, rank, local, attempt) for local, rank in ranks.items()
        }
        self.workers = Workers(
            plans,
            streams,
            self._processes,
            self._guard,
            failed=self._failed,
            finished=self._finished,
            standbys=restarts.standbys,
            survivors=restarts.survivors,
        )
        self._following.start(streams, ranks, attempt)
        self.workers.start({k: v for k, v in self.environ.items() if k not in OURS})
        restarts.started(plans, place, self.workers.from_standbys, self.workers.survived)
        return self.workers

    async def end(self, number: int, kill_now: asyncio.Event) -> list[Child]:
        """See `Workers.end`."""
        if self.workers is None:
            return []
        return await self.workers.end(number, self._job.shutdown_timeout_s, kill_now)

    def stop_following(self) -> None:
        """Show what is left of the output."""
        self._following.stop()

    async def sweep(self, apart_from: frozenset[int], kill_now: asyncio.Event) -> None:
        """End what workers left behind, but not who waits to play a rank, nor processes ``apart_from`` workers."""
        waiting = self.restarts.pids if self.restarts else frozenset[int]()
        guard = {self._guard.pid} if self._guard.pid else set[int]()
        await sweep(apart_from | waiting | guard, kill_now)

    def close(self) -> None:
        """No incarnation follows."""
        self._following.stop()
        if self.restarts:
            self.restarts.end()
