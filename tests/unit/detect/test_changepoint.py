from __future__ import annotations

import math

import numpy as np
import pytest

from keepstep.detect import ChangePoint, ChangePointDetector, change_points


def noisy(levels: list[tuple[float, int]], cov: float = 0.02, seed: int = 1) -> list[float]:
    """Iteration times around each (level in seconds, number of iterations) in turn."""
    rng = np.random.default_rng(seed)
    return [level * (1 + cov * rng.standard_normal()) for level, count in levels for _ in range(count)]


def found_in(series: list[float], **options: float) -> list[ChangePoint]:
    return change_points(series, ChangePointDetector(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [1.14, 1.3, 2.0, 4.0])
def test_onset_and_relief_are_reported_once_each_within_three_iterations(factor: float) -> None:
    onset, relief = found_in(noisy([(0.7, 80), (0.7 * factor, 40), (0.7, 40)]))
    assert (onset.kind, relief.kind) == ("onset", "relief")
    assert abs(onset.index - 80) <= 1
    assert abs(relief.index - 120) <= 1
    assert 2 <= onset.detected_at - 80 <= 3
    assert 2 <= relief.detected_at - 120 <= 3
    assert onset.before == pytest.approx(0.7, rel=0.02)
    assert onset.after == pytest.approx(0.7 * factor, rel=0.05)
    assert onset.ratio == pytest.approx(onset.after / onset.before)
    assert 0.5 < onset.confidence <= 1


def test_a_short_episode_early_in_the_job_is_found() -> None:
    onset, relief = found_in(noisy([(0.5, 30), (1.0, 15), (0.5, 20)]))
    assert (onset.index, relief.index) == (30, 45)


@pytest.mark.parametrize("seed", range(8))
def test_what_follows_a_slowdown_that_was_soon_treated_is_found_as_early(seed: int) -> None:
    """After a few slow iterations the level is taken for a wrong one and put right: so is the noise around it."""
    found = found_in(noisy([(0.32, 60), (0.91, 5), (0.37, 35), (0.51, 40)], cov=0.05, seed=seed))
    (onset,) = [one for one in found if one.index > 90]
    assert (onset.kind, onset.index) == ("onset", 100)
    assert onset.detected_at <= 103


@pytest.mark.parametrize("healthy", range(3, 12))
def test_an_onset_among_the_first_iterations_is_not_taken_for_noise(healthy: int) -> None:
    """It comes before the noise is known, and is not told; what follows is found as early as ever."""
    series = noisy([(0.3, healthy), (0.5, 14), (0.33, 60), (0.5, 20)], cov=0.04, seed=healthy)
    last = found_in(series, warmup=0)[-1]
    assert (last.kind, last.index) == ("onset", healthy + 74)
    assert last.detected_at <= healthy + 77


@pytest.mark.parametrize("seed", [5, 8, 10, 14, 22, 29, 37])
def test_slowdowns_that_are_soon_treated_leave_the_noise_as_it_is(seed: int) -> None:
    """One after the other: none is missed for noise that is thought too wide, nothing else told for too narrow."""
    rng = np.random.default_rng(seed)
    series, last = np.empty(1200), 0.0
    for step in range(1200):
        last = 0.4 * last + rng.normal(0, 0.04)
        series[step] = 1 + last
    onsets = range(100, 1100, 120)
    for onset in onsets:
        times, treated = rng.choice([1.4, 2.3, 5.0]), onset + int(rng.integers(4, 7))
        series[onset:treated] *= times
        series[treated : onset + 80] *= 1 + 0.1 * rng.random()
    told = [one for one in found_in(series.tolist()) if one.kind != "relief"]
    assert [one.index for one in told] == pytest.approx(onsets, abs=1)
    assert all(one.detected_at <= onset + 4 for one, onset in zip(told, onsets, strict=True))


def test_nothing_is_said_about_a_healthy_job() -> None:
    for seed in range(20):
        assert found_in(noisy([(1.0, 300)], cov=0.04, seed=seed)) == []


@pytest.mark.parametrize("factor", [1.5, 3.0, 20.0])
@pytest.mark.parametrize("width", [1, 2])
def test_spikes_of_one_or_two_iterations_are_no_change(factor: float, width: int) -> None:
    series = noisy([(1.0, 400)], cov=0.02)
    for begin in range(20, 400, 20):
        for place in range(begin, begin + width):
            series[place] *= factor
    assert found_in(series) == []


def test_a_hang_that_went_by_its_echo_and_a_pause_are_no_slowdown() -> None:
    series = [*noisy([(0.197, 24)]), 6.11, 0.232, 0.196, 0.242, *noisy([(0.196, 12)], seed=2)]
    assert found_in(series) == []


def test_a_slowdown_that_begins_with_a_hang_is_found() -> None:
    (onset,) = found_in([*noisy([(0.197, 24)]), 6.11, *noisy([(0.26, 12)], seed=2)])
    assert abs(onset.index - 25) <= 1
    assert onset.detected_at <= 28


def test_an_onset_is_found_between_garbage_collections() -> None:
    series = noisy([(1.0, 150), (1.3, 60)])
    for place in range(7, len(series), 20):
        series[place] *= 1.5
    onset = found_in(series)[0]
    assert onset.kind == "onset"
    assert abs(onset.index - 150) <= 1


def test_a_change_below_the_least_share_is_not_reported() -> None:
    assert found_in(noisy([(1.0, 200), (1.06, 200)], cov=0.01)) == []
    assert len(found_in(noisy([(1.0, 200), (1.06, 200)], cov=0.01), min_change=0.03)) == 1


def test_small_steps_that_add_up_are_reported_as_drift() -> None:
    (drift,) = found_in(noisy([(1.0, 100), (1.06, 60), (1.12, 60)], cov=0.01))
    assert drift.kind == "drift"
    assert drift.ratio > 1.1
    assert 157 <= drift.index <= drift.detected_at < 220


def test_a_slow_ramp_is_reported() -> None:
    series = [
        value * (1 + 0.25 * min(1, max(0, at - 100) / 150)) for at, value in enumerate(noisy([(1.0, 300)]))
    ]
    found = found_in(series)
    assert found
    assert all(change.ratio > 1 for change in found)


def test_relief_after_a_drift_is_reported() -> None:
    found = found_in(noisy([(1.0, 100), (1.06, 60), (1.12, 60), (1.0, 40)], cov=0.01))
    assert [change.kind for change in found] == ["drift", "relief"]
    assert abs(found[1].index - 220) <= 1


def test_the_warm_up_is_excluded_but_counted() -> None:
    series = [60.0, 8.0, 3.0, 2.0, 2.0, *noisy([(1.0, 60), (2.0, 20)])]
    (onset,) = found_in(series)
    assert onset.index == 65
    assert ChangePointDetector(warmup=3).update(1.0) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300])
def test_values_that_are_no_times_are_counted_and_skipped(bad: float) -> None:
    series = noisy([(1.0, 60), (2.0, 20)])
    for place in (0, 10, 30, 31, 62):
        series.insert(place, bad)
    (onset,) = found_in(series)
    assert onset.index == 65
    assert onset.after == pytest.approx(2.0, rel=0.05)


def test_without_least_change_any_sign_is_taken() -> None:
    rng = np.random.default_rng(4)
    series = [*rng.standard_normal(150), *(3 + rng.standard_normal(150))]
    (change,) = found_in(series, warmup=0, min_change=0)
    assert abs(change.index - 150) <= 3


def test_a_constant_series_says_nothing() -> None:
    assert found_in([1.0] * 200) == []
    assert [change.index for change in found_in([1.0] * 100 + [1.5] * 20)] == [100]


@pytest.mark.parametrize("options", [{"warmup": -1}, {"min_change": 1.0}, {"min_change": -0.1}])
def test_options_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="ChangePointDetector needs"):
        ChangePointDetector(**options)  # type: ignore[arg-type]
