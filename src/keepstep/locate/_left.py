"""Ranks that ended with exit code 0: who left while others wait for them, and who waits though all have left in order.

That a rank has ended well is no fault. It becomes one only where others are in an operation that lacks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.finding import Finding
from keepstep.core.group_names import shown_name
from keepstep.core.incident import Confidence, Culprit, Diagnosis
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import OpInFlight, RankState
from keepstep.locate._calls import ranks_of
from keepstep.locate._device_calls import device_groups
from keepstep.locate._hang_graph import FEW, MAX_CULPRITS, is_of
from keepstep.locate._waiting import Pending, pending_operations

LEFT = "left with exit code 0"
ONE_MORE = "made one operation more than the others"
_SURE: tuple[Confidence, ...] = ("low", "medium", "high")


def left_well(evidence: Evidence) -> dict[int, Finding]:
    """The ranks that ended with exit code 0, by what their launchers reported; without those that run again."""
    runs = {state.rank: state.incarnation for state in evidence.states}
    exits = [finding for finding in evidence.findings if finding.kind == "exit"]
    return {one.rank: one for one in exits if runs.get(one.rank, -1) <= one.incarnation}


def diagnose_left(
    evidence: Evidence, left: Mapping[int, Finding], locate: Callable[[Evidence], Diagnosis]
) -> Diagnosis:
    """Judge a hang of a job that some ranks have ``left`` well; ``locate`` judges it where that is not the reason."""
    states = [_as_idle(state) if state.rank in left else state for state in evidence.states]
    told = {state.rank for state in states}
    states += [_unseen(finding) for rank, finding in sorted(left.items()) if rank not in told]
    # What a device has not finished is told by the recorders of the living; one that has left has none.
    device = device_groups(evidence.states, evidence.groups)
    ended = [_as_idle(state) if state.rank in left else state for state in device.states]
    ended += [state for state in states if state.rank not in told]
    pending = pending_operations([state for state in ended if state.alive], evidence.groups)
    # An operation that its ranks do not wait for, such as a send on its way, holds nobody up.
    held = [p for p in pending if p.firm and not p.one_sided and not left.keys().isdisjoint(p.absent)]
    if not held:
        found = locate(replace(evidence, states=states, findings=()))
        return replace(found, culprits=tuple(one for one in found.culprits if one.rank not in left))
    by_rank = {state.rank: state for state in ended}
    one_more = next((p for p in held if _is_one_more(p, left, by_rank)), None)
    if one_more is not None:
        return _diagnose_one_more(evidence, one_more, left, by_rank)
    waiting = {rank for p in pending for rank in p.waiting}
    found = _diagnose_early(evidence, held, waiting, left, by_rank)
    if any(p.group in device.names for p in held):  # how many of these it had called is not known
        culprits = tuple(
            replace(one, confidence=min(one.confidence, "medium", key=_SURE.index)) for one in found.culprits
        )
        found = replace(found, culprits=culprits)
    return found


def flight_of(state: RankState, p: Pending) -> OpInFlight | None:
    """The rank's part of an operation."""
    return next((one for one in state.in_flight if is_of(one, p)), None)


def place_of(flights: Sequence[OpInFlight]) -> str:
    """The operation that these ranks are in, and the line of user code from which most of them called it."""
    if not flights:
        return "an operation"
    names = "/".join(sorted({Op(one.op).name for one in flights}))
    sites = Counter(one.site for one in flights if one.site)
    return (
        f"{names} at {sites.most_common(1)[0][0]}"
        if sites
        else f"{names} of group {shown_name(flights[0].group)}"
    )


def _as_idle(state: RankState) -> RankState:
    """The state of a rank that has left: in no operation, and what it has done counts."""
    return replace(state, alive=True, in_flight=(), failed=())


def _unseen(finding: Finding) -> RankState:
    """The state of a rank that has left, of which no agent tells anything any more."""
    return RankState(finding.rank, True, finding.step - 1, -1, 0.0, 0, 0.0, 0.0)


def _made(state: RankState, group: str) -> int:
    """How many collectives of a group a rank has entered."""
    return max((one.started for one in state.streams if one.group == group and one.peer < 0), default=0)


def _is_one_more(p: Pending, left: Mapping[int, Finding], states: Mapping[int, RankState]) -> bool:
    """Whether all others have left after equally many operations, and nobody but those who wait ever makes this one.

    Not an operation that each of their iterations has: from those others may also leave too early.
    """
    if not p.collective or p.unknown or not left.keys() >= set(p.absent) or len(p.waiting) > len(p.absent):
        return False
    if any(_made(states[rank], p.group) != p.seq - 1 or not states[rank].streams for rank in p.absent):
        return False
    flights = [flight for rank in p.waiting if (flight := flight_of(states[rank], p)) is not None]
    return not any(flight.repeats for flight in flights)


def _diagnose_one_more(
    evidence: Evidence, p: Pending, left: Mapping[int, Finding], states: Mapping[int, RankState]
) -> Diagnosis:
    """Blame those who wait: where they are as many as those who left, either may be meant."""
    tie = len(p.waiting) == len(p.absent)
    sure: Confidence = "low" if tie else "high"
    gone = f"{ranks_of(p.absent)} {'has' if len(p.absent) == 1 else 'have'} {LEFT}"
    culprits: list[Culprit] = []
    for rank in p.waiting[:MAX_CULPRITS]:
        flight = flight_of(states[rank], p)
        where = place_of([flight] if flight is not None else [])
        detail = f"in {where}, which nobody else makes: {gone}"
        culprits.append(Culprit(rank, None, evidence.nodes.get(rank, ""), "", 0.0, sure, ONE_MORE, detail))
    group = f"operations of group {shown_name(p.group)}"
    told = f"{ranks_of(p.absent)} entered {p.seq - 1} {group}, {ranks_of(p.waiting)} {p.seq}"
    missing = ("which is meant: as many ranks make this operation as do not",) if tie else ()
    summary = f"{ranks_of(p.waiting)} {ONE_MORE}"
    return Diagnosis("hang", tuple(culprits), (), (f"{gone} in good order", told), missing, summary)


def _diagnose_early(
    evidence: Evidence,
    held: Sequence[Pending],
    waiting: Collection[int],
    left: Mapping[int, Finding],
    states: Mapping[int, RankState],
) -> Diagnosis:
    """Blame the ranks that left while others wait for them; of several in one operation, those that made fewest."""
    blamed: set[int] = set()
    for p in held:
        gone = [rank for rank in p.absent if rank in left]
        seen = [_made(states[rank], p.group) for rank in gone if states[rank].streams]
        fewest = min(seen, default=0)  # what those made of whom nothing was seen is not known
        blamed |= {
            rank
            for rank in gone
            if not p.collective or not states[rank].streams or _made(states[rank], p.group) == fewest
        }
    order = sorted(blamed, key=lambda rank: (_step(rank, left, states), rank))
    victims = tuple(sorted(set(waiting) - blamed))
    unknown = sorted(
        {rank for p in held for rank in p.unknown} | (blamed - {s.rank for s in evidence.states})
    )
    sure: Confidence = "medium" if unknown else "high"
    if len(order) > FEW and 2 * len(order) > max(len(evidence.nodes), len(evidence.states)):
        sure = "low"
    culprits: list[Culprit] = []
    for rank in order[:MAX_CULPRITS]:
        p = next(p for p in held if rank in p.absent)
        flights = [one for other in p.waiting if (one := flight_of(states[other], p)) is not None]
        step = _step(rank, left, states)
        when = f"at step {step}" if step > 0 else "before its first step"
        verb = "was" if len(p.waiting) == 1 else "were"
        detail = f"{when} while {ranks_of(p.waiting)} {verb} in {place_of(flights)}"
        node = evidence.nodes.get(rank, left[rank].node)
        culprits.append(Culprit(rank, None, node, "", 0.0, sure, LEFT, detail))
    told = f"{ranks_of(victims)} wait{'s' if len(victims) == 1 else ''} in {held[0]}; {ranks_of(order)} made no more"
    missing = (f"states of ranks {fold_ranks(unknown)}",) if unknown else ()
    return Diagnosis("hang", tuple(culprits), victims, (told,), missing, f"{ranks_of(order)} {LEFT}")


def _step(rank: int, left: Mapping[int, Finding], states: Mapping[int, RankState]) -> int:
    """The step that a rank was in when it left."""
    return max(states[rank].step + 1, left[rank].step)
