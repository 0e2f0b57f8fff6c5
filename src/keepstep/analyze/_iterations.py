"""Slowdowns in the iterations that a run's agents logged, located by the ranks' own time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from keepstep.analyze._episodes import slow_episodes
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Incident
from keepstep.core.summary import IterationSummary
from keepstep.locate import locate_slow
from keepstep.traces.runs import Iteration

_AROUND_STEPS = 16  # looked at on either side of an onset


def slow_in_iterations(iterations: Sequence[Iteration]) -> list[Incident]:
    """Incidents as the controller would have written them, but for links, which the log does not tell."""
    by_step: dict[int, list[Iteration]] = {}
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
        said = locate_slow(Evidence({}, {}, before=_summaries(healthy), after=_summaries(slow)))
        found.append(
            replace(
                incident,
                culprits=said.culprits,
                victims=said.victims,
                evidence=(*incident.evidence, *said.evidence),
                missing=said.missing,
                summary=said.summary,
                ranks_reporting=len(ranks),
                world_size=max(ranks) + 1,
            )
        )
    return found


def _summaries(rows: Sequence[Iteration]) -> list[IterationSummary]:
    return [
        IterationSummary(one.rank, one.step, one.start_unix_s, one.duration_s, one.self_s, one.blocked_s)
        for one in rows
    ]
