"""Which processes may be ended for a hang: a verdict may come early, so a kill needs evidence of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from keepstep.core.finding import Finding
from keepstep.core.incident import Incident
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import RankState
from keepstep.report.wording import who

LOOKS_S = (0.5, 0.5, 1.0, 5.0)  # times between looks at blamed ranks; the last one repeats
APART_S = 0.4  # least time between two looks that prove that a process sleeps
_MOST = 4  # most ranks blamed at once: among more it is not sure who holds up whom
_PAUSE_S = 30.0  # any rank may pause this long: a slow disk, a compilation
_LONG = 10.0  # a rank that computes may pause so many times as long as one that sleeps
_NOT_ENDED = {  # why a hung process is not ended, by process state
    "D": "rank {rank} waits in the kernel, where no signal ends it",
    "t": "a debugger holds rank {rank}",
}


def evidence(first: RankState, last: RankState, limit_s: float) -> str:
    """Why a process, seen in two states one after the other, will not go on by itself; "": it may.

    ``limit_s``: more than the longest pause that it has shown in this phase, by its own finding.
    """
    same = (last.process, last.progress) == (first.process, first.progress)
    stuck_s = last.now_s - last.last_progress_s
    if not last.alive or not same or limit_s <= 0 or patience_left_s(last, limit_s) > 0:
        return ""
    if last.process_state == "T":
        return "its process is stopped"
    if first.process_state == last.process_state == "S" and last.now_s - first.now_s >= APART_S:
        return f"asleep, no progress for {stuck_s:.0f} s"
    return f"no progress for {stuck_s:.0f} s" if last.process_state == "R" else ""


def patience_left_s(state: RankState, limit_s: float) -> float:
    """The time until there may be evidence against a rank, if it makes no progress."""
    patience_s = limit_s
    if state.process_state != "T":
        patience_s = max(limit_s, _PAUSE_S) * (_LONG if state.process_state == "R" else 1.0)
    return patience_s - (state.now_s - state.last_progress_s)


def blamed_by(
    incident: Incident, standing: Callable[[int], Finding | None], known_ranks: int
) -> tuple[dict[int, float], str]:
    """The ranks that it would help to end for an open hang, with their limits in seconds; or none, and why not.

    ``standing(rank)``: the finding of a rank that is still stuck.
    """
    if incident.kind != "hang":
        return {}, "the program itself has gone astray, and would again"
    if not incident.culprits:
        return {}, "it is not known who holds the job up"
    blamed: dict[int, float] = {}
    for culprit in incident.culprits:
        if culprit.link is not None:
            return {}, "a link is to blame, no process"
        if culprit.confidence == "low":
            return {}, "it is not sure enough who holds the job up"
        finding = standing(culprit.rank) if culprit.rank is not None else None
        if finding is None:
            return {}, f"{who(culprit)} has not been still for longer than is usual there"
        blamed[finding.rank] = finding.limit_s
    if len(blamed) > min(_MOST, max(known_ranks, 2) // 2):
        return {}, "of so many ranks it is not sure who holds up whom"
    return blamed, ""


def hang_outlook(blamed: Mapping[int, float], states: Mapping[int, RankState]) -> tuple[str, float | None]:
    """What will be done about the blamed ranks if nothing moves, and in how many seconds; None: nothing.

    ``blamed``: limits in seconds by rank; ``states``: the last known ones.
    """
    ranks = fold_ranks(blamed)
    name = f"rank {ranks}" if len(blamed) == 1 else f"ranks {ranks}"
    known = {rank: states[rank] for rank in blamed if rank in states}
    for rank, state in known.items():
        if state.process_state in _NOT_ENDED:
            return f"none: {_NOT_ENDED[state.process_state].format(rank=rank)}", None
    if len(known) < len(blamed) or not all(state.process and state.alive for state in known.values()):
        return f"none: it is not known where {name} {'is' if len(blamed) == 1 else 'are'}", None
    left_s = max(patience_left_s(state, blamed[rank]) for rank, state in known.items())
    return f"ends {name}", max(left_s, 0.0) + LOOKS_S[0]
