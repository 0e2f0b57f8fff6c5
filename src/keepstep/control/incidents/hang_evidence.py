"""Which processes may be ended for a hang, and when: a verdict may come early, so a kill needs a proof of its own.

The proof is about the thread that owes the next operation (`core.summary.Stillness`): for a whole patience it has kept
to one place, and neither its process nor its children have done anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from keepstep.core.events import STEP_PHASES, Phase
from keepstep.core.finding import Finding
from keepstep.core.incident import Culprit, Diagnosis, Incident
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import How, RankState, Stillness
from keepstep.report.wording import who

END_HUNG = "end the hung process"  # the action's name
LOOKS_S = (1.0, 1.0, 2.5, 5.0)  # times between looks at blamed ranks; the last one repeats
_MOST = 4  # most ranks blamed at once: among more it is not sure who holds up whom
_USUAL_S = 600.0  # patience with a rank of which nothing is known: any rank may pause for minutes
_LEAST_S = 60.0  # below that a collective's timeout ends the job before keepstep would
_BEFORE_TIMEOUT_S = 60.0  # time from the end of a process to the first timeout of a collective
_SPINS = 10.0  # a thread that computes may go on so many times as long as one that waits
_NOT_ENDED: dict[How, str] = {  # why a process is not ended, by what it does
    "moves": "rank {rank} works: {why}",
    "kernel": "rank {rank}, or a child of it, waits in the kernel for a device, a file server or a control group",
    "traced": "a debugger holds rank {rank}",
    "unread": "of rank {rank} there is no proof: {why}",
}
# A rank that was found stuck in one of these phases does not merely work for itself.
_OWES = {*STEP_PHASES, Phase.TEARDOWN}
_WINDS_UP = "rank {rank} winds up: its process groups are gone or its script is over, which ends by itself"
_STANDS: dict[How, str] = {  # what a process does that is to be ended
    "still": "nothing of it has moved for {seconds:.0f} s",
    "spins": "it has computed for {seconds:.0f} s without an operation",
    "stopped": "its process has been stopped for {seconds:.0f} s",
}


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a process that hangs is left alone, in seconds."""

    hang_s: float = 0.0  # with a thread that waits; 0: by the timeouts and pauses of its rank
    stopped_s: float = 60.0  # with a stopped process: gcore, CRIU and operators let it go on

    def with_rank(self, state: RankState, limit_s: float) -> float:
        """Patience with this rank. ``limit_s``: the limit that it exceeded, by its own finding."""
        how = state.stillness.how if state.stillness is not None else "still"
        if how == "stopped":
            return self.stopped_s
        waits_s = self.hang_s
        if not waits_s:
            waits_s = max(_USUAL_S, limit_s, 2 * state.pause_s)
            if state.timeout_s > 0:
                waits_s = max(min(waits_s, state.timeout_s - _BEFORE_TIMEOUT_S), _LEAST_S)
        return waits_s * (_SPINS if how == "spins" else 1.0)

    def left_s(self, state: RankState, limit_s: float) -> float:
        """The time until there is a proof against a rank, if nothing of it moves; 0 or less: there is one."""
        return self.with_rank(state, limit_s) - seen_still_s(state)


def seen_still_s(state: RankState) -> float:
    """How long a rank's process has been seen to hang, up to the last look at it; 0 while it does anything else."""
    seen = state.stillness
    if seen is None or seen.how not in _STANDS:
        return 0.0
    return max(seen.until_s - max(seen.since_s, state.last_progress_s), 0.0)


def winds_up(state: RankState) -> bool:
    """Whether a rank has come to its end: what it still does may take long, and nobody waits for it."""
    return state.phase == Phase.TEARDOWN


def work_for_themselves(
    states: Collection[RankState], stuck: Collection[Finding], *, some_left: bool
) -> bool:
    """Whether a job comes to its end: some ranks have left or wind up, and nobody waits for anybody.

    ``stuck``: the findings of ranks that stand still; not of one that is in the middle of a step, nor of one that has
    wound up for so long that it was found for it. ``some_left``: ranks have ended with exit code 0.
    """
    if not some_left and not any(map(winds_up, states)):
        return False
    waits = (one.in_flight or (one.device is not None and one.device.in_flight) for one in states)
    return not any(waits) and not any(one.phase in _OWES for one in stuck)


def proof(state: RankState, limit_s: float, patience: Patience) -> str:
    """Why a process will not go on by itself; "": that is not proven, as of one that winds up.

    ``limit_s``: the limit that its rank exceeded, by its own finding.
    """
    stillness = state.stillness
    if stillness is None or not state.alive or limit_s <= 0 or stillness.how not in _STANDS:
        return ""
    if patience.left_s(state, limit_s) > 0 or winds_up(state):
        return ""
    seconds = seen_still_s(state)
    where = f" ({stillness.why})" if stillness.why and stillness.how != "stopped" else ""
    return _STANDS[stillness.how].format(seconds=seconds) + where


def tempered(
    diagnosis: Diagnosis,
    states: Mapping[int, RankState],
    standing: Callable[[int], Finding | None],
    patience: Patience,
) -> Diagnosis:
    """The diagnosis of a hang, with no more confidence than there is proof, and with what is known of the processes.

    A living rank that nobody has seen long enough may go on by itself, so it is blamed with medium confidence at most;
    with low confidence while it works, or waits for a child process of its own, as for an upload.
    """
    if diagnosis.kind != "hang":
        return diagnosis
    culprits: list[Culprit] = []
    lines: list[str] = []
    for culprit in diagnosis.culprits:
        state = states.get(culprit.rank) if culprit.rank is not None else None
        if state is None or not state.alive or culprit.confidence == "low":
            culprits.append(culprit)
            continue
        finding, stillness = standing(state.rank), state.stillness
        words = proof(state, finding.limit_s, patience) if finding is not None else ""
        if words:
            lines.append(f"rank {state.rank}: {words}")
            culprits.append(culprit)
            continue
        does = "" if stillness is None else _may_go_on(stillness)
        if does:
            lines.append(f"rank {state.rank} {does}; it may go on by itself")
            culprit = replace(culprit, cause=culprit.cause.replace("asleep", "at work", 1))
        culprits.append(replace(culprit, confidence="low" if does else "medium"))
    return replace(diagnosis, culprits=tuple(culprits), evidence=(*diagnosis.evidence, *lines[:3]))


def _may_go_on(seen: Stillness) -> str:
    """What a process does that is no hang, at least not yet; "": nothing."""
    if seen.how == "moves":
        return f"works: {seen.why}"
    return "waits for a child process of its own" if seen.awaits_child else ""


def blamed_by(
    incident: Incident,
    standing: Callable[[int], Finding | None],
    known_ranks: int,
    ended: Mapping[int, tuple[int, int | None]],
) -> tuple[dict[int, float], str]:
    """The ranks that it would help to end for an open hang, with their limits in seconds; or none, and why not.

    ``standing(rank)``: the finding of a rank that is still stuck. ``ended``: the number of the incident and the step at
    which a rank was ended last.
    """
    if incident.kind != "hang":
        return {}, "the program itself has gone astray, and would again"
    if not incident.culprits:
        return {}, "it is not known who holds the job up"
    blamed: dict[int, float] = {}
    for culprit in incident.culprits:
        if culprit.rank is None:
            return {}, "a link is to blame, no process"
        if culprit.confidence == "low":
            return {}, "it is not sure enough who holds the job up"
        finding = standing(culprit.rank)
        if finding is None:
            return {}, f"{who(culprit)} has not been still for longer than is usual there"
        number, step = ended.get(finding.rank, (incident.number, None))
        if number != incident.number and step == incident.onset_step:
            return {}, f"rank {finding.rank} was ended at this step before, and that did not help"
        blamed[finding.rank] = finding.limit_s
    if len(blamed) > min(_MOST, known_ranks // 2):
        return {}, "of so many ranks it is not sure who holds up whom"
    return blamed, ""


def hang_outlook(
    blamed: Mapping[int, float], states: Mapping[int, RankState], patience: Patience
) -> tuple[str, float | None]:
    """What will be done about the blamed ranks if nothing moves, and in how many seconds; None: nothing.

    ``blamed``: limits in seconds by rank; ``states``: the last known ones.
    """
    ranks = fold_ranks(blamed)
    name = f"rank {ranks}" if len(blamed) == 1 else f"ranks {ranks}"
    known = {rank: states[rank] for rank in blamed if rank in states}
    for rank, state in known.items():
        if state.stillness is not None and state.stillness.how in _NOT_ENDED:
            return f"none: {_NOT_ENDED[state.stillness.how].format(rank=rank, why=state.stillness.why)}", None
        if winds_up(state):
            return f"none: {_WINDS_UP.format(rank=rank)}", None
    if len(known) < len(blamed) or not all(state.process and state.alive for state in known.values()):
        return f"none: it is not known where {name} {'is' if len(blamed) == 1 else 'are'}", None
    left_s = max(patience.left_s(state, blamed[rank]) for rank, state in known.items())
    return f"none yet, it may go on by itself: ends {name}", max(left_s, 0.0) + LOOKS_S[0]
