"""Slowdowns, stalled iterations and timed-out operations in training logs, and which ranks they are due to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, hypot, sqrt
from statistics import median, median_low

from keepstep.analyze._episodes import WARM_UP, judged, slow_episodes, stalls, stalls_told
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Culprit, Diagnosis, Incident
from keepstep.core.ranges import fold_ranks
from keepstep.locate import locate_hang
from keepstep.traces.log_runs import LoggedIteration, LoggedRun
from keepstep.traces.training_log import TrainingLog
from keepstep.traces.watchdog import Timeouts

_LEAST_SHARE = 0.25  # part of the job's growth that a rank's own time must show
_EXPLAINS = 0.5  # part of it from which that rank alone is the reason
_ALIKE = 0.5  # part of the greatest growth; ranks above it cannot be told apart
_LEAST_TIMES = 3  # iterations with times of ranks, before and during a slowdown
_FEW = 1 / 3  # the largest share of the waiting ranks that may be suspected for their silence
_SLOWER = 1.1  # least ratio of a run's iterations to those of the run before
_SURE = 5  # standard errors by which they differ at least
_LEAST_HEALTHY = 8  # iterations of each
_JOB_ONLY = "times per rank: the log has the job's iteration time only"


def in_training_log(log: TrainingLog, name: str) -> tuple[tuple[Incident, ...], tuple[str, ...]]:
    """The incidents in a log, and what is missing to say more. ``name``: of the file."""
    incidents: list[Incident] = []
    missing: list[str] = list(log.missing)
    before: dict[int, _Usual] = {}
    for place, run in enumerate(log.runs):
        where = f"run {place + 1} of {len(log.runs)} in {name}" if len(log.runs) > 1 else name
        found = _slowdowns(run, where, log.speed)
        missing += stalls_told(_stalls(run, found), where, "iteration")
        missing += _slower_than(before, run, found, place, where, log.speed)
        if run.timeouts is not None:
            found.append(_hang(run.timeouts, where, log.world_size))
        incidents += [replace(one, incarnation=place) for one in found]
    return tuple(replace(one, number=number) for number, one in enumerate(incidents, 1)), tuple(missing)


def _workloads(run: LoggedRun) -> list[list[LoggedIteration]]:
    """The iterations by their global batch size: another one is more or less work, not another speed."""
    found: dict[int, list[LoggedIteration]] = {}
    for one in run.iterations:
        found.setdefault(one.batch, []).append(one)
    return list(found.values())


def _warm_up(numbers: Sequence[int]) -> int:
    """How many times are of the first iterations: a log with every n-th iteration only may have means over n."""
    apart = median(later - number for number, later in pairwise(numbers)) if len(numbers) > 1 else 1
    return max(ceil(WARM_UP / apart), 1)


def _slowdowns(run: LoggedRun, where: str, speed: str) -> list[Incident]:
    workloads = _workloads(run)
    found: list[Incident] = []
    for alike in workloads:
        source = f"{len(alike)} iterations of {where}"
        if len(workloads) > 1:
            source += f" with global batch size {alike[0].batch}"
        numbers = [one.number for one in alike]
        times = [one.seconds for one in alike]
        for incident in slow_episodes(times, numbers, source, _warm_up(numbers)):
            diagnosis = _slow_ranks(run.by_rank, incident, numbers)
            ranks = {rank for own in run.by_rank.values() for rank in own}
            one = judged(incident, diagnosis, len(ranks), max(ranks, default=-1) + 1)
            found.append(_in_speeds(one, speed) if speed else one)
    return sorted(found, key=lambda one: one.onset_step or 0)


@dataclass(frozen=True, slots=True)
class _Usual:
    """What an iteration usually takes in a run outside of slowdowns, and the error of that (both seconds)."""

    run: int
    seconds: float
    error_s: float


def _slower_than(
    before: dict[int, _Usual], run: LoggedRun, slow: Sequence[Incident], place: int, where: str, speed: str
) -> list[str]:
    """Lines on a run that is slower throughout than the last one with iterations of the same batch size.

    ``before``: by batch size, of the last run that had it; it is kept up to date.
    """
    lines: list[str] = []
    spans = [(one.onset_step or 0, one.relief_step) for one in slow]
    for alike in _workloads(run):
        times = [
            one.seconds
            for one in alike[_warm_up([one.number for one in alike]) :]
            if not any(onset <= one.number and (end is None or one.number < end) for onset, end in spans)
        ]
        if len(times) < _LEAST_HEALTHY:
            continue
        usual = median(times)
        spread = 1.4826 * median(abs(one - usual) for one in times)
        now = _Usual(place, usual, 1.25 * spread / sqrt(len(times)))
        last = before.get(alike[0].batch)
        before[alike[0].batch] = now
        if last is None or usual < _SLOWER * last.seconds:
            continue
        if usual - last.seconds < _SURE * hypot(now.error_s, last.error_s):
            continue
        if speed:
            told = f"{speed} a second: {_speed(1 / last.seconds)} -> {_speed(1 / usual)}"
        else:
            told = f"iteration {last.seconds:.3g} s -> {usual:.3g} s"
        ratio = usual / last.seconds
        lines.append(f"why {where} is slower throughout than run {last.run + 1}: {told} (×{ratio:.2f})")
    return lines


def _in_speeds(incident: Incident, unit: str) -> Incident:
    """The incident of a log that has speeds: its iteration times are the inverse of them, and mean nothing."""
    before, after = incident.iteration_before_s or 1.0, incident.iteration_after_s or 1.0
    told = f"{unit} a second: {_speed(1 / before)} -> {_speed(1 / after)}"
    evidence = (*incident.evidence, told)
    return replace(incident, iteration_before_s=None, iteration_after_s=None, evidence=evidence)


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _stalls(run: LoggedRun, slow: Iterable[Incident]) -> list[tuple[int, float, float]]:
    """(iteration, seconds, usual seconds) of single stalled iterations, outside of slowdowns' edges."""
    edges = {step for one in slow for step in (one.onset_step, one.relief_step)}
    return [
        (alike[place].number, seconds, usual)
        for alike in _workloads(run)
        for place, seconds, usual in stalls(
            [one.seconds for one in alike], _warm_up([one.number for one in alike])
        )
        if alike[place].number not in edges
    ]


def _slow_ranks(
    by_rank: Mapping[int, Mapping[int, float]], incident: Incident, numbers: Sequence[int]
) -> Diagnosis:
    """Name the ranks whose own times grew more than the others', if any did."""
    onset, relief = incident.onset_step or 0, incident.relief_step
    slow = [n for n in numbers if onset <= n and (relief is None or n < relief) and n in by_rank]
    healthy = [n for n in numbers if n < onset and n in by_rank][-max(len(slow), _LEAST_TIMES) * 4 :]
    if len(slow) < _LEAST_TIMES or len(healthy) < _LEAST_TIMES:
        return Diagnosis("slow", missing=(_JOB_ONLY,))
    ranks = sorted({rank for n in slow for rank in by_rank[n]})
    before, after = _behind(by_rank, healthy, ranks), _behind(by_rank, slow, ranks)
    growth = {rank: after[rank] - before[rank] for rank in ranks}
    greatest = max(growth.values())
    job = (incident.iteration_after_s or 0.0) - (incident.iteration_before_s or 0.0)
    named = [rank for rank in ranks if growth[rank] >= _ALIKE * greatest]
    if greatest < _LEAST_SHARE * job or 2 * len(named) > len(ranks):
        told = f"the times of {len(ranks)} ranks grew alike, or by less than the iteration"
        return Diagnosis("slow", evidence=(told,), missing=("what the ranks wait for",))
    sure = len(named) == 1 and greatest >= _EXPLAINS * job
    usual = {rank: _usual(by_rank, healthy, rank) for rank in named}
    now = {rank: _usual(by_rank, slow, rank) for rank in named}
    culprits = tuple(
        Culprit(
            rank, slowdown=round(now[rank] / usual[rank], 2) if usual[rank] else 0.0,
            confidence="high" if sure else "medium", cause="compute", detail="its own time in the log grew",
        )
        for rank in sorted(named, key=lambda rank: -growth[rank])
    )  # fmt: skip
    told = f"ranks {fold_ranks(named)}: {greatest / job:.0%} of the job's growth more than the other ranks"
    return Diagnosis("slow", culprits, tuple(sorted(set(ranks) - set(named))), (told,))


def _behind(
    by_rank: Mapping[int, Mapping[int, float]], numbers: Sequence[int], ranks: Sequence[int]
) -> dict[int, float]:
    """By how much each rank is slower than half of the others, median over iterations; not told is not slower."""
    behind: dict[int, list[float]] = {rank: [] for rank in ranks}
    for number in numbers:
        own = by_rank[number]
        middle = median_low(own.values())
        for rank in ranks:
            behind[rank].append(own.get(rank, middle) - middle)
    return {rank: median(values) for rank, values in behind.items()}


def _usual(by_rank: Mapping[int, Mapping[int, float]], numbers: Iterable[int], rank: int) -> float:
    own = [by_rank[number][rank] for number in numbers if rank in by_rank[number]]
    return median(own) if own else 0.0


def _hang(told: Timeouts, where: str, world_size: int) -> Incident:
    """The hang in which operations timed out."""
    world = max(world_size, max(told.heard) + 1)
    nodes = {state.rank: "" for state in told.states}
    diagnosis = locate_hang(Evidence(told.groups, nodes, states=told.states))
    in_messages = _in_messages(told)
    kept = tuple(one for one in diagnosis.culprits if one.rank not in in_messages)
    diagnosis = replace(diagnosis, culprits=kept)
    silent = sorted(set(range(world)) - told.heard)
    missing = [f"words of ranks {fold_ranks(silent)}: the log has none"] if silent else []
    if not kept:
        diagnosis = _suspects(told, diagnosis, world)
    elif len(told.waiting) < 2:
        diagnosis = diagnosis.doubted("the words of other ranks that wait")
    missing.append("stacks and phases: a watchdog tells of none")
    diagnosis = replace(diagnosis, missing=(*diagnosis.missing, *missing))
    hang = Incident(
        1, diagnosis.kind, None, None, None, None, (), (), (f"watchdogs in {where}",), (), status="ended"
    )
    return judged(hang, diagnosis, len(told.states), world)


def _in_messages(told: Timeouts) -> set[int]:
    """Ranks that timed out in a message: they wait for somebody themselves."""
    return set(told.waiting) - {state.rank for state in told.states if state.in_flight}


def _suspects(told: Timeouts, found: Diagnosis, world: int) -> Diagnosis:
    """Nobody is behind by the numbers: then those that wait in nothing, or said nothing, if they are few."""
    idle = sorted(told.heard - told.waiting)
    silent = sorted(set(range(world)) - told.heard)
    for suspects, cause in ((idle, "waits in no operation"), (silent, "not heard of")):
        if suspects and len(suspects) <= _FEW * len(told.waiting):
            sure = len(suspects) == 1 and cause != "not heard of"
            culprits = tuple(
                Culprit(
                    rank, confidence="medium" if sure else "low", cause=cause,
                    detail=told.errors.get(rank, "all others that spoke wait"),
                )
                for rank in suspects
            )  # fmt: skip
            return replace(found, culprits=culprits, victims=tuple(sorted(told.waiting)))
    return replace(
        found, culprits=(), missing=("a rank that is behind the others: all that spoke wait alike",)
    )
