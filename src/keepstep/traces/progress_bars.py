"""Times of steps from the lines of a progress bar, which shows a mean, a smoothed speed, or only its clock."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import median

from keepstep.traces.log_formats import Bar

_CLOCK_S = 8  # the clock has whole seconds: a time over fewer would be mostly chance
_SETTLED_S = 60  # after so long a mean is told from a speed
_IS_MEAN = (
    0.95  # share of the lines whose speed is the mean since the bar began, from which all are taken for means
)


def step_times(lines: Sequence[tuple[int, Bar]]) -> list[tuple[int, float]]:
    """Steps with their seconds, ascending, from (step, bar) in the order of a bar's lines.

    tqdm shows a smoothed speed, which follows within a few steps and is used as it is. Lightning has it show the mean
    since the epoch began, in which a change drowns: then the clock gives the times, of as many steps as take about 8 s.
    """
    late = [(step, bar) for step, bar in lines if bar.elapsed_s >= _SETTLED_S and _within(step, bar) > 0]
    means = sum(_is_mean(step, bar) for step, bar in late)
    if not late or means < _IS_MEAN * len(late):
        return [(step, bar.step_s) for step, bar in lines if bar.step_s > 0]
    typical_s = median(bar.elapsed_s / _within(step, bar) for step, bar in late)
    # As many steps each time: were it as much time, the rounding of the clock would not be by chance.
    together = max(ceil(_CLOCK_S / typical_s), 1)
    found: list[tuple[int, float]] = []
    first = lines[0]
    for now in lines[1:]:
        if now[1].epoch != first[1].epoch or now[1].elapsed_s < first[1].elapsed_s:
            first = now
        elif now[0] - first[0] >= together:
            seconds = (now[1].elapsed_s - first[1].elapsed_s) / (now[0] - first[0])
            found.append((first[0] + 1, seconds))
            first = now
    return found


def _within(step: int, bar: Bar) -> int:
    """The step within its epoch."""
    return step - bar.epoch * bar.total


def _is_mean(step: int, bar: Bar) -> bool:
    """Whether the speed shown is the mean since the bar began, as far as the digits shown tell."""
    mean_s = bar.elapsed_s / _within(step, bar)
    shown = max(bar.step_s, 1 / bar.step_s) if bar.step_s else 1.0
    return abs(bar.step_s - mean_s) <= mean_s * (0.005 + 1.0 / bar.elapsed_s + 0.005 / shown)
