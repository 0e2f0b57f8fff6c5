"""What is printed of slowdowns that come and go."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.incidents.talk import Talk
from keepstep.core.incident import Culprit, Incident

SLOW = Incident(1, "slow", 10, 13, None, 2.0, (), (), (), ())
UP_S = 1e6  # the controller's clock counts from the host's start
SURE = (Culprit(3, None, "gpu-1", "forward", 2.0, "high", "compute"),)


def number(count: int, incident: Incident = SLOW) -> Incident:
    return replace(incident, number=count)


def over(count: int, incident: Incident = SLOW) -> Incident:
    return replace(incident, number=count, status="relieved")


def test_the_first_slowdown_is_told_and_then_one_after_growing_pauses() -> None:
    talk = Talk()
    told = [
        second
        for second in range(1000)
        if talk.tells(number(second), "verdict", UP_S + second)
        + talk.tells(over(second), "closes", UP_S + second)
    ]
    assert told == [0, 120, 480]
    assert talk.take_untold() == 997
    assert talk.take_untold() == 0


def test_after_a_quiet_time_it_begins_anew() -> None:
    talk = Talk()
    assert talk.tells(number(1), "verdict", 0.0)
    assert talk.tells(number(2), "verdict", 1000.0)
    assert not talk.tells(number(3), "verdict", 1119.0)
    assert talk.tells(number(4), "verdict", 1121.0)


def test_who_is_named_for_sure_is_told_several_times_and_apart_from_others() -> None:
    talk = Talk()
    assert talk.tells(number(1), "verdict", UP_S)
    sure = replace(SLOW, culprits=SURE)
    said = [talk.tells(number(n, sure), "verdict", UP_S + n) for n in range(2, 6)]
    assert said == ["verdict"] * 3 + [""]
    other = replace(sure, culprits=(replace(SURE[0], rank=4),))
    assert talk.tells(number(9, other), "verdict", UP_S + 9)


def test_of_what_was_not_told_neither_news_nor_the_end_is() -> None:
    talk = Talk()
    talk.tells(number(1), "verdict", 0.0)
    assert talk.tells(number(2), "verdict", 1.0) == ""
    assert talk.tells(number(2), "sharper", 2.0) == ""
    assert talk.tells(over(2), "closes", 3.0) == ""
    assert talk.tells(over(1), "closes", 4.0) == "closes"


def test_moments_that_end_without_a_verdict_are_bounded_too() -> None:
    talk = Talk()
    assert [talk.tells(over(n), "closes", float(n)) for n in range(4)] == ["closes", "", "", ""]
    assert talk.take_untold() == 3


def test_it_is_told_once_it_lasts_or_names_somebody_for_sure_or_something_is_done() -> None:
    talk = Talk()
    talk.tells(number(1), "verdict", 0.0)
    for count in (2, 3, 4, 5):
        assert talk.tells(number(count), "verdict", 1.0) == ""
    assert not talk.is_overdue(number(2), 30.0)
    assert talk.tells(number(2), "", 30.0) == ""
    assert talk.is_overdue(number(2), 31.0)
    assert talk.tells(number(2), "", 31.0) == "verdict"
    assert not talk.is_overdue(number(2), 99.0)
    assert talk.tells(over(2), "closes", 40.0) == "closes"
    assert talk.tells(replace(number(3), culprits=SURE), "sharper", 2.0) == "verdict"
    assert talk.tells(number(4), "acts", 2.0) == "verdict", "it lists what is done"
    assert talk.tells(number(4), "sharper", 3.0) == "sharper"
    assert talk.tells(over(5), "closes", 31.0) == "closes", "it had lasted"
    assert talk.take_untold() == 0


def test_what_an_earlier_controller_told_goes_on_being_told() -> None:
    talk = Talk()
    talk.knows(number(1))
    assert talk.tells(number(1), "", 99.0) == ""
    assert talk.tells(over(1), "closes", 99.0) == "closes"


@given(st.lists(st.tuples(st.sampled_from(("hang", "crash", "desync")), st.floats(0, 100)), max_size=50))
def test_hangs_and_deaths_are_always_told(happened: list[tuple[str, float]]) -> None:
    talk, now_s = Talk(), 0.0
    for count, (kind, pause_s) in enumerate(happened):
        now_s += pause_s
        incident = replace(number(count), kind=kind)
        assert all(talk.tells(incident, say, now_s) == say for say in ("verdict", "sharper", "closes"))
