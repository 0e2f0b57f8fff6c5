"""Slowdowns in the iterations that a run's agents have logged, located by the ranks' own time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from keepstep.analyze._episodes import judged, slow_episodes
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Incident
from keepstep.core.summary import IterationSummary
from keepstep.locate import locate_slow

_AROUND_STEPS = 16  # steps before and after an onset that are compared


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
