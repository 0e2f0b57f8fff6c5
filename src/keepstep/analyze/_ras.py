"""Incidents in what NCCL's RAS tells of a job: who is behind in counts of collectives, who is silent, who failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from keepstep.analyze._episodes import judged
from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Confidence, Culprit, Diagnosis, Incident
from keepstep.core.summary import GroupInfo, OpInFlight, RankState, StreamProgress
from keepstep.locate import KINDS, UNTOLD, first_open, locate_hang, told_counts, waiting_in, worded
from keepstep.traces.ras_status import OF_OTHERS, RasAnswer, RasCommunicator, RasRank

_MOST_LINES = 3  # lines of evidence on communicators whose counts differ
_DEAD = "RAS has not reached its process for a minute"
_REPORTED = "NCCL reports: "
_USUAL_LEAD = (
    1  # collectives by which ranks are apart in any job that works, when each is asked at another moment
)


def in_status(answers: Sequence[RasAnswer], apart_s: float) -> tuple[tuple[Incident, ...], tuple[str, ...]]:
    """What is wrong in a job, and what is missing to say more.

    Args:
        answers: one answer, or two of the same job.
        apart_s: seconds between two answers.
    """
    last = answers[-1]
    missing = [*last.missing, "sends and receives, sizes, stacks and phases: RAS does not tell them"]
    stuck = last.communicators
    moves = "counts move on" if len(answers) > 1 and _moves_on(answers[0], last) else ""
    if len(answers) == 1 and 0 < max(map(_lead, stuck), default=0) <= _USUAL_LEAD:
        moves = "a job that works looks the same"
    if moves:
        missing += [f"a hang: {moves}; {told_counts(one.name, one.counts)}" for one in stuck if _lead(one)][
            :_MOST_LINES
        ]
        stuck = tuple(replace(one, ranks=_without_counts(one)) for one in stuck)
    shown = [one for one in stuck if _is_odd(one)]
    if not shown:
        if len(answers) > 1 and stuck == last.communicators and last.is_whole:
            missing.append(
                f"what moved in {apart_s:.0f} s: all ranks have the same counts, which stand still"
            )
        return (), tuple(missing)
    if not last.is_whole and len(shown) > 1:
        shown.sort(key=lambda one: -one.size)
        others = ", ".join(one.name for one in shown[1:5])
        missing.append(f"how communicators hang together, judged is the largest; also odd: {others}")
        shown = shown[:1]
    job = _job_of(stuck if last.is_whole else shown, last.gpus)
    missing += [job.missing] if job.missing else []
    diagnosis = _bounded(job, _diagnosis(job, shown), "low" if len(answers) < 2 else "medium")
    if len(answers) < 2:
        missing.append("a second answer, seconds later: counts that move on are no hang")
    elif not moves:
        stood = f"counts stood still for {apart_s:.0f} s"
        diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, stood))
    hang = Incident(1, diagnosis.kind, None, None, None, None, (), (), (), (), status="open")
    hang = judged(hang, diagnosis, len(job.reporting), len(job.ranks))
    return (hang,), tuple(missing)


def _lead(one: RasCommunicator) -> int:
    """By how many collectives of one kind the ranks of a communicator are apart."""
    counts = list(one.counts.values())
    kinds = {kind for told in counts for kind in told}
    return max(
        (max(told[kind] for told in counts) - min(told[kind] for told in counts) for kind in kinds), default=0
    )


def _moves_on(before: RasAnswer, now: RasAnswer) -> bool:
    """Whether any rank has launched a collective between two answers."""
    known = {one.name: one for one in before.communicators}
    if now.is_whole and known.keys() != {one.name for one in now.communicators}:
        return True
    return any(
        number in known[one.name].ranks and known[one.name].ranks[number].counts != rank.counts
        for one in now.communicators
        if one.name in known
        for number, rank in one.ranks.items()
        if rank.standing == known[one.name].ranks.get(number, rank).standing
    )


def _without_counts(one: RasCommunicator) -> Mapping[int, RasRank]:
    return {number: replace(rank, counts={}) for number, rank in one.ranks.items()}


def _is_odd(one: RasCommunicator) -> bool:
    """Whether ranks of a communicator differ in their counts, do not answer, or report errors."""
    standings = {rank.standing for rank in one.ranks.values()}
    differ = any(one.counts.values())
    failed = any(rank.error for rank in one.ranks.values())
    return differ or failed or not standings.isdisjoint(("silent", "dead"))


@dataclass(frozen=True, slots=True)
class _Job:
    """The ranks of a job.

    ``rank_of``: the rank by communicator and number in it; ``ranks``: who they are, as the last communicator tells;
    ``missing``: why they may have other numbers in the job, "" where they are known.
    """

    rank_of: Mapping[tuple[str, int], int]
    ranks: Mapping[int, RasRank]
    missing: str

    @property
    def reporting(self) -> list[int]:
        """Ranks of which something is known: not those that are silent."""
        return [place for place, rank in sorted(self.ranks.items()) if rank.standing != "silent"]


def _job_of(communicators: Sequence[RasCommunicator], gpus: int) -> _Job:
    """Number the ranks as the communicator that holds the whole job does; where none does, by node and process."""
    everyone = {rank.who for one in communicators for rank in one.ranks.values() if rank.process}
    largest = max(communicators, key=lambda one: one.size)
    numbers = {rank.who: number for number, rank in largest.ranks.items() if rank.process}
    missing = ""
    if len(communicators) > 1 and not everyone <= numbers.keys():
        numbers = {who: number for number, who in enumerate(sorted(everyone))}
        missing = "ranks of the job: no communicator holds all, so they are numbered by node and process"
    elif 0 < gpus != largest.size:
        missing = f"ranks of the job: these are numbers in communicator {largest.name}"
    rank_of: dict[tuple[str, int], int] = {}
    ranks: dict[int, RasRank] = {}
    for one in communicators:
        for number, rank in one.ranks.items():
            place = numbers.get(rank.who, number if one is largest and not missing else None)
            if place is None and len(communicators) == 1:
                place = number
            if place is None:
                continue
            rank_of[one.name, number] = place
            ranks[place] = rank
    return _Job(rank_of, ranks, missing)


def _diagnosis(job: _Job, shown: Sequence[RasCommunicator]) -> Diagnosis:
    """Who holds the job up: a rank in which NCCL failed, else the root of the wait-for graph."""
    found = _located(job, shown)
    lines = [told_counts(one.name, one.counts) for one in shown if any(one.counts.values())][:_MOST_LINES]
    failed = [
        (place, rank.error)
        for one in shown
        for number, rank in sorted(one.ranks.items())
        if rank.error and (place := job.rank_of.get((one.name, number))) is not None
    ]
    failed = list(dict.fromkeys(failed))
    lines += [f"rank {place}: {_REPORTED}{error}" for place, error in failed[:_MOST_LINES]]
    own = [(place, error) for place, error in failed if error not in OF_OTHERS]
    if own:
        blamed = {place for place, _ in own}
        culprits = tuple(_named(job, place, f"{_REPORTED}{error}", "medium") for place, error in own[:64])
        victims = tuple(sorted({*found.victims, *job.reporting} - blamed))
        found = replace(found, culprits=culprits, victims=victims)
    else:
        found = replace(found, culprits=tuple(_with_process(job, one) for one in found.culprits))
    return replace(found, evidence=(*found.evidence, *lines))


def _located(job: _Job, shown: Sequence[RasCommunicator]) -> Diagnosis:
    """What the hang locator says where ranks count as waiting in the first collective that others have not launched."""
    flights: dict[int, list[OpInFlight]] = {}
    streams: dict[int, list[StreamProgress]] = {}
    groups: dict[str, GroupInfo] = {}
    for one in shown:
        places = [job.rank_of.get((one.name, number)) for number in range(one.size)]
        groups[one.name] = GroupInfo(one.name, tuple(place for place in places if place is not None))
        counts = one.counts
        seq, calls = first_open(counts) if any(counts.values()) else _last_launched(one)
        for number, rank in one.ranks.items():
            place = job.rank_of.get((one.name, number))
            if place is None or rank.standing in ("silent", "dead", "not in"):
                continue
            flight, stream = waiting_in(one.name, seq, calls.get(number), 0.0)
            streams.setdefault(place, []).append(stream)
            flights.setdefault(place, []).extend(flight)
    states = [
        RankState(place, job.ranks[place].standing != "dead", -1, -1, 0.0, 0, 0.0, 0.0, tuple(flights.get(place, ())),
                  tuple(streams.get(place, ())), "?")
        for place in job.reporting
    ]  # fmt: skip
    nodes = {place: rank.host for place, rank in job.ranks.items()}
    found = locate_hang(Evidence(groups, nodes, states=states))
    return worded(found)


def _last_launched(one: RasCommunicator) -> tuple[int, dict[int, Op]]:
    """The last collective of a communicator whose ranks have all launched as many, where some rank does not answer."""
    counts = next((rank.counts for rank in one.ranks.values() if rank.counts), dict[str, int]())
    kinds = [kind for kind, count in counts.items() if count]
    op = KINDS.get(kinds[0].lower(), UNTOLD) if len(kinds) == 1 else UNTOLD
    inside = [number for number, rank in one.ranks.items() if rank.standing == "in"]
    waits = any(rank.standing in ("silent", "dead") for rank in one.ranks.values())
    return max(sum(counts.values()), 1), dict.fromkeys(inside if waits else (), op)


def _named(job: _Job, place: int, cause: str, confidence: Confidence) -> Culprit:
    return _with_process(job, Culprit(place, None, job.ranks[place].host, "", 0.0, confidence, cause))


def _with_process(job: _Job, culprit: Culprit) -> Culprit:
    """The culprit with its process, by which it can be found on its node."""
    rank = job.ranks.get(-1 if culprit.rank is None else culprit.rank)
    if rank is None:
        return culprit
    on = f" on GPU {rank.gpu}" if rank.gpu else ""
    parts = [_DEAD if rank.standing == "dead" else "", f"process {rank.process}{on}" if rank.process else ""]
    cause = "unreachable" if rank.standing == "dead" else culprit.cause
    return replace(culprit, cause=cause, detail="; ".join(filter(None, (culprit.detail, *parts))))


def _bounded(job: _Job, found: Diagnosis, most: Literal["medium", "low"]) -> Diagnosis:
    """The diagnosis with nobody blamed more surely than ``most`` for counts, and than medium for anything.

    RAS tells neither what has ended nor of what size it was. What NCCL says of one rank does not change with time.
    """

    def bounded(one: Culprit) -> Confidence:
        rank = job.ranks.get(-1 if one.rank is None else one.rank)
        is_told = rank is not None and (rank.standing == "dead" or one.cause.startswith(_REPORTED))
        return "low" if one.confidence == "low" else "medium" if is_told else most

    return replace(found, culprits=tuple(replace(one, confidence=bounded(one)) for one in found.culprits))
