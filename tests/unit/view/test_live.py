"""A run that lives, from its folder and from the shipped controller at once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.manual_clock import ManualClock
from tests.unit.control.test_program import Node, controller, until

from keepstep import wire
from keepstep.traces import Run
from keepstep.view.folder import Times
from keepstep.view.live import LiveSource
from keepstep.view.run_source import open_source


def describe(run: Path, port: int) -> None:
    content = {
        "id": "run", "controller": f"127.0.0.1:{port}", "secret_file": str(run / "secret"),
        "started_unix_s": 5.0, "world_size": 2,
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(content))


def write_iterations(run: Path, steps: range) -> None:
    (run / "nodes/0").mkdir(parents=True, exist_ok=True)
    with (run / "nodes/0/iterations.jsonl").open("a") as file:
        for step in steps:
            cells = {str(rank): {"t": 100.0 + step, "d": 0.5, "self": 0.4} for rank in range(2)}
            file.write(json.dumps({"step": step, "ranks": cells}) + "\n")


def test_history_comes_from_the_folder_and_news_from_the_controller(tmp_path: Path) -> None:
    async def play() -> None:
        wire.write_secret(tmp_path / "secret")
        write_iterations(tmp_path, range(30))
        clock = ManualClock()
        with controller(tmp_path, "--layout", "dp2") as (process, port):
            describe(tmp_path, port)
            assert isinstance(open_source(tmp_path), LiveSource)
            source = LiveSource(Run(tmp_path), Times(monotonic=clock))
            node = Node(port, wire.read_secret(tmp_path / "secret"))
            await until(lambda: node.got(wire.Placement))
            node.beat(32)
            node.slow()
            await until(lambda: (tmp_path / "incidents/0001.json").exists())
            found = await asyncio.to_thread(source.read_all)
            assert (found.state, found.newest_step, found.started_unix_s) == ("running", 32, 5.0)
            assert ([one.name for one in found.nodes], found.troubles) == (["gpu-0"], ())
            assert str(found.layout) == "dp2"
            assert [one.number for one in found.incidents] == [1]
            assert source.samples.first_steps.tolist() == list(range(33))
            write_iterations(tmp_path, range(30, 33))
            await asyncio.to_thread(source.refresh)
            assert (source.samples.tile().colours > 0).all()
            process.kill()
            process.wait()
            clock.advance(1.0)
            found = await asyncio.to_thread(source.refresh)
            assert len(found.troubles) == 1
            assert "the folder's status is shown" in found.troubles[0]
            assert [one.number for one in found.incidents] == [1]
        with controller(tmp_path, listen=f"127.0.0.1:{port}"):
            clock.advance(6.0)
            found = await asyncio.to_thread(source.refresh)
            assert found.troubles == ()
            source.close()
        (tmp_path / "end.json").write_text(json.dumps({"exit_code": 0, "reason": "finished"}))
        found = await asyncio.to_thread(source.refresh)
        assert (found.state, found.troubles) == ("ended", ())
        await node.close()

    wire.run(play())


def test_a_run_whose_secret_is_not_here_is_read_from_its_folder(tmp_path: Path) -> None:
    describe(tmp_path, 1)
    write_iterations(tmp_path, range(4))
    source = open_source(tmp_path)
    found = source.read_all()
    assert len(source.samples) == 4
    assert len(found.troubles) == 1
    assert "the folder's status is shown" in found.troubles[0]
