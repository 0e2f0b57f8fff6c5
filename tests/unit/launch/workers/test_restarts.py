from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.alone import alone
from tests.unit.launch.command.test_job import job
from tests.unit.launch.local_runs import ToldRun

from keepstep.launch.command.placement import Place
from keepstep.launch.workers import restarts as module


def test_new_standbys_are_warmed_only_while_a_restart_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WARM_AFTER_S", 0.0)

    async def main() -> None:
        warmed: list[int] = []

        def forget(_: object) -> None: ...

        restarts = module.Restarts(
            ToldRun(tmp_path, job("--max-restarts", "1", "train.py")),
            os.environ,
            recovered=forget,
            raised=forget,
        )
        for incarnation in (0, 1):
            monkeypatch.setattr(
                restarts.standbys, "warm", lambda plans, which=incarnation: warmed.append(which)
            )
            restarts.started((), Place(0, 0, 1, 1, "127.0.0.1", 4711, incarnation))
            await asyncio.sleep(0.05)
        restarts.end()
        assert warmed == [0]

    alone(main)


def test_a_restart_that_can_wait_waits_for_warm_standbys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        restarts = module.Restarts(
            ToldRun(tmp_path, job("--max-restarts", "1", "train.py")),
            os.environ,
            recovered=lambda _: None,
            raised=lambda _: None,
        )
        restarts.started((), Place(0, 0, 1, 1, "127.0.0.1", 4711, 0))

        async def waits(*, over: bool = False, ready: bool = True) -> bool:
            try:
                await asyncio.wait_for(restarts.warmed(lambda: ready, lambda: over), 0.3)
            except asyncio.TimeoutError:
                return True
            return False

        assert await waits(), "not all have made a step: nothing is warmed yet"
        assert not await waits(over=True)
        restarts._warm()
        assert not await waits(), "there is nothing to be warmed"
        assert await waits(ready=False)
        monkeypatch.setattr(module, "_WARMED_S", 0.1)
        restarts.started((), Place(0, 0, 1, 1, "127.0.0.1", 4711, 0))
        assert not await waits(), "not for ever"
        restarts.end()

    alone(main)


def test_with_one_port_for_all_incarnations_no_process_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        for port in ("0", "29511"):
            given = job("--in-place", "--max-restarts", "1", "--master-port", port, "train.py")
            run = ToldRun(tmp_path, given)
            restarts = module.Restarts(run, os.environ, recovered=lambda _: None, raised=lambda _: None)
            assert (restarts.survivors is None) == (port != "0")
            restarts.end()
        (line,) = run.said
        assert "--master-port" in line

    alone(main)
