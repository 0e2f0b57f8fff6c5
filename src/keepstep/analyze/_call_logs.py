"""Slowdowns in logs of the hosts' calls: steps by their period, change points, and who held up the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from keepstep.analyze._episodes import judged, slow_episodes
from keepstep.core.errors import TraceError
from keepstep.core.incident import Incident
from keepstep.core.traced_operations import Call
from keepstep.detect import find_period
from keepstep.locate import CallStep, boundaries, locate_by_gaps, split
from keepstep.traces.call_log import CallLog

_LEAST_STEPS = 12


def slow_in_calls(log: CallLog) -> tuple[tuple[Incident, ...], tuple[str, ...]]:
    """The incidents in a call log, and what is missing to say more.

    Raises:
        TraceError: the calls do not repeat themselves.
    """
    missing = list(log.missing)
    periods: dict[int, Sequence[Call]] = {}
    for rank, calls in log.calls.items():
        period = find_period([(call.function, call.nbytes) for call in calls])
        if period is None:
            missing.append(f"rank {rank}: its {len(calls)} calls show no steady step")
        else:
            periods[rank] = calls[-period:]
    at = boundaries(periods)
    if at is None:
        raise TraceError("no call comes once in every step of every rank: steps cannot be told apart")
    steps = {rank: split(log.calls[rank], at[rank]) for rank in periods}
    longest = max(steps, key=lambda rank: (len(steps[rank]), -rank))
    reference = steps[longest]
    if len(reference) < _LEAST_STEPS:
        return (), (*missing, f"more steps: {len(reference)} are too few to tell a change")
    first_s = reference[0].begin_s
    incidents: list[Incident] = []
    for incident in slow_episodes(
        [step.duration_s for step in reference],
        list(range(len(reference))),
        f"{len(reference)} steps in the calls",
    ):
        onset, relief = incident.onset_step or 0, incident.relief_step
        until_s = reference[relief].begin_s if relief is not None else float("inf")
        healthy, slow = _around(steps, reference[onset].begin_s, until_s)
        diagnosis = locate_by_gaps(healthy, slow)
        since = reference[onset].begin_s - first_s
        onset_line = f"onset {since:.1f} s after the first step"
        incident = replace(incident, evidence=(*incident.evidence, onset_line))
        incidents.append(judged(incident, diagnosis, len(steps), max(log.calls) + 1))
    return tuple(incidents), tuple(missing)


def _around(
    steps: Mapping[int, Sequence[CallStep]], onset_s: float, until_s: float
) -> tuple[dict[int, list[CallStep]], dict[int, list[CallStep]]]:
    """The steps of each rank outside and inside a slowdown; steps at its edges are in neither."""
    outside: dict[int, list[CallStep]] = {}
    inside: dict[int, list[CallStep]] = {}
    for rank, own in steps.items():
        inside[rank] = [step for step in own if step.begin_s > onset_s and step.calls[-1].at_s < until_s]
        outside[rank] = [step for step in own if step.calls[-1].at_s < onset_s or step.begin_s > until_s]
    return outside, inside
