"""Following a job: what the shipped controller tells a viewer, over real connections."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.unit.control.test_program import Node, controller, until

from keepstep import wire
from keepstep.core.errors import RunError
from keepstep.traces import Run
from keepstep.view.follower import Follower


def described(run: Path, port: int) -> Run:
    """The run as its launcher would have described it."""
    content = {"controller": f"127.0.0.1:{port}", "secret_file": str(run / "secret"), "started_unix_s": 5.0}
    (run / "run.json").write_text(json.dumps(content))
    return Run(run)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    wire.write_secret(tmp_path / "secret")
    return tmp_path


def test_a_job_is_followed(run: Path) -> None:
    """Its ranks, their nodes, an incident when it is new and never again, and what was declared."""

    async def play() -> None:
        with controller(run, "--layout", "dp2") as (process, port):
            follower = Follower(described(run, port))
            node = Node(port, wire.read_secret(run / "secret"))
            await until(lambda: node.got(wire.Placement))
            node.beat(32)
            node.slow()
            await until(lambda: (run / "incidents" / "0001.json").exists())
            seen = await asyncio.to_thread(follower.ask)
            assert (seen.status["state"], seen.status["newest_step"], seen.started_unix_s) == (
                "running",
                32,
                5.0,
            )
            assert [one["node"] for one in seen.status["nodes"]] == ["gpu-0"]
            assert (seen.ranks.rank.tolist(), seen.ranks.step.tolist()) == ([0, 1], [32, 32])
            assert [(one.number, one.kind) for one in seen.incidents] == [(1, "slow")]
            assert str(seen.layout) == "dp2"
            assert (await asyncio.to_thread(follower.ask)).incidents == []
            process.kill()
            process.wait()
            with pytest.raises(RunError, match="no answer from its controller"):
                await asyncio.to_thread(follower.ask)
        with controller(run, listen=f"127.0.0.1:{port}"):
            again = await asyncio.to_thread(follower.ask)
            assert [one.number for one in again.incidents] == [1]
            follower.close()
        await node.close()

    wire.run(play())
