from __future__ import annotations

from statistics import median

import pytest

from keepstep.traces.log_formats import Bar
from keepstep.traces.progress_bars import step_times


def bar_lines(times: list[float], *, mean: bool) -> list[tuple[int, Bar]]:
    """The lines of a bar over steps of these times, with the digits that tqdm shows."""
    lines: list[tuple[int, Bar]] = []
    elapsed_s = 0.0
    for step, seconds in enumerate(times, 1):
        elapsed_s += seconds
        shown = round(elapsed_s / step if mean else seconds, 2)
        lines.append((step, Bar(len(times), 0, int(elapsed_s), shown)))
    return lines


TIMES = [2.0 + 0.02 * (step % 5) for step in range(200)] + [3.0 + 0.02 * (step % 5) for step in range(100)]


@pytest.mark.parametrize("mean", [False, True])
def test_a_slowdown_is_seen_in_speeds_and_in_means(mean: bool) -> None:
    found = step_times(bar_lines(TIMES, mean=mean))
    assert median(seconds for step, seconds in found if step < 195) == pytest.approx(2.04, rel=0.03)
    assert median(seconds for step, seconds in found if step > 210) == pytest.approx(3.04, rel=0.03)


def test_a_clock_that_stands_still_is_not_used() -> None:
    lines = [(step, Bar(300, 0, 0, seconds)) for step, seconds in enumerate(TIMES, 1)]
    assert [seconds for _, seconds in step_times(lines)] == TIMES
