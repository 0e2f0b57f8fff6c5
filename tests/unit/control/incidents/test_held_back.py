"""Findings that are told only if they still hold after a while."""

from __future__ import annotations

import pytest

from keepstep.control.incidents.held_back import HeldBack
from keepstep.core.finding import Finding


def slow(rank: int = 0, onset: int = 100) -> Finding:
    return Finding("slow", rank, "n", 0.0, onset + 2, onset_step=onset)


def hang(stuck_s: float, rank: int = 0) -> Finding:
    return Finding("hang", rank, "n", 5.0, 40, stuck_s=stuck_s, limit_s=stuck_s)


def test_nothing_is_held_where_nobody_has_asked_for_it() -> None:
    held = HeldBack()
    assert not held.takes(slow(), 0.0, 10.0)
    assert not held.takes(hang(30.0), 0.0, 10.0)
    assert held.due(100, 1e9) == []


def test_slowness_comes_out_when_the_time_is_over_and_later_where_that_was_put_off() -> None:
    held = HeldBack()
    held.hold(20.0)
    assert held.takes(slow(0), 0.0, 10.0)
    assert held.takes(slow(1), 0.0, 11.0)
    held.hold(30.0)
    held.hold(25.0)
    assert held.due(100, 29.9) == []
    assert held.due(100, 30.0) == [slow(0), slow(1)]
    assert held.due(100, 40.0) == []


def test_one_with_an_onset_that_agents_have_forgotten_does_not() -> None:
    held = HeldBack()
    held.hold(20.0)
    held.takes(slow(onset=100), 0.0, 10.0)
    assert held.due(301, 20.0) == []


@pytest.mark.parametrize(("kind", "ended"), [("relief", "slow"), ("resumed", "hang")])
def test_what_is_over_does_not_come_out(kind: str, ended: str) -> None:
    held = HeldBack()
    held.hold(20.0)
    held.takes(slow(), 60.0, 10.0)
    held.takes(hang(30.0), 60.0, 10.0)
    assert not held.takes(Finding(kind, 0, "n", 0.0, 105, onset_step=104), 60.0, 12.0)
    assert [one.kind for one in held.due(100, 100.0)] == [kind for kind in ("slow", "hang") if kind != ended]


def test_a_standstill_comes_out_with_its_whole_length() -> None:
    held = HeldBack()
    assert held.takes(hang(30.0), 60.0, 100.0)
    assert held.due(40, 129.0) == []
    (found,) = held.due(40, 131.0)
    assert (found.stuck_s, found.time_s) == (61.0, 5.0)
    assert not held.takes(found, 60.0, 131.0)


def test_what_is_forgotten_does_not_come_out() -> None:
    held = HeldBack()
    held.hold(20.0)
    assert held.takes(slow(), 0.0, 10.0)
    held.forget()
    assert held.due(100, 30.0) == []
