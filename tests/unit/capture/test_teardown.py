"""The phase in which a rank winds up, as its calls and the end of its script record it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from keepstep import ring
from keepstep.capture.native import Here
from keepstep.capture.recorder import Recorder
from keepstep.capture.set_up import SetUp
from keepstep.capture.teardown import Teardown
from keepstep.core.events import Kind, Phase
from keepstep.ring import RingReader, RingWriter, create


class Stage:
    def __init__(self, descriptor: int) -> None:
        self.reader = RingReader(descriptor)
        self.recorder = Recorder(lambda: RingWriter(descriptor, rank=1, world_size=3))
        self.recorder.claim()
        self.teardown = Teardown(self.recorder)
        self.destroy = self.teardown.recorded(lambda group=None: group)

    def open_phases(self) -> list[int]:
        return self.reader.in_flight()["op"].tolist()


@pytest.fixture
def stage():
    descriptor = create(64)
    yield Stage(descriptor)
    os.close(descriptor)


def test_it_begins_when_the_default_group_is_destroyed_and_lasts(stage: Stage) -> None:
    stage.destroy()
    stage.destroy(group=None)
    assert stage.open_phases() == [Phase.TEARDOWN]


def test_another_group_that_is_destroyed_is_no_end(stage: Stage) -> None:
    assert stage.destroy("another") == "another"
    assert stage.open_phases() == []


def test_it_is_over_when_groups_are_set_up_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    here = Here(lambda name: 0, lambda *_: 0)
    set_up = SetUp(stage.recorder, here, stage.teardown.over)._recorded(lambda: "made")
    stage.destroy()
    assert set_up() == "made"
    assert stage.open_phases() == []
    stage.destroy()
    assert stage.open_phases() == [Phase.TEARDOWN]


def test_it_is_over_when_torch_refuses(stage: Stage) -> None:
    def refuse(_: Any) -> None:
        raise ValueError("no such group")

    with pytest.raises(ValueError, match="no such group"):
        stage.teardown.recorded(refuse)()
    assert stage.open_phases() == []


def test_a_rank_with_an_exception_on_its_way_has_not_come_to_its_end(stage: Stage) -> None:
    def fail() -> None:
        try:
            raise RuntimeError("lost")
        finally:
            stage.destroy()

    with pytest.raises(RuntimeError, match="lost"):
        fail()
    assert stage.open_phases() == []


SCRIPT = """
import atexit, torch
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
optimizer.step()
atexit.register(print, "last")
{end}
"""


@pytest.mark.parametrize(("end", "winds_up"), [("", 1), ("raise SystemExit(0)", 1), ("raise ValueError", 0)])
def test_the_end_of_a_script_is_its_teardown(end: str, winds_up: int, tmp_path: Path) -> None:
    descriptor = create(256)
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("{end}", end))
    names = {"KEEPSTEP_RUN_DIR": str(tmp_path), "KEEPSTEP_RING": f"/proc/{os.getpid()}/fd/{descriptor}"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP")}
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, env=clean | names, capture_output=True, text=True, timeout=120, check=False
    )
    assert "last" in done.stdout, done.stderr
    rows = ring.RingReader(descriptor).snapshot()
    os.close(descriptor)
    phases = rows["op"][rows["kind"] == Kind.PHASE].tolist()
    assert phases.count(Phase.TEARDOWN) == winds_up, done.stderr
