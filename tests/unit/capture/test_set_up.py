"""Calls that set up process groups, as a rank records them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from keepstep.capture.native import Here
from keepstep.capture.recorder import Recorder
from keepstep.capture.set_up import SetUp
from keepstep.core.events import SET_UP, Flag, Kind, Op
from keepstep.ring import RingReader, RingWriter, create


class Stage:
    """A recorder with a real ring, and the recorded forms of functions."""

    def __init__(self, descriptor: int) -> None:
        self.reader = RingReader(descriptor)
        self.recorder = Recorder(lambda: RingWriter(descriptor, rank=1, world_size=3))
        self.set_up = SetUp(self.recorder, Here(lambda name: 0, lambda *_: 0))

    def recorded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self.set_up._recorded(original)

    def calls(self) -> list[tuple[int, int, int, bool]]:
        rows = self.reader.snapshot()
        return [
            (int(row["kind"]), int(row["op"]), int(row["seq"]), bool(row["flags"] & Flag.FAILED))
            for row in rows
        ]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    descriptor = create(64)
    yield Stage(descriptor)
    os.close(descriptor)


def set_up(
    backend: Any = None,
    init_method: Any = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    use_local_synchronization: bool = False,
) -> str:
    """With arguments as torch's functions have them."""
    return "made"


BARRIER = int(Kind.COLLECTIVE), int(Op.BARRIER)


def test_each_call_of_all_ranks_is_a_barrier_of_all_ranks(stage: Stage) -> None:
    inner = stage.recorded(lambda: "made")
    outer = stage.recorded(lambda backend, world_size, rank: inner())
    assert outer("gloo", world_size=3, rank=1) == "made"
    assert inner() == "made"
    assert stage.calls() == [(*BARRIER, 1, False), (*BARRIER, 2, False)]  # a call inside of another is none
    (group,) = stage.reader.groups()
    assert (group.name, group.members) == (SET_UP, (0, 1, 2))


def test_a_call_that_fails_is_recorded_as_failed(stage: Stage) -> None:
    def fail() -> None:
        raise TimeoutError("nobody came")

    with pytest.raises(TimeoutError, match="nobody came"):
        stage.recorded(fail)()
    assert stage.calls() == [(*BARRIER, 1, True)]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"use_local_synchronization": True}),
        (([0, 1], None, None, None, None, True), {}),
        ((), {"world_size": 2, "rank": 0}),
        (("gloo", None, None, 2, 0), {}),
    ],
)
def test_a_call_of_some_ranks_is_not_recorded(stage: Stage, args: Any, kwargs: Any) -> None:
    assert stage.recorded(set_up)(*args, **kwargs) == "made"
    assert stage.recorder.writer is None or stage.calls() == []


def test_a_script_that_starts_ranks_itself_is_left_alone_and_told_once(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    make = stage.recorded(set_up)
    assert make("gloo", None, None, 8, 3) == "made"
    assert capsys.readouterr().err == ""
    assert stage.recorder.given_up
    stage.recorder.given_up = False
    assert make(world_size=8, rank=0) == "made"
    assert "the script starts ranks itself (8, where keepstep run started 3)" in capsys.readouterr().err
    assert not stage.recorder.claim()
