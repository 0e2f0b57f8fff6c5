"""Online change points in a series of iteration times.

The question of GREYHOUND section 4.2 (has the iteration time changed for good, and by at least 10 %?) answered
by a robust run test in place of Bayesian run lengths, which measured worse (``benchmarks/changepoint.py``). The
mean of the last 3 to 24 deviations from the regime's median is compared with the distance that healthy
iterations of this very job pass so rarely that chance explains the run less than once in some million
iterations. That distance is an empirical quantile of the residuals where there are enough of them, and a
cautious extrapolation where there are not, so heavy tails and skew widen it by themselves; correlation of
neighbours widens it too. Deviations are clipped so that no one or two iterations can carry a run: garbage
collection and checkpoints do not count as evidence.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import mul
from statistics import NormalDist, median
from typing import Literal

from keepstep.detect.noise import Correlation, SortedWindow, inflation

ChangeKind = Literal["onset", "relief", "drift"]

_NORMAL = NormalDist()
# Each test: how many iterations are looked at, how many of them at least must lie beyond for the run to count.
_TESTS = ((3, 3), (4, 3), (6, 5), (8, 6), (12, 9), (16, 12), (24, 17))
_REACH = 24  # iterations of the longest run that is tested
# Standard deviations that noise alone passes in one of the tests with a chance of 1e-7 per iteration.
_Z = -_NORMAL.inv_cdf(1e-7)
_WINDOW = 500  # residuals that are remembered
_LEVEL_WINDOW = 100  # iterations whose median is the level
# Iterations after which a shift too small to report is taken in as the regime's level.
_SETTLE = 12
# Iterations for which the level of a new regime may be put right without a report.
_YOUNG = 6
# Iterations whose median is the level in the check for drift.
_DRIFT = 32
# A value beyond this is no measurement, and its square overflows.
_ABSURD = 1e150
# Returning from a slow regime to the level before needs less proof than leaving it: relief is what comes next.
_RELIEF_Z = 3.7
# An iteration this many times longer than its neighbours is a stall (a hang that went by): an incident of its own.
_STALL = 5
# Proof needed beyond what a healthy level may wander, so that a small shift plus noise is no change.
_WANDER_Z = 3.5
# The fewest residuals from which the noise can be estimated.
_TOLD = 8
# During warm-up a jump of 8 mean deviations is a level change, not noise, if 3 iterations precede and 5 follow it;
# two spikes are no level change.
_PARTED, _BEFORE, _BEYOND = 8, 3, 5
# Iterations that lie so many noise scales below the level of a slow regime may be the first of a relief.
_DOUBT = 2


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A lasting change of the iteration time.

    ``index`` is the first iteration of the new regime and ``detected_at`` the iteration whose time gave the
    proof, both counted from 0 over every call of ``update`` (warm-up and missing values included). ``before``
    and ``after`` are robust means of the two regimes in seconds, ``ratio`` is after / before. ``kind``:
    ``onset`` (slower), ``relief`` (faster), ``drift`` (steps too small to report that added up; ``ratio`` tells
    the direction). ``confidence`` in [0, 1] bounds the posterior probability that the change is real, at one
    change expected in 10,000 iterations.
    """

    index: int
    detected_at: int
    before: float
    after: float
    ratio: float
    confidence: float
    kind: ChangeKind


class ChangePointDetector:
    """Feed one iteration time after another; each lasting change is reported once, onset and relief alike.

    ``warmup``: iterations ignored at the start. ``min_change``: a change of the level by less than this share
    of it is not reported by itself, only once such changes add up to it (``drift``); the share is of the faster
    of the two levels, so that a slowdown and its relief pass alike. 0 reports every significant change and
    takes values of any sign.

    A value that is no time (NaN, infinite, or with ``min_change`` above 0 zero or negative) counts as an
    iteration but is otherwise skipped. Time per update does not depend on how many came before.
    """

    def __init__(self, *, warmup: int = 5, min_change: float = 0.10) -> None:
        if warmup < 0 or not 0 <= min_change < 1:
            raise ValueError(
                f"ChangePointDetector needs warmup >= 0 and 0 <= min_change < 1; got {warmup=}, {min_change=}"
            )
        self._warmup = warmup
        self._min_change = min_change
        self._scale = 0.0
        # By length, as far as they were asked for since the scale was last computed; 0: of the level.
        self._inflation: dict[int, float] = {}
        self._rates = (0.0, 0.0)
        self._healthy = math.inf
        self._index = -1
        self._recent: deque[tuple[int, float]] = deque(maxlen=2 * _REACH)
        self._latest: deque[float] = deque(maxlen=_REACH)  # Times of the latest iterations.
        self._waiting: deque[tuple[int, float]] = deque()
        self._level = SortedWindow(_LEVEL_WINDOW)
        self._residuals = SortedWindow(_WINDOW)
        self._correlation = Correlation()
        self._anchor = math.nan
        self._anchor_count = 0
        self._calm_error = 0.0
        self._left = math.nan
        self._last_residuals = (0.0, 0.0)

    def update(self, seconds: float) -> ChangePoint | None:
        """Take the next iteration's time; return the change it proves, if any."""
        self._index += 1
        is_time = abs(seconds) < _ABSURD and (self._min_change == 0 or seconds > 0)
        if self._index < self._warmup or not is_time:
            return None
        self._recent.append((self._index, seconds))
        self._latest.append(seconds)
        self._waiting.append((self._index, seconds))
        found = self._test(seconds) or self._drift()
        if found is None:
            self._absorb()
        return found

    def _absorb(self) -> None:
        """Let iterations old enough not to belong to an undetected change into level and residuals."""
        level_values, residuals = self._level.values, self._residuals.values
        lag = min(_REACH, max(3, len(level_values) // 3))
        if self._healthy < math.inf and len(self._waiting) > 3:
            latest = median(value for _, value in islice(reversed(self._waiting), 3))
            if self._level.median() - latest > _DOUBT * self._scale:
                # A slowdown may have been treated already: level and noise must not mix two regimes.
                lag = _REACH
        while len(self._waiting) > lag or (self._waiting and len(level_values) < 3):
            index, seconds = self._waiting.popleft()
            self._level.push(seconds, index)
            if len(level_values) < 4:
                continue
            level = self._level.median()
            residual = seconds - level
            # Spikes of one or two iterations (garbage collection, checkpoint) say nothing about the tail that runs of
            # iterations are judged by.
            wide = 3 * self._scale
            lone = len(residuals) >= 20 and abs(residual) > 2 * wide > 0
            if lone:
                before = _leading(self._last_residuals, wide)
                lone = before + _leading([value - level for _, value in islice(self._waiting, 2)], wide) <= 1
            if not lone:
                self._residuals.push(residual, index)
                if len(residuals) < 64 or index % 8 == 0:
                    self._refresh()
                self._correlation.push(residual, self._scale)
            self._last_residuals = (residual, self._last_residuals[0])
            if len(level_values) > self._anchor_count and self._anchor_count < 64:
                self._anchor, self._anchor_count = level, len(level_values)
            if not lone and _TOLD < len(residuals) <= 2 * _TOLD:
                self._part()

    def _part(self) -> None:
        """Begin anew where the level has moved before the noise was known: the jump would count as noise for long."""
        values = list(self._recent)
        if len(values) < _BEFORE + _BEYOND:
            return
        places = range(_BEFORE, len(values) - _BEYOND + 1)
        cut = min(places, key=lambda place: _apart(values[:place]) + _apart(values[place:]))
        parts = values[:cut], values[cut:]
        levels = [median(value for _, value in part) for part in parts]
        moved = abs(levels[1] - levels[0])
        mean = sum(map(_apart, parts)) / len(values)
        if moved <= _PARTED * mean or moved < self._min_change * min(levels):
            return
        self._residuals.clear()
        for part, level in zip(parts, levels, strict=True):
            for index, value in part:
                self._residuals.push(value - level, index)
        self._refresh()
        self._correlation = Correlation()
        for _, residual in self._residuals.order:
            self._correlation.push(residual, self._scale)
        self._refresh()
        self._begin(parts[1], 1.0)
        self._anchor, self._anchor_count = levels[1], len(parts[1])

    def _refresh(self) -> None:
        """Recompute the noise scale: root mean square of residuals clipped at three quartile scales."""
        values = self._residuals.values
        quarter = len(values) // 4
        reach = 3 * (values[-1 - quarter] - values[quarter]) / 1.349
        low, high = bisect_left(values, -reach), bisect_right(values, reach)
        inside = values[low:high]
        squares = sum(map(mul, inside, inside), low * reach * reach) + (len(values) - high) * reach * reach
        self._scale = math.sqrt(squares / len(values)) * 1.01
        self._rates = self._correlation.rates()
        self._inflation = {0: inflation(self._rates, len(self._level))}
        calm = 0.25 * self._min_change * self._anchor
        if len(self._recent) >= _DRIFT and abs(self._recent_level() - self._anchor) <= calm:
            self._calm_error = 1.25 * self._scale * math.sqrt(inflation(self._rates, _DRIFT))

    def _tail(self, z: float, upward: bool) -> float:
        """The distance from the level that healthy iterations pass as rarely as a normal one passes ``z`` sigma."""
        values = self._residuals.values
        n = len(values)
        rank = _NORMAL.cdf(-z) * (n + 1)
        edge = 3.0 if n >= 60 else 2.0
        place = int(max(rank, edge)) - 1
        part = max(rank, edge) - 1 - place
        if upward:
            distance = values[-1 - place] + part * (values[-2 - place] - values[-1 - place])
        else:
            distance = part * (values[place] - values[place + 1]) - values[place]
        if rank >= edge:
            return distance
        slope = max(distance / -_NORMAL.inv_cdf(edge / (n + 1)), self._scale)
        return slope * z * (1 + 2 / n)

    def _test(self, seconds: float) -> ChangePoint | None:
        """Look at the latest runs on the side of the level on which the newest iteration lies."""
        count = len(self._level.values)
        if count < 3 or len(self._residuals.values) < _TOLD:
            return None
        level = self._level.median()
        sign = 1.0 if seconds > level else -1.0
        floor = 0.5 * self._min_change * level
        farthest = max(self._latest) - level if sign > 0 else level - min(self._latest)
        # No run has a larger mean. So it is in most iterations.
        if farthest <= floor:
            return None
        halfway = 0.5 * (level - self._healthy) if sign < 0 else -math.inf
        latest = [sign * (value - level) for _, value in self._recent][-_REACH:]
        # A healthy level may wander by half of what counts as a change, and by more if few iterations show it.
        wander = floor * (1 + 8 / len(self._residuals))
        for length, hits in _TESTS:
            if len(latest) < length:
                break
            run = latest[-length:]
            if sum(run) <= floor * length:
                continue
            z_needed = min(_Z, _RELIEF_Z) if sum(run) > halfway * length > 0 else _Z
            if length not in self._inflation:  # most iterations ask for none
                self._inflation[length] = inflation(self._rates, length)
            noise = math.sqrt(self._inflation[length] / length + 1.57 * self._inflation[0] / count)
            needed = max(floor, self._tail(z_needed * noise, sign > 0))
            if z_needed == _Z:
                needed = max(needed, wander + self._tail(_WANDER_Z * noise, sign > 0))
            if _clipped_mean(run, hits, needed, 6 * self._scale, level) > needed:
                z = sum(run) / length / max(needed, 1e-300) * _Z
                found = self._verify(level, sign, _NORMAL.cdf(-min(z, 37.0)))
                if found is not None or not self._waiting:  # a new regime has begun
                    return found
        return None

    def _verify(self, level: float, sign: float, chance: float) -> ChangePoint | None:
        """Estimate onset and new level; report, keep waiting, or take a small change in silently."""
        values = list(self._recent)
        after = median(value for _, value in values[-3:])
        taken = values
        for _ in range(2):
            taken = values[_split(values, level, after) :]
            after = _robust_mean([value for _, value in taken])
        ratio = after / level if level else math.inf
        if sign * (after - level) < self._min_change * min(level, after) or len(taken) < 3:
            if len(taken) >= _SETTLE:
                self._begin(taken, 1.0)
            return None
        scale = ratio if self._min_change > 0 else 1.0
        if len(self._level) < _YOUNG and self._still_left(after, level):
            self._calm_error *= scale
            self._begin(taken, scale)
            self._anchor, self._anchor_count = after, len(taken)
            return None
        self._left = level
        kind: ChangeKind = "onset" if sign > 0 else "relief"
        change = ChangePoint(taken[0][0], self._index, level, after, ratio, _posterior(chance), kind)
        self._calm_error *= scale
        self._begin(taken, scale)
        self._healthy = level if sign > 0 and self._min_change > 0 else math.inf
        self._anchor, self._anchor_count = after, len(taken)
        return change

    def _still_left(self, after: float, level: float) -> bool:
        """Whether ``after`` only corrects the level of a new regime, being still a change away from the last regime."""
        moved = after - self._left
        return moved * (level - self._left) > 0 and abs(moved) >= self._min_change * min(after, self._left)

    def _begin(self, taken: list[tuple[int, float]], ratio: float) -> None:
        """Start a regime at the first of ``taken``; residuals of the last one serve, scaled, until it has its own."""
        self._level.clear()
        self._waiting.clear()
        for index, value in taken:
            self._level.push(value, index)
        if ratio != 1.0:
            self._residuals.scale(ratio)
            self._scale *= ratio
        self._inflation[0] = inflation(self._correlation.rates(), len(self._level))
        self._recent.clear()
        self._recent.extend(taken)
        self._latest.clear()
        self._latest.extend(value for _, value in self._recent)
        self._last_residuals = (0.0, 0.0)

    def _recent_level(self) -> float:
        return median([value for _, value in list(self._recent)[-_DRIFT:]])

    def _drift(self) -> ChangePoint | None:
        """Compare the recent level with the one last reported: small changes must not add up unseen."""
        if self._min_change == 0 or self._index % 4 or self._anchor_count < 32 or len(self._recent) < _DRIFT:
            return None
        level = self._recent_level()
        moved = abs(level - self._anchor)
        if moved < self._min_change * min(self._anchor, level):
            return None
        # The noise before anything moved: residuals of a ramp are wide and alike, and would hide it.
        error = self._calm_error * math.sqrt(1 / _DRIFT + 1 / self._anchor_count)
        if moved < 5 * error:
            return None
        values = list(self._recent)
        taken = values[_split(values, self._anchor, level) :]
        before, self._anchor, self._anchor_count = self._anchor, level, len(taken)
        self._healthy = before if level > before else math.inf
        sure = _posterior(_NORMAL.cdf(-moved / error) if error else 0.0)
        self._begin(taken, 1.0)
        return ChangePoint(taken[0][0], self._index, before, level, level / before, sure, "drift")


def change_points(series: Iterable[float], detector: ChangePointDetector) -> list[ChangePoint]:
    """Every change ``detector`` reports over ``series``."""
    return [found for found in map(detector.update, series) if found is not None]


def _apart(values: list[tuple[int, float]]) -> float:
    """The sum of distances from their median."""
    centre = median(value for _, value in values)
    return sum(abs(value - centre) for _, value in values)


def _leading(residuals: Iterable[float], wide: float) -> int:
    """How many of the first ``residuals`` are spikes, up to the first that is none."""
    return sum(1 for _ in takewhile(lambda residual: abs(residual) > wide, residuals))


def _clipped_mean(run: list[float], hits: int, needed: float, spike: float, level: float) -> float:
    """Mean of ``run``, clipped so that it passes ``needed`` only if about ``hits`` values lie near or beyond it.

    Values beyond ``spike`` and twice the third largest are outliers (one or two bad iterations) and count as the third;
    a stall counts as none, because its echo in the next iteration and one more bad one would make a run of three.
    """
    cap = 1.1 * needed * len(run) / hits
    low = 0.0 if len(run) <= 8 else -needed
    third = sorted(run)[-3]
    outlier = max(spike, 2 * third)
    stall = max(outlier, _STALL * (level + third) - level)
    kept = (value if value <= outlier else third if value <= stall else 0.0 for value in run)
    return sum(min(cap, max(low, value)) for value in kept) / len(run)


def _split(values: list[tuple[int, float]], before: float, after: float) -> int:
    """Index into ``values`` where the suffix that looks more like ``after`` than ``before`` most likely begins."""
    middle, span = (before + after) / 2, after - before
    best, start, total = -math.inf, len(values) - 1, 0.0
    for place in range(len(values) - 1, -1, -1):
        total += min(0.5, max(-0.5, (values[place][1] - middle) / span)) if span else 0.0
        if total > best:
            best, start = total, place
    return start


def _robust_mean(values: list[float]) -> float:
    """Mean of ``values`` with each pulled in to three scales around their median (scale: median absolute deviation)."""
    centre = median(values)
    reach = 3 * 1.4826 * median(abs(value - centre) for value in values)
    return math.fsum(min(centre + reach, max(centre - reach, value)) for value in values) / len(values)


def _posterior(chance: float) -> float:
    """Bound on the probability of a change, given the chance of such a run under noise (Sellke et al. 2001)."""
    chance = max(chance, 1e-300)
    factor = 1 / (-math.e * chance * math.log(chance)) if chance < 1 / math.e else 1.0
    return factor * 1e-4 / (1 - 1e-4 + factor * 1e-4)
