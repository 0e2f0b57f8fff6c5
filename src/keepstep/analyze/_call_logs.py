"""Slowdowns and stalls in logs of the hosts' calls: steps by their period, change points, who held up the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from keepstep.analyze._call_stalls import locate_stall
from keepstep.analyze._episodes import judged, slow_episodes, stalls, stalls_told
from keepstep.core.errors import TraceError
from keepstep.core.incident import Incident
from keepstep.core.traced_operations import Call
from keepstep.detect.period import find_period
from keepstep.locate import CallStep, boundaries, locate_by_gaps, split
from keepstep.traces.call_log import CallLog

_LEAST_STEPS = 12
_FEW_STALLS = (
    2  # more of them are told, and nobody is looked for: checkpoints and evaluations stall steps, too
)


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
    times = [step.duration_s for step in reference]
    incidents: list[Incident] = []
    for incident in slow_episodes(times, list(range(len(reference))), f"{len(reference)} steps in the calls"):
        onset, relief = incident.onset_step or 0, incident.relief_step
        until_s = reference[relief].begin_s if relief is not None else float("inf")
        healthy, slow = _around(steps, reference[onset].begin_s, until_s)
        diagnosis = locate_by_gaps(healthy, slow)
        incidents.append(judged(_timed(incident, reference), diagnosis, len(steps), max(log.calls) + 1))
    edges = {step for one in incidents for step in (one.onset_step, one.relief_step)}
    lone = [one for one in stalls(times) if one[0] not in edges]
    if len(lone) > _FEW_STALLS:
        missing += stalls_told(lone, "the calls", "step")
        lone = []
    for place, seconds, usual_s in lone:
        diagnosis = locate_stall(steps, reference[place].begin_s, usual_s)
        stall = _timed(_stall(place, seconds, usual_s), reference)
        incidents.append(judged(stall, diagnosis, len(steps), max(log.calls) + 1))
    incidents.sort(key=lambda one: one.onset_step or 0)
    return tuple(replace(one, number=number) for number, one in enumerate(incidents, 1)), tuple(missing)


def _timed(incident: Incident, reference: Sequence[CallStep]) -> Incident:
    """The incident with the time of its onset: steps of calls have no numbers that their job knows."""
    since_s = reference[incident.onset_step or 0].begin_s - reference[0].begin_s
    return replace(incident, evidence=(*incident.evidence, f"onset {since_s:.1f} s after the first step"))


def _stall(place: int, seconds: float, usual_s: float) -> Incident:
    told = f"one stalled step of {seconds:.3g} s, usually {usual_s:.3g} s; no lasting slowdown"
    return Incident(
        1, "slow", place, place, place + 1, seconds / usual_s, (), (), (told,), (),
        status="relieved", iteration_before_s=usual_s, iteration_after_s=seconds,
    )  # fmt: skip


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
