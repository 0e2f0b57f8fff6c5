"""Viewers: one question each, answered in turn and within their share, and none that costs more than itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from keepstep import wire
from keepstep.control.following import Viewers
from keepstep.wire.messages.looking import MOST_VIEWERS


@dataclass
class Viewer:
    """A connection that is written down instead of sent."""

    number: int
    unsent_bytes: int = 0
    peer: str = "127.0.0.1:9"
    heard: list[wire.Message] = field(default_factory=list[wire.Message])
    ended: str = ""

    def send(self, message: wire.Message) -> None:
        self.heard.append(message)

    def close(self, reason: str = "") -> None:
        self.ended = reason

    def refuse(self, violation: wire.Violation) -> None:
        self.ended = violation.reason


class Hall:
    """Viewers under a clock of their own; each answer takes ``cost_s`` of CPU."""

    def __init__(self, cost_s: float = 0.003) -> None:
        self.now_s, self.spent_s, self.cost_s = 100.0, 0.0, cost_s
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.asked: list[wire.Message] = []
        self.fails = False
        self.viewers = Viewers(
            self.answer,
            lambda seconds, call: self.timers.append((self.now_s + seconds, call)),
            clock=lambda: self.now_s,
            spent=lambda: self.spent_s,
        )

    def answer(self, question: wire.Message) -> wire.Message:
        if self.fails:
            raise RuntimeError("a fault of keepstep")
        self.spent_s += self.cost_s
        self.asked.append(question)
        return wire.Followed(self.now_s)

    def comes(self, number: int) -> Viewer:
        viewer = Viewer(number)
        self.viewers.opened(cast(Any, viewer))
        return viewer

    def says(self, viewer: Viewer, message: wire.Message) -> None:
        self.viewers.message(cast(Any, viewer), message)

    def goes(self, viewer: Viewer) -> None:
        self.viewers.closed(cast(Any, viewer))

    def passes(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while due := [one for one in self.timers if one[0] <= until_s]:
            first = min(due, key=lambda one: one[0])
            self.timers.remove(first)
            self.now_s = max(self.now_s, first[0])
            first[1]()
        self.now_s = until_s


def test_answers_take_a_fortieth_of_a_core() -> None:
    hall = Hall(cost_s=0.003)
    viewers = [hall.comes(number) for number in range(4)]
    for _ in range(2000):  # 200 seconds in which all ask all the time
        for viewer in viewers:
            hall.says(viewer, wire.Follow())
        hall.passes(0.1)
    assert 5.0 <= hall.spent_s <= 5.2
    heard = [len(viewer.heard) for viewer in viewers]
    assert max(heard) - min(heard) <= 1  # by turns


def test_all_pages_of_a_large_job_come_at_once_to_who_asks_rarely() -> None:
    hall = Hall(cost_s=0.007)
    viewer = hall.comes(1)
    for _ in range(3):
        before = len(viewer.heard)
        for page in range(16):
            hall.says(viewer, wire.Follow(page))
        assert len(viewer.heard) == before + 16
        hall.passes(5.0)


def test_one_question_waits_however_many_are_asked() -> None:
    hall = Hall(cost_s=1.0)
    first, second = hall.comes(1), hall.comes(2)
    hall.says(first, wire.Follow())
    for page in range(50):
        hall.says(second, wire.Follow(page))
    hall.passes(1000.0)
    assert hall.asked == [wire.Follow(), wire.Follow(49)]


def test_more_than_there_may_be_are_refused_in_a_line() -> None:
    hall = Hall()
    viewers = [hall.comes(number) for number in range(MOST_VIEWERS)]
    late = hall.comes(99)
    assert late.ended
    assert isinstance(late.heard[0], wire.Refused)
    hall.says(late, wire.Follow())
    assert hall.asked == []
    hall.goes(viewers[3])
    hall.says(hall.comes(100), wire.Follow())
    assert hall.asked == [wire.Follow()]


def test_who_does_not_read_is_let_go() -> None:
    hall = Hall()
    viewer, other = hall.comes(1), hall.comes(2)
    viewer.unsent_bytes = 10
    hall.says(viewer, wire.Follow())  # it asks before it has read
    assert (viewer.ended, viewer.heard) == ("slow-reader", [])
    other.send = lambda message: setattr(other, "unsent_bytes", 10)  # type: ignore[method-assign]
    hall.says(other, wire.Follow())
    hall.passes(29.0)
    assert other.ended == ""
    hall.passes(2.0)
    assert other.ended == "slow-reader"


def test_a_slow_reader_that_reads_stays() -> None:
    hall = Hall()
    viewer = hall.comes(1)
    viewer.send = lambda message: setattr(viewer, "unsent_bytes", 10)  # type: ignore[method-assign]
    hall.says(viewer, wire.Follow())
    hall.passes(20.0)
    viewer.unsent_bytes = 0
    hall.says(viewer, wire.Follow())  # and is at the next one when half a minute is over
    hall.passes(15.0)
    assert viewer.ended == ""


def test_who_has_gone_gets_no_answer() -> None:
    hall = Hall(cost_s=1.0)
    first, second = hall.comes(1), hall.comes(2)
    hall.says(first, wire.Follow())
    hall.says(second, wire.Follow())
    hall.goes(second)
    hall.passes(100.0)
    assert len(hall.asked) == 1


def test_an_error_of_ours_ends_one_connection(caplog: pytest.LogCaptureFixture) -> None:
    hall = Hall()
    viewer, other = hall.comes(1), hall.comes(2)
    hall.fails = True
    hall.says(viewer, wire.Follow())
    assert viewer.ended == "an error of keepstep itself"
    hall.fails = False
    hall.passes(1.0)
    hall.says(other, wire.Follow())
    assert len(other.heard) == 1
    assert "is not answered" in caplog.text


def test_what_is_no_question_is_ignored() -> None:
    hall = Hall()
    viewer = hall.comes(1)
    hall.says(viewer, wire.Hello("viewer", "n", -1, 1))
    hall.says(viewer, wire.Bye("done"))
    assert hall.asked == []
