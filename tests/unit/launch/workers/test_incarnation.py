"""The workers of one incarnation, on real processes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.alone import alone
from tests.unit.launch.command.test_job import job
from tests.unit.launch.local_runs import ToldRun

from keepstep.launch.command.placement import ERROR_FILE, WorkerPlan
from keepstep.launch.workers.incarnation import Workers
from keepstep.launch.workers.restarts import Restarts
from keepstep.launch.workers.root_cause import Failure
from keepstep.launch.workers.streams import WorkerStreams


def test_a_worker_that_is_killed_for_its_hang_has_failed_before_others_can_fail_by_its_death(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        run = ToldRun(tmp_path, job("train.py"))
        restarts = Restarts(run, os.environ, recovered=lambda _: None, raised=lambda _: None)
        command = (sys.executable, "-c", "import time; time.sleep(600)")
        plans = [
            WorkerPlan(rank, rank, command, {ERROR_FILE: str(tmp_path / f"error-{rank}.json")})
            for rank in (0, 1)
        ]
        streams = {rank: WorkerStreams(None, None, {}) for rank in (0, 1)}
        told: list[Failure] = []
        workers = Workers(plans, streams, run.processes, restarts, failed=told.append, finished=lambda: None)
        workers.start(os.environ)
        first, second = workers.alive
        assert not workers.kill(1, first.pid, "another process")
        assert workers.kill(1, second.pid, "it hung")
        # Nothing was reaped yet: the kernel may take long to free the memory of the killed one.
        assert [(one.rank, one.message, one.by_keepstep) for one in told] == [(1, "it hung", True)]
        for child in (first, second):
            os.kill(child.pid, signal.SIGKILL)
        while any(child.alive for child in (first, second)):
            run.processes.reap()
        assert [one.rank for one in workers.failures] == [1, 0]

    alone(main)
