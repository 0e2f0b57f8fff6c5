from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.detect import ChangePointDetector, change_points
from keepstep.detect.noise import SortedWindow

anything = st.floats(allow_nan=True, allow_infinity=True)


def job(seed: int, factor: float, cov: float) -> list[float]:
    rng = np.random.default_rng(seed)
    series = 1 + cov * rng.standard_normal(160)
    series[80:120] *= factor
    return series.tolist()


@given(st.lists(anything, max_size=300), st.sampled_from([0.0, 0.1]))
def test_no_value_raises_and_reports_are_in_order(series: list[float], min_change: float) -> None:
    found = change_points(series, ChangePointDetector(warmup=0, min_change=min_change))
    assert all(0 <= change.index < change.detected_at < len(series) for change in found)
    assert all(earlier.detected_at < later.detected_at for earlier, later in pairwise(found))
    assert all(0 <= change.confidence <= 1 for change in found)


@given(st.integers(0, 10_000), st.floats(1.0, 4.0), st.floats(0.001, 0.05), st.integers(-30, 30))
@settings(deadline=None)
def test_the_unit_of_time_does_not_matter(seed: int, factor: float, cov: float, power: int) -> None:
    series = job(seed, factor, cov)
    plain = change_points(series, ChangePointDetector())
    scaled = change_points([value * 2.0**power for value in series], ChangePointDetector())
    assert [(one.index, one.detected_at, one.kind) for one in plain] == [
        (one.index, one.detected_at, one.kind) for one in scaled
    ]


@given(
    st.integers(0, 10_000),
    st.lists(st.integers(0, 159), max_size=20),
    st.sampled_from([math.nan, math.inf, -1.0]),
)
@settings(deadline=None)
def test_bad_values_lose_no_state(seed: int, places: list[int], bad: float) -> None:
    series = job(seed, 2.0, 0.02)
    plain = change_points(series, ChangePointDetector(warmup=0))
    dirty = list(series)
    for place in sorted(places, reverse=True):
        dirty.insert(place, bad)
    kept = [at for at, value in enumerate(dirty) if value != bad and not math.isnan(value)]
    found = change_points(dirty, ChangePointDetector(warmup=0))
    assert [one.kind for one in found] == [one.kind for one in plain]
    assert [kept.index(one.index) for one in found] == [one.index for one in plain]


@given(st.integers(0, 10_000), st.floats(1.3, 4.0), st.floats(0.001, 0.03))
@settings(deadline=None)
def test_a_clear_change_is_found_at_its_place(seed: int, factor: float, cov: float) -> None:
    found = change_points(job(seed, factor, cov), ChangePointDetector())
    onset = next(one for one in found if one.kind == "onset")
    relief = next(one for one in found if one.kind == "relief")
    assert abs(onset.index - 80) <= 1
    assert onset.detected_at <= 84
    assert abs(relief.index - 120) <= 1
    assert relief.detected_at <= 124


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=100), st.integers(1, 20))
def test_the_sorted_window_is_a_sorted_list_of_the_last(values: list[float], size: int) -> None:
    window = SortedWindow(size)
    for place, value in enumerate(values):
        window.push(value, place)
        last = values[max(0, place + 1 - size) : place + 1]
        assert window.values == sorted(last)
        assert window.median() == float(np.median(last))
