"""New names are let in at a bounded rate; known ones always."""

from __future__ import annotations

from keepstep.view.named_series import NamedSeries


def test_so_many_at_once_and_so_many_a_day() -> None:
    series = NamedSeries(10)
    assert sum(series.admits((str(name),), 0.0) for name in range(100)) == 10
    assert series.refused == 90
    assert all(series.admits((str(name),), 0.0) for name in range(10))
    assert sum(series.admits((f"later {name}",), 43_200.0) for name in range(100)) == 5
    assert sum(series.admits((f"days later {name}",), 10 * 86_400.0) for name in range(100)) == 10


def test_a_clock_that_goes_back_lets_none_in() -> None:
    series = NamedSeries(1)
    assert series.admits(("a",), 100.0)
    assert not series.admits(("b",), 0.0)
    assert not series.admits(("b",), 100.0)


def test_those_that_are_not_asked_for_are_forgotten_first() -> None:
    series = NamedSeries(2)
    for day in range(10):
        series.admits((f"of day {day}",), day * 86_400.0)
        assert series.admits(("always",), day * 86_400.0)
    assert len(series._known) == 4
