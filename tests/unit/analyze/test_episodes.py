from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from keepstep.analyze._episodes import slow_episodes

FIRST = ((40.0, 1.1), (40.0, 5.0, 3.0, 1.5, 1.0), ())
"""Ratios of a job's first iterations to the usual ones."""


def times(
    count: int,
    slow: Sequence[tuple[int, int, float]],
    noise: float = 0.01,
    seed: int = 0,
    first: Sequence[float] = (),
) -> list[float]:
    """Seconds of ``count`` iterations, numbered from 1; ``slow``: first, first healthy one after it, and ratio."""
    chance = random.Random(seed)
    found = [2 * chance.gauss(1, noise) for _ in range(count)]
    for begin, end, ratio in slow:
        found[begin - 1 : end - 1] = [one * ratio for one in found[begin - 1 : end - 1]]
    return [*(2 * ratio for ratio in first), *found[len(first) :]]


def episodes(seconds: Sequence[float], warm_up: int = 5) -> list[tuple[int | None, int | None]]:
    found = slow_episodes(seconds, range(1, len(seconds) + 1), "a series", warm_up)
    return [(one.onset_step, one.relief_step) for one in found]


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("ratio", [1.3, 2.0])
@pytest.mark.parametrize("onset", [9, 12, 15, 20])
def test_a_slowdown_among_the_first_iterations_is_found(
    onset: int, ratio: float, first: Sequence[float]
) -> None:
    relieved = times(200, [(onset, onset + 40, ratio)], seed=onset, first=first)
    assert episodes(relieved) == [(onset, onset + 40)]
    lasting = times(150, [(onset, 151, ratio)], seed=onset, first=first)
    assert episodes(lasting) == [(onset, None)]


def test_a_slowdown_among_the_first_lines_of_means_is_found() -> None:
    assert episodes(times(60, [(8, 30, 1.5)]), warm_up=1) == [(8, 30)]


def test_slow_first_iterations_are_no_slowdown() -> None:
    for first in (
        *FIRST,
        (30.0, 1.0, 1.0, 1.0, 1.4, 1.2, 1.1),
        (9.0, 4.0, 2.0, 1.8, 1.6, 1.4, 1.3, 1.2, 1.1),
    ):
        assert episodes(times(120, [], first=first)) == []


@pytest.mark.parametrize("noise", [0.01, 0.04, 0.1])
def test_noise_is_no_slowdown(noise: float) -> None:
    for seed in range(8):
        assert episodes(times(150, [], noise, seed)) == []


@pytest.mark.parametrize(("much", "less"), [(2.3, 1.3), (1.8, 1.2), (3.0, 1.15), (2.0, 1.6)])
def test_a_job_that_is_still_slow_has_no_relief(much: float, less: float) -> None:
    for seed in range(3):
        told = episodes(times(300, [(100, 150, much), (150, 220, less)], seed=seed))
        assert told in ([(100, 220)], [(100, 150), (150, 220)])
    lasting = times(200, [(100, 150, 2.3), (150, 201, 1.3)])
    one, other = slow_episodes(lasting, range(1, 201), "a series")
    assert (one.relief_step, other.onset_step, other.status) == (150, 150, "open")
    assert other.iteration_before_s == one.iteration_before_s
    assert other.job_slowdown == pytest.approx(1.3, rel=0.02)


@pytest.mark.parametrize("noise", [0.004, 0.015])
def test_a_slowdown_of_ten_percent_has_its_onset_and_relief(noise: float) -> None:
    for seed in range(6):
        ((onset, relief),) = episodes(times(300, [(90, 170, 1.1)], noise, seed))
        assert onset is not None
        assert abs(onset - 90) <= 3
        assert relief is not None
        assert abs(relief - 170) <= 3


@pytest.mark.parametrize("ratio", [1.5, 1.8])
def test_a_slowdown_in_every_second_iteration_is_one(ratio: float) -> None:
    for seed in range(4):
        alternating = [(n, n + 1, ratio) for n in range(100, 200, 2)]
        ((onset, relief),) = episodes(times(300, alternating, seed=seed))
        assert onset is not None
        assert abs(onset - 100) <= 4
        assert relief is not None
        assert abs(relief - 200) <= 4


def test_small_shifts_that_add_up_are_a_slowdown() -> None:
    (told,) = episodes(times(400, [(100, 401, 1.06), (200, 401, 1.06)], 0.004))
    assert told == (200, None)
