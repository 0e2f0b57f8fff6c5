"""Slowdowns from onset to relief in a series of step times, and incidents with a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from keepstep.core.incident import Diagnosis, Incident
from keepstep.detect import ChangePointDetector, change_points


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
