"""What heartbeats tell for viewers: paths every ten seconds, and kept steps when they change."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import msgspec
import pytest

from keepstep.agent.for_viewers import ForViewers
from keepstep.agent.sensors.network import NetworkSensors
from keepstep.view.node_links import read_paths
from keepstep.wire.messages import Heartbeat, KeptSteps

PATHS = {("10.0.0.1", "10.0.0.2"): (1 << 20, 0.5)}


class Agent:
    def __init__(self, folder: Path) -> None:
        self.network, self.kept = NetworkSensors("n0", {}), KeptSteps()
        self.told = ForViewers(self.network, lambda: self.kept, folder)

    def beats(self, now_s: float) -> Heartbeat:
        return self.told.added(Heartbeat(0, 1, now_s, ()))


def test_paths_are_told_every_ten_seconds_and_written(tmp_path: Path) -> None:
    folder = tmp_path / "nodes" / "0"
    folder.mkdir(parents=True)
    agent = Agent(folder)
    assert agent.beats(100.0).paths == ()
    agent.network.sockets.rates.add(PATHS)
    assert agent.beats(109.0).paths == ()
    assert not (folder / "links.json").exists()
    (path,) = agent.beats(110.0).paths
    assert (path.source, path.target, path.bytes, path.busy_s) == ("10.0.0.1", "10.0.0.2", 1 << 20, 0.5)
    assert agent.beats(111.0).paths == ()
    assert read_paths(folder / "links.json") == (path,)
    written = json.loads((folder / "links.json").read_bytes())
    assert dict(zip(written["columns"], written["paths"][0], strict=True)) == {
        name: getattr(path, name) for name in path.__struct_fields__
    }


def test_kept_steps_are_told_when_they_change(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    assert agent.beats(0.0).kept == KeptSteps()  # what an earlier agent has told may not hold any more
    assert agent.beats(1.0).kept is None
    agent.kept = KeptSteps(7, 5)
    assert agent.beats(2.0).kept == KeptSteps(7, 5)
    assert agent.beats(3.0).kept is None
    agent.told.again()
    assert agent.beats(4.0).kept == KeptSteps(7, 5)


def test_a_full_disk_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent(tmp_path / "not there")
    with caplog.at_level(logging.WARNING):
        for now_s in (0.0, 10.0, 20.0):
            agent.network.sockets.rates.add(PATHS)
            agent.beats(now_s)
    assert caplog.text.count("cannot be written") == 1


def test_a_usual_heartbeat_grows_by_two_bytes() -> None:
    beat = Heartbeat(0, 1, 1.0, ())
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(beat))
    assert fields[-2:] == [[], None]
