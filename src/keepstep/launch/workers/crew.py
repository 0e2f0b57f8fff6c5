"""The workers of one node through all incarnations: begun, shown on the console, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from keepstep.core.incident import Recovery
from keepstep.launch.command import run_folder
from keepstep.launch.command.placement import ERROR_FILE, OURS, Place, WorkerPlan, worker_plan
from keepstep.launch.local_run import LocalRun
from keepstep.launch.workers.incarnation import Workers
from keepstep.launch.workers.processes import Child
from keepstep.launch.workers.restarts import Restarts
from keepstep.launch.workers.root_cause import Failure
from keepstep.launch.workers.streams import Following, WorkerStreams, worker_streams


class Crew:
    """Makes the workers of each incarnation, and keeps what makes a restart quick.

    Attributes:
        workers: of the newest incarnation; None before the first.
        following: shows the workers' output; stopped, it has shown all of it.
        restarts: what is kept from one incarnation for the next.
    """

    def __init__(
        self,
        run: LocalRun,
        environ: Mapping[str, str],
        *,
        failed: Callable[[Failure], None],
        finished: Callable[[], None],
        recovered: Callable[[Recovery], None],
    ) -> None:
        """``environ``: of each worker, beside what its place adds.

        ``failed`` is told the first failure of an incarnation, ``finished`` that all its workers ended well, and
        ``recovered`` that all ranks train again after a restart.
        """
        self._run, self.environ = run, environ
        self._failed, self._finished = failed, finished
        self._logs = run_folder.LogFiles(run.folder, run.job.streams.log_dir, run.job.run_id)
        self.following = Following(run.job, self._logs)
        self.workers: Workers | None = None
        self.restarts = Restarts(
            run, environ, recovered=recovered, raised=lambda rank: self.workers and self.workers.raised(rank)
        )

    @property
    def failures(self) -> list[Failure]:
        """Failures in the newest incarnation, in the order in which they were seen."""
        return self.workers.failures if self.workers else []

    def start(self, place: Place, environment: Mapping[int, Mapping[str, str]]) -> Workers:
        """Begin an incarnation. ``environment``: what each worker alone is given, by local rank.

        Raises RunError where a worker cannot be started; those that were are to be ended with ``end``.
        """
        job, attempt = self._run.job, place.incarnation
        if self.workers is None:
            self.restarts.standbys.folder = self._run.folder / "nodes" / str(place.node_rank)
        plans: list[WorkerPlan] = []
        streams: dict[int, WorkerStreams] = {}
        for local in range(job.nproc):
            rank = place.first_rank + local
            error_file = {ERROR_FILE: str(self._logs.error_file(rank, local, attempt))}
            more = {**error_file, **environment[local], **self.restarts.environment(place, local)}
            plans.append(worker_plan(job, place, local, self.environ, more))
            streams[local] = worker_streams(job, self._logs, rank, local, attempt)
        self.workers = Workers(
            *(plans, streams, self._run.processes, self.restarts),
            failed=self._failed,
            finished=self._finished,
        )
        self.following.start(streams, place)
        self.workers.start({k: v for k, v in self.environ.items() if k not in OURS})
        self.restarts.started(plans, place)
        return self.workers

    async def end(self, number: int, kill_now: asyncio.Event) -> list[Child]:
        """End all workers, as `Workers.end` does."""
        if self.workers is None:
            return []
        return await self.workers.end(number, self._run.job.shutdown_timeout_s, kill_now)

    def close(self) -> None:
        """Let go of everything, because no incarnation follows."""
        self.following.stop()
        self.restarts.end()
