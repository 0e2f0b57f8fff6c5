"""Slowdowns from onset to relief in series of step times, and in the iterations that a run's agents have logged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from keepstep.core.evidence import Evidence
from keepstep.core.incident import Diagnosis, Incident
from keepstep.core.summary import IterationSummary
from keepstep.detect import ChangePointDetector, change_points
from keepstep.locate import locate_slow

_AROUND_STEPS = 16  # steps before and after an onset that are compared


def slow_episodes(times: Sequence[float], numbers: Sequence[int], source: str) -> list[Incident]:
    """Incidents without culprits. ``numbers``: the step of each time; ``source``: evidence that names the source."""
    points = change_points(times, ChangePointDetector())
    ends = [*(point.index for point in points[1:]), len(times)][: len(points)]
    found: list[Incident] = []
    for point, end in zip(points, ends, strict=True):
        open_one = found[-1] if found and found[-1].status == "open" else None
        # All iterations until the next change are known: their median is better than the detector's estimate.
        after_s = median(times[min(point.index + 2, end - 1) : end])
        healthy_s = open_one.iteration_before_s if open_one and open_one.iteration_before_s else point.before
        if open_one is not None and (point.ratio > 1 or after_s < (healthy_s + point.before) / 2):
            found[-1] = replace(open_one, relief_step=numbers[point.index], status="relieved")
        if point.ratio > 1:
            found.append(
                Incident(
                    number=len(found) + 1,
                    kind="slow",
                    onset_step=numbers[point.index],
                    detected_step=numbers[point.detected_at],
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
