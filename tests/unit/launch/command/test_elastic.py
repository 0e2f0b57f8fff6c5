"""A job that may have another size: the command line, when a step is sealed that all have alike, and why none is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.launch.local_runs import ToldRun

from keepstep.checkpoint.memory.slots import Key
from keepstep.control.__main__ import parse
from keepstep.core.errors import UsageError
from keepstep.launch.command.job import Job, job_from_command_line
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.command.placement import Place
from keepstep.launch.node.node_cache import NodeCache
from keepstep.launch.node.programs import controller_command

PLACE = Place(1, 6, 12, 2, "10.0.0.1", 29500)


def job_of(*words: str) -> Job:
    return job_from_command_line([*words, "--master-addr", "10.0.0.1", "train.py"], {})


def run_of(*words: str) -> ToldRun:
    return ToldRun(Path("run"), job_of(*words), children=False)


def told(job: Job) -> float:
    folder = Path("run")
    return parse(
        controller_command(job, folder, folder / "secret", Endpoint("10.0.0.1", 1))[3:]
    ).settings.shrink_s


def test_a_range_of_nodes_and_restarts_make_a_job_that_may_have_another_size(tmp_path: Path) -> None:
    assert not job_of("--nnodes", "2:4").elastic
    assert not job_of("--nnodes", "4", "--max-restarts", "1").elastic
    job = job_of("--nnodes", "2:4", "--max-restarts", "1")
    assert job.elastic
    assert (job.shrink_after_s, told(job)) == (30.0, 30.0)
    assert told(job_of("--nnodes", "2:4", "--max-restarts", "1", "--shrink-after", "0")) == 0.0
    with pytest.raises(UsageError, match="--shrink-after -1"):
        job_of("--nnodes", "2:4", "--shrink-after", "-1")


def test_without_watching_there_is_nobody_to_give_newcomers_the_state() -> None:
    job = job_of("--nnodes", "2:4", "--max-restarts", "1", "--no-watch")
    assert "--backups" not in controller_command(job, Path("run"), Path("secret"), Endpoint("10.0.0.1", 1))


class Caches(NodeCache):
    """Two ranks that seal a step at each look."""

    def __init__(self, alike: int) -> None:
        super().__init__(run_of("--nnodes", "2:4", "--max-restarts", "1"))
        self.step, self.until = 3, alike

    def newest(self, rank: int) -> Key | None:
        self.step += not rank
        return Key(0, self.step)

    def newest_alike(self, rank: int) -> Key | None:
        return Key(0, min(self.step - 1, self.until)) if self.until else None


def sealed(caching: NodeCache, *, alike: bool) -> int | None:
    return asyncio.run(caching.next_step((0, 1), lambda: False, alike=alike))


def test_a_step_that_all_have_alike_is_waited_for_and_not_for_ever() -> None:
    assert sealed(Caches(0), alike=False) == 7
    assert sealed(Caches(100), alike=True) == 4
    assert sealed(Caches(0), alike=True) == -1
    assert sealed(Caches(2), alike=True) == -1


def test_ranks_that_saved_nothing_or_all_the_same_go_on_in_any_job() -> None:
    assert NodeCache(run_of()).rigid(None) == ""
    assert Caches(100).rigid(PLACE) == ""
    assert Caches(0).rigid(PLACE).startswith("what rank 6 saves is not known to be the same on all ranks")


def test_workers_are_told_that_their_job_may_have_another_size() -> None:
    async def environment(*words: str) -> dict[str, str]:
        caching = NodeCache(run_of(*words))
        try:
            return caching.environment(PLACE)
        finally:
            caching.close()

    assert "KEEPSTEP_ELASTIC" in asyncio.run(environment("--nnodes", "1:2", "--max-restarts", "1"))
    assert "KEEPSTEP_ELASTIC" not in asyncio.run(environment("--nnodes", "2", "--max-restarts", "1"))
