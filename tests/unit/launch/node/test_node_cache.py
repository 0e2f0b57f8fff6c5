"""What workers learn of their node's cache, also when there is none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.launch.local_runs import ToldRun

from keepstep.checkpoint.memory import cache_server
from keepstep.checkpoint.memory.slots import Key
from keepstep.core.errors import UsageError
from keepstep.launch.command.job import job_from_command_line
from keepstep.launch.command.placement import Place
from keepstep.launch.node.node_cache import NodeCache, _Enough

PLACE = Place(0, 0, 1, 1, "127.0.0.1", 29500, incarnation=3)


def test_a_cache_that_cannot_be_made_is_told_to_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_from_command_line(["train.py"], {"KEEPSTEP_NODE_NAME": "gpu-7"})
    run = ToldRun(tmp_path, job, children=False)
    caching = NodeCache(run)

    def fails(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(cache_server, "CacheServer", fails)
        found = caching.environment(PLACE)
    why = "[Errno 24] Too many open files"
    assert found == {"KEEPSTEP_NO_CACHE": f"gpu-7 has no cache, none could be made: {why}"}
    assert run.said == [f"no checkpoints are kept in memory: {why}"]
    assert caching.address == ""
    caching.close()


def test_a_folder_for_checkpoints_is_used_by_one_run_at_a_time(tmp_path: Path) -> None:
    async def runs() -> None:
        flags = ["--checkpoint-dir", str(tmp_path / "checkpoints"), "train.py"]
        job = job_from_command_line(flags, {"KEEPSTEP_NODE_NAME": "gpu-7"})
        first, second = (NodeCache(ToldRun(tmp_path / name, job, children=False)) for name in ("a", "b"))
        begin = Place(0, 0, 1, 1, "127.0.0.1", 29500)
        assert "KEEPSTEP_CACHE" in first.environment(begin)
        assert "KEEPSTEP_CACHE" in first.environment(begin)  # the workers begin again
        with pytest.raises(UsageError, match=f"checkpoints is in use by the run {tmp_path / 'a'}"):
            second.environment(begin)
        assert "KEEPSTEP_CACHE" in second.environment(
            PLACE
        )  # a node that takes over from one that still ends
        first.close()
        assert "KEEPSTEP_CACHE" in second.environment(begin)
        second.close()

    asyncio.run(runs())


def steps(*numbers: int) -> list[Key]:
    return [Key(0, number) for number in numbers]


@pytest.mark.parametrize(
    ("newest", "wanted", "enough"),
    [
        ((99, 100), (99, 100), False),
        ((99, 100), (100,), False),  # the other nodes may have that, too
        ((99, 100), (99,), True),  # they are not behind
        ((99, 100), (), True),
        ((), (7,), False),
    ],
)
def test_of_the_newest_steps_of_a_node_one_that_all_have_is_enough(
    newest: tuple[int, ...], wanted: tuple[int, ...], enough: bool
) -> None:
    waiting = _Enough(steps(*newest), 0.0)
    assert not waiting.is_there(steps(*newest), 100.0) or not newest
    assert waiting.is_there(steps(*wanted), 101.0) == enough


def test_a_step_that_others_may_have_is_waited_for_as_long_as_one_before_it_took() -> None:
    waiting = _Enough(steps(99, 100), 0.0)
    assert not waiting.is_there(steps(100), 30.0)
    assert not waiting.is_there(steps(100), 89.0)
    assert waiting.is_there(steps(100), 90.0)
