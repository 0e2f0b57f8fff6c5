"""Slowdowns from onset to relief in series of step times, and in the iterations that a run's agents have logged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

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
_STILL_SLOW = 1.1  # least ratio to the healthy level of a job that is slow though less than before
_LONGEST_STALL = 2  # steps; more are a slowdown
_LISTED = 6  # stalls that are told one by one


def slow_episodes(
    times: Sequence[float], numbers: Sequence[int], source: str, warm_up: int = WARM_UP
) -> list[Incident]:
    """Incidents without culprits. ``numbers``: the step of each time; ``source``: evidence that names the source.

    ``warm_up``: first times that are not looked at.
    """
    points = change_points(times, ChangePointDetector(warmup=warm_up))
    points = [*_early_changes(times, warm_up, points), *points]
    ends = [*(point.index for point in points[1:]), len(times)][: len(points)]
    found: list[Incident] = []
    for point, end in zip(points, ends, strict=True):
        open_one = found[-1] if found and found[-1].status == "open" else None
        # All iterations until the next change are known: their median is better than the detector's estimate.
        after_s = median(times[min(point.index + 2, end - 1) : end])
        healthy_s = open_one.iteration_before_s if open_one and open_one.iteration_before_s else point.before
        if open_one is not None and (point.ratio > 1 or after_s < (healthy_s + point.before) / 2):
            found[-1] = replace(open_one, relief_step=numbers[point.index], status="relieved")
        is_partial = open_one is not None and found[-1].status != "open" and after_s > _STILL_SLOW * healthy_s
        if point.ratio > 1 or is_partial:
            found.append(
                Incident(
                    number=len(found) + 1,
                    kind="slow",
                    onset_step=numbers[point.index],
                    # What was found looking back was seen at no step.
                    detected_step=numbers[point.detected_at] if point.detected_at > point.index else None,
                    relief_step=None,
                    job_slowdown=after_s / healthy_s,
                    culprits=(),
                    victims=(),
                    evidence=(source,),
                    missing=(),
                    iteration_before_s=healthy_s,
                    iteration_after_s=after_s,
                )
            )
    return found


def _early_changes(times: Sequence[float], warm_up: int, later: Sequence[ChangePoint]) -> list[ChangePoint]:
    """Changes among the first times, of which a detector cannot know yet what is usual.

    Backwards, they come when it knows; those that ``later`` has are left out. The times of the warm-up can only show
    that the job was faster: no change is among them.
    """
    window = times[:_LOOKED_BACK]
    found: list[ChangePoint] = []
    for point in change_points(reversed(window), ChangePointDetector(warmup=0)):
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
