"""A run whose folder is not here: status, report, validation and orders by the address of its controller."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.control.test_program import Node, controller, until

from keepstep import wire
from keepstep.cli import ctl, report, status, top
from keepstep.core.errors import RunError, UsageError
from keepstep.traces import open_run
from keepstep.view.elsewhere import fetch_run, is_elsewhere
from keepstep.view.live import LiveSource


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    wire.write_secret(folder / "secret")
    monkeypatch.setenv("KEEPSTEP_SECRET_FILE", str(folder / "secret"))
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    return folder


@pytest.mark.parametrize("name", ["a:1", "train-0.train:29500", "x y@[fe80::1]:2950", "b@c@127.0.0.1:99999"])
def test_addresses(name: str, run: Path) -> None:
    assert is_elsewhere(name)


@pytest.mark.parametrize(
    "name", ["train", "runs/a:b/c:1", "a:", ":1", "a:123456", "http://a:1", "a:1x", "::1"]
)
def test_what_is_none(name: str, run: Path) -> None:
    assert not is_elsewhere(name)


def test_a_folder_of_this_name_is_meant_first(run: Path) -> None:
    Path("a:1").mkdir()
    Path("a:1/run.json").touch()
    assert not is_elsewhere("a:1")


def test_status_report_and_orders_over_the_wire(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def play() -> None:
        with controller(run, "--layout", "dp2") as (_, port):
            name = f"127.0.0.1:{port}"
            node = Node(port, wire.read_secret(run / "secret"))
            await until(lambda: node.got(wire.Placement))
            node.beat(32)
            await asyncio.to_thread(report.main, [name])
            assert "healthy: step 32, no incident" in capsys.readouterr().out
            node.slow()
            await until(lambda: (run / "incidents" / "0001.json").exists())
            assert await asyncio.to_thread(status.main, [name]) == 0
            rows = [line.split() for line in capsys.readouterr().out.splitlines() if " gpu-0 " in line]
            assert [(row[0], row[3]) for row in rows] == [("0-1", "32")]
            assert await asyncio.to_thread(report.main, [name]) == 1
            assert f"keepstep report {name} 0001" in capsys.readouterr().out
            assert await asyncio.to_thread(ctl.main, [name, "thresholds"]) == 0
            assert "slow-ratio" in capsys.readouterr().out
            source = LiveSource(open_run(name))
            seen = await asyncio.to_thread(source.refresh)
            assert (seen.name, seen.newest_step, seen.troubles) == (name, 32, ())
            assert [one.number for one in seen.incidents] == [1]
            assert str(seen.layout) == "dp2"
            source.close()
        await node.close()

    wire.run(play())


def test_another_id_and_nobody_there(run: Path) -> None:
    async def play() -> None:
        with (
            controller(run) as (_, port),
            pytest.raises(RunError, match=f"another job is there.* as ID@127.0.0.1:{port}"),
        ):
            await asyncio.to_thread(fetch_run, f"other@127.0.0.1:{port}")
        with pytest.raises(
            RunError, match=f"127.0.0.1:{port}: no answer from its controller: Connection refused"
        ):
            await asyncio.to_thread(status.main, [f"127.0.0.1:{port}"])

    wire.run(play())


def test_without_a_secret_it_is_said_how_to_name_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEEPSTEP_SECRET_FILE")
    with pytest.raises(UsageError, match="set KEEPSTEP_SECRET_FILE to its file"):
        status.main(["train-0:29500"])
    with pytest.raises(RunError, match="top needs a terminal"):
        top.main(["train-0:29500"])
