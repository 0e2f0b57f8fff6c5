"""What workers learn of their node's cache, also when there is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.launch.local_runs import ToldRun

from keepstep.checkpoint.memory import cache_server
from keepstep.checkpoint.memory.cache import Cache
from keepstep.checkpoint.memory.cache_server import STORAGE_TROUBLE, claim
from keepstep.checkpoint.memory.slots import Key
from keepstep.core.errors import UsageError
from keepstep.launch.command.job import job_from_command_line
from keepstep.launch.command.placement import Place
from keepstep.launch.node import node_cache
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


UNLISTED = "/ck: cannot be listed: Not a directory"
WAITS = "waiting for step 24, 60 to be on storage /ck, at most 600 s (Ctrl-C: no longer)"
LOST = "step 24, 60 is not on storage /ck and is lost"


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeCache:
    """Steps 24 and 60 wait for storage; every wait is worth a line."""
    monkeypatch.setattr(node_cache, "_BRIEF_S", -1.0)
    monkeypatch.setattr(node_cache, "_POLL_S", 0.0)
    monkeypatch.setattr(Cache, "wanted", lambda _: steps(24, 60))
    job = job_from_command_line(["--checkpoint-dir", "/ck", "train.py"], {})
    return NodeCache(ToldRun(tmp_path, job, children=False))


def said(caching: NodeCache) -> list[str]:
    run = caching._run
    assert isinstance(run, ToldRun)
    return run.said


async def end(caching: NodeCache, looks: int = 3) -> str:
    """The end of a run that after so many looks waits no longer."""
    over: Iterator[bool] = iter([*[False] * looks, True])
    return await caching.stored(600.0, lambda: next(over), last=0)


@pytest.mark.parametrize("trouble", ["", UNLISTED])
def test_a_run_says_for_what_it_waits_and_what_is_lost_whatever_was_said_of_storage(
    trouble: str, stuck: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(stuck, "_take_folder", lambda _: None)
        stuck.environment(PLACE)
        if trouble:
            await asyncio.to_thread(claim, stuck.address, STORAGE_TROUBLE, trouble)
        assert await end(stuck) == LOST
        assert said(stuck) == [*filter(None, [trouble]), WAITS]
        assert await end(stuck, looks=0) == "", "that was said"
        late = await asyncio.to_thread(claim, stuck.address, STORAGE_TROUBLE, "training goes on")
        assert not late, "it does not go on any more"
        stuck.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"troubles": ["backups: none", UNLISTED, "another"]}, f": {UNLISTED}"),
        ({"troubles": ["backups: none"]}, ""),
        ({"troubles": [7]}, ""),
        ({"troubles": None}, ""),
        ([], ""),
    ],
)
def test_the_line_that_a_run_waits_says_what_is_in_the_way(
    content: object, why: str, stuck: NodeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(stuck, "_take_folder", lambda _: None)
        stuck.environment(Place(3, 3, 4, 4, "127.0.0.1", 29500))
        (tmp_path / "nodes" / "3").mkdir(parents=True)
        (tmp_path / "nodes" / "3" / "checkpoints.json").write_text(json.dumps(content))
        await end(stuck)
        assert said(stuck) == [WAITS + why]
        stuck.close()

    asyncio.run(main())
