"""A tracker's process: one that hangs or crashes disturbs nobody, and is begun again."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import pytest
from tests.unit.view.notify.told_runs import START_S, seen, slow

from keepstep.view.notify.pace_series import Pace, PacePoint
from keepstep.view.notify.tracker import TrackerOptions, TrackerOrder
from keepstep.view.notify.tracker_process import TrackerProcess

ODD = Path(__file__).with_name("odd_tracker.py")


def point(step: int) -> TrackerOrder:
    return TrackerOrder(point=PacePoint(step, START_S + step, 0.5, 0.4, 0.0, 0, None))


def process(path: Path, how: str, lines: list[str], stuck_s: float = 60.0) -> TrackerProcess:
    command = (sys.executable, str(ODD), str(path), how)
    return TrackerProcess(TrackerOptions("mlflow", "r"), lines.append, command=command, stuck_s=stuck_s)


def recorded(path: Path) -> list[int]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    orders = [msgspec.json.decode(line, type=TrackerOrder) for line in lines]
    return [order.point.step for order in orders if order.point is not None]


def pump(one: TrackerProcess) -> None:
    while one.waits:
        one.pump(0.05)


def test_orders_are_recorded_in_their_order(tmp_path: Path) -> None:
    lines: list[str] = []
    one = process(tmp_path / "got", "good", lines)
    for step in range(500):
        one.record(point(step))
    pump(one)
    one.close(20.0)
    assert recorded(tmp_path / "got") == list(range(500))
    assert lines == []


def test_one_that_crashes_is_begun_again(tmp_path: Path) -> None:
    lines: list[str] = []
    one = process(tmp_path / "got", "crash-once", lines)
    for step in range(5):
        one.record(point(step))
    pump(one)
    one.close(20.0)
    assert recorded(tmp_path / "got") == list(range(5)), "nothing is lost"
    assert lines == ["notify mlflow: ended with exit code 7: RuntimeError: it broke  [31m"]


def test_one_that_crashes_again_and_again_is_given_up(tmp_path: Path) -> None:
    lines: list[str] = []
    one = process(tmp_path / "got", "crash", lines)
    one.record(point(1))
    pump(one)
    assert one.is_given_up
    assert len(lines) == 2, "the same is not said twice"
    assert "given up after 4 starts" in lines[1]
    one.record(point(2))
    assert not one.waits
    one.close(1.0)


def test_one_that_hangs_is_ended_and_begun_again(tmp_path: Path) -> None:
    lines: list[str] = []
    one = process(tmp_path / "got", "hang-once", lines, stuck_s=0.3)
    for step in range(5):
        one.record(point(step))
    pump(one)
    one.close(20.0)
    assert recorded(tmp_path / "got") == list(range(5))
    assert lines == ["notify mlflow: gave no answer for 0.3 s"]


def test_while_it_hangs_nobody_waits_and_the_newest_is_kept(tmp_path: Path) -> None:
    lines: list[str] = []
    one = process(tmp_path / "got", "hang", lines)
    for step in range(10_000):
        one.record(point(step))
        if step % 1000 == 0:
            one.pump(0.0)
    for _ in range(100):
        one.pump(0.0)
    assert 2000 <= len(one._queue) + len(one._unanswered) < 6000
    began_s = time.monotonic()
    one.close(0.2)
    assert time.monotonic() - began_s < 30, "it is killed, not waited for"


def test_what_a_tracker_refuses_is_said_once(tmp_path: Path) -> None:
    lines: list[str] = []
    one = process(tmp_path / "got", "error", lines)
    for step in range(5):
        one.record(point(step))
    pump(one)
    one.close(20.0)
    assert lines == ["notify mlflow: RuntimeError: quota"]


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    lines: list[str] = []
    one = TrackerProcess(TrackerOptions("mlflow", "r"), lines.append, command=(str(tmp_path / "none"),))
    one.record(point(1))
    pump(one)
    assert lines[0] == "notify mlflow: cannot be started: No such file or directory"


@pytest.mark.parametrize(
    ("snapshot", "lost"),
    [
        (seen(), 0.0),
        (seen(slow(1, 3, job_slowdown=2.0), slow(2, 1, job_slowdown=1.25)), 0.5),
        (seen(slow(1, 3, job_slowdown=None)), 0.0),
        (seen(slow(1, 3, kind="hang", job_slowdown=None)), 1.0),
        (seen(state="recovering"), 1.0),
    ],
)
def test_the_share_that_is_being_lost(snapshot: object, lost: float) -> None:
    found = Pace().point(snapshot)  # type: ignore[arg-type]
    assert found is not None
    assert found.lost_share == lost


def test_a_point_for_each_step_and_change() -> None:
    pace = Pace()
    steps = [
        pace.point(one)
        for one in (seen(newest_step=-1), seen(), seen(), seen(slow(1, 3)), seen(slow(1, 3), newest_step=31))
    ]
    assert [one and (one.step, one.open_incidents) for one in steps] == [
        None,
        (30, 0),
        None,
        (30, 1),
        (31, 1),
    ]


def test_no_process_is_begun_before_there_is_something_to_record(tmp_path: Path) -> None:
    """A server that another one's lock keeps from telling makes no run in a tracker."""
    one = process(tmp_path / "got", "good", [])
    one.pump(0.0)
    one.close(1.0)
    assert not (tmp_path / "got.begun").exists()
