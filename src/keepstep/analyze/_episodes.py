"""Slowdowns from onset to relief in series of step times, and in the iterations that a run's agents have logged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from keepstep.core.evidence import Evidence
from keepstep.core.incident import Diagnosis, Incident
from keepstep.core.summary import IterationSummary
from keepstep.detect import ChangeKind, ChangePoint, ChangePointDetector, change_points
from keepstep.locate import locate_slow

_AROUND_STEPS = 16  # steps before and after an onset that are compared
_STALLED = 2.0  # least ratio of a stalled step to the usual one
_NEIGHBOURS = 8  # steps on either side of one that show what is usual there
WARM_UP = 5  # first steps, which are slow by nature
_UNKNOWN = 32  # times after the warm-up by which a detector knows the noise and the level
_LOOKED_BACK = 128  # first times that are looked at backwards
_NEARBY = 5  # places by which two tellings of the same change may differ
_SLOW = 1.095  # least ratio to the healthy level: 10 %, as well as levels are known
_SENSED = 0.08  # least change that is looked for: of those near 10 %, all times decide
_ALIKE = 1.04  # least ratio of two levels that are not one
_FEW = 8  # times that show no level well
_SHORTEST = 3  # times of a level
_NEARBY_EDGE = 12  # places by which the first proof of a change may be off its place
_LONGEST_STALL = 2  # steps; more are a slowdown
_LISTED = 6  # stalls that are told one by one


@dataclass(frozen=True, slots=True)
class _Regime:
    """Times from place ``begin`` until before ``end``; ``detected_at``: the time that proved them to be other."""

    begin: int
    end: int
    detected_at: int
    level_s: float

    @property
    def is_short(self) -> bool:
        """Whether it has too few times to know its level well."""
        return self.end - self.begin < _FEW


def slow_episodes(
    times: Sequence[float], numbers: Sequence[int], source: str, warm_up: int = WARM_UP
) -> list[Incident]:
    """Incidents without culprits. ``numbers``: the step of each time; ``source``: evidence that names the source.

    ``warm_up``: first times that are not looked at.
    """
    found: list[Incident] = []
    regimes = _regimes(times, warm_up)
    healthy_s = regimes[0].level_s if regimes else 0.0
    for last, regime in pairwise(regimes):
        open_one = found[-1] if found and found[-1].status == "open" else None
        is_slow = regime.level_s >= _SLOW * healthy_s
        if open_one is not None and is_slow:
            now_s = open_one.iteration_after_s or healthy_s
            if last.is_short:
                level_s = regime.level_s
                found[-1] = replace(open_one, iteration_after_s=level_s, job_slowdown=level_s / healthy_s)
            if last.is_short or regime.is_short or (healthy_s + now_s) / 2 <= regime.level_s < _SLOW * now_s:
                continue
        if open_one is not None:
            found[-1] = replace(open_one, relief_step=numbers[regime.begin], status="relieved")
        if not is_slow:
            # Small shifts without a slowdown between them must not add up unseen.
            healthy_s = regime.level_s if open_one is not None else min(healthy_s, regime.level_s)
            continue
        found.append(
            Incident(
                number=len(found) + 1,
                kind="slow",
                onset_step=numbers[regime.begin],
                # What was found looking back was seen at no step.
                detected_step=numbers[regime.detected_at] if regime.detected_at > regime.begin else None,
                relief_step=None,
                job_slowdown=regime.level_s / healthy_s,
                culprits=(),
                victims=(),
                evidence=(source,),
                missing=(),
                iteration_before_s=healthy_s,
                iteration_after_s=regime.level_s,
            )
        )
    return found


def _regimes(times: Sequence[float], warm_up: int) -> list[_Regime]:
    """Stretches of times with a level of their own.

    Changes too small for an incident are looked for, too: of all times the levels are known better than from the few
    that prove a change, and those that turn out to be alike are one.
    """
    if len(times) <= warm_up:
        return []
    points = change_points(times, ChangePointDetector(warmup=warm_up, min_change=_SENSED))
    points = [*_early_changes(times, warm_up, points), *points]
    begins = [warm_up, *(point.index for point in points), len(times)]
    found: list[_Regime] = []
    for place, (begin, end) in enumerate(pairwise(begins)):
        detected_at = points[place - 1].detected_at if place else begin
        level_s = _level(times, begin, end)
        if place < len(points):
            before_s = points[place].before
            has_crept = points[place].kind == "drift" and 1 <= level_s / before_s < _SLOW
            if has_crept or (place == 0 and end - begin < _FEW):
                # The level from which small steps began, or that the warm-up shows, too.
                level_s = before_s
        one = _Regime(begin, end, detected_at, level_s)
        found.append(one)
        while len(found) > 1:
            last, one = found[-2:]
            if max(last.level_s, one.level_s) >= _ALIKE * min(last.level_s, one.level_s):
                break
            level_s = _level(times, last.begin, one.end)
            found[-2:] = [_Regime(last.begin, one.end, last.detected_at, level_s)]
    for place in range(1, len(found)):
        last, one = found[place - 1 : place + 1]
        begin = _parted(times, last, one)
        found[place - 1 : place + 1] = [replace(last, end=begin), replace(one, begin=begin)]
    return found


def _level(times: Sequence[float], begin: int, end: int) -> float:
    """The mean of the middle half of the times, without the first two, in which a change may not be whole.

    Where times alternate, a median would be either of the two.
    """
    ordered = sorted(times[min(begin + 2, end - 1) : end])
    cut = len(ordered) // 4
    return fmean(ordered[cut : len(ordered) - cut])


def _parted(times: Sequence[float], last: _Regime, one: _Regime) -> int:
    """Where the times, all looked at, part best into those of one level and those of the next."""
    first = max(one.begin - _NEARBY_EDGE, min(last.begin + _SHORTEST, one.begin))
    places = range(first, min(one.begin + _NEARBY_EDGE, max(one.end - _SHORTEST, one.begin)) + 1)
    low, high = sorted((last.level_s, one.level_s))
    reach = (high - low) / 2  # by which a single time may lie beyond the levels, so that no spike decides
    best = math.inf, 0, one.begin
    cost = 0.0
    for place in places:
        best = min(best, (cost, abs(place - one.begin), place))
        time = min(max(times[place], low - reach), high + reach)
        cost += (time - last.level_s) ** 2 - (time - one.level_s) ** 2
    return best[2]


def _early_changes(times: Sequence[float], warm_up: int, later: Sequence[ChangePoint]) -> list[ChangePoint]:
    """Changes among the first times, of which a detector cannot know yet what is usual.

    Backwards, they come when it knows; those that ``later`` has are left out. The times of the warm-up can only show
    that the job was faster: no change is among them.
    """
    window = times[:_LOOKED_BACK]
    found: list[ChangePoint] = []
    for point in change_points(reversed(window), ChangePointDetector(warmup=0, min_change=_SENSED)):
        index = len(window) - point.index
        if point.kind == "drift" or not warm_up <= index < warm_up + _UNKNOWN:
            continue
        kind: ChangeKind = "onset" if point.kind == "relief" else "relief"
        ratio = 1 / point.ratio
        one = ChangePoint(index, index, point.after, point.before, ratio, point.confidence, kind)
        if not later or index < later[0].index - (_NEARBY if (ratio > 1) == (later[0].ratio > 1) else 0):
            found.append(one)
    return found[::-1]


def stalls(times: Sequence[float], warm_up: int = WARM_UP) -> list[tuple[int, float, float]]:
    """Places of single slow steps with their time and the usual one there; empty where such steps are no exception."""
    found: list[tuple[int, float, float]] = []
    for place in range(warm_up, len(times)):
        around = times[max(place - _NEIGHBOURS, warm_up) : place + _NEIGHBOURS + 1]
        usual = median(around)
        if times[place] >= _STALLED * usual and len(around) > _NEIGHBOURS:
            found.append((place, times[place], usual))
    places = {place for place, _, _ in found}
    lone = [
        one
        for one in found
        if not all(one[0] + near in places for near in range(1, _LONGEST_STALL + 1))
        and not all(one[0] - near in places for near in range(1, _LONGEST_STALL + 1))
        and not {one[0] - 1, one[0] + 1} <= places
    ]
    return lone if 10 * len(lone) <= len(times) else []


def stalls_told(found: Sequence[tuple[int, float, float]], where: str, word: str) -> list[str]:
    """Lines on stalls as of `stalls`, with the steps' numbers for places. ``word``: what a step is called."""
    if not found:
        return []
    numbers = [number for number, _, _ in found]
    apart = {later - number for number, later in pairwise(numbers)}
    if len(found) > 2 and len(apart) == 1:
        times = median(time / usual for _, time, usual in found)
        every = f"every {apart.pop()} {word}s from {numbers[0]} to {numbers[-1]} one takes {times:.1f} times as long"
        return [
            f"the cause of stalls in {where}: {every}, as at checkpoints or evaluations; no lasting slowdown"
        ]
    listed = ", ".join(f"{word} {number} (×{time / usual:.1f})" for number, time, usual in found[:_LISTED])
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    what = "one stalled" if len(found) == 1 else f"{len(found)} stalled"
    return [
        f"the cause of {what} {word}{'s' * (len(found) > 1)} in {where}: {listed}{more}; no lasting slowdown"
    ]


def judged(incident: Incident, diagnosis: Diagnosis, ranks_reporting: int, world_size: int) -> Incident:
    """The incident with what a locator concluded about it."""
    return replace(
        incident,
        culprits=diagnosis.culprits,
        victims=diagnosis.victims,
        evidence=(*incident.evidence, *diagnosis.evidence),
        missing=diagnosis.missing,
        summary=diagnosis.summary,
        ranks_reporting=ranks_reporting,
        world_size=world_size,
    )


def slow_in_iterations(iterations: Sequence[IterationSummary]) -> list[Incident]:
    """Incidents as the controller would have written them; links are not blamed, as the log tells nothing of them."""
    by_step: dict[int, list[IterationSummary]] = {}
    for one in iterations:
        by_step.setdefault(one.step, []).append(one)
    steps = sorted(by_step)
    ranks = {one.rank for one in iterations}
    times = [median(one.duration_s for one in by_step[step]) for step in steps]
    found: list[Incident] = []
    for incident in slow_episodes(times, steps, f"{len(steps)} steps of {len(ranks)} ranks"):
        onset = incident.onset_step or 0
        until = min(incident.relief_step or steps[-1] + 1, onset + _AROUND_STEPS)
        healthy = [row for step in range(onset - _AROUND_STEPS, onset) for row in by_step.get(step, ())]
        slow = [row for step in range(onset, until) for row in by_step.get(step, ())]
        said = locate_slow(Evidence({}, {}, before=healthy, after=slow))
        found.append(judged(incident, said, len(ranks), max(ranks) + 1))
    return found
