"""Ranks that called one collective differently: another operation, another size, another type. The minority is odd.

What follows from it is no cause: on Gloo a size that does not fit aborts a process or raises in it, and that is not
always the one that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.group_names import shown_name
from keepstep.core.incident import Confidence, Diagnosis
from keepstep.core.summary import GroupInfo, RankState
from keepstep.locate._calls import (
    Aspect,
    Call,
    Mismatch,
    first_mismatch,
    habit,
    named,
    ranks_of,
    site_of,
)
from keepstep.locate._hang_graph import FEW, MAX_CULPRITS, HangEvidence, arranged

_CAUSES: dict[Aspect, str] = {
    "op": "entered another operation",
    "bytes": "another size",
    "element": "another element type",
    "reduction": "another reduction",
}
_DIFFER: dict[Aspect, str] = {
    "op": "operations differ",
    "bytes": "sizes differ",
    "element": "element types differ",
    "reduction": "reductions differ",
}
_ALIKE = frozenset({Op.ALLREDUCE, Op.BROADCAST, Op.REDUCE})
"""Operations to which all ranks give as many bytes; of others a library may make one with a size for each rank."""
_TWO_THREADS = "two threads on one group"


def calls_differ(states: Sequence[RankState], groups: Mapping[str, GroupInfo]) -> bool:
    """Whether ranks have called one collective so differently that it cannot end, however long they wait.

    They called different operations under one number, or gave different sizes to one in which all have to be alike.
    """
    found = first_mismatch(states, groups)
    if found is None:
        return False
    ops = {call.op for call in found.calls.values()}
    return found.aspect == "op" or (found.aspect == "bytes" and ops <= _ALIKE)


def locate_mismatch(evidence: Evidence) -> Diagnosis | None:
    """Name the ranks whose last collectives do not fit those of the others; None where all fit.

    It reads ``states`` (of dead ranks, too: their rings outlive them), ``groups`` and ``nodes``. What came of it, such
    as a death in the operation, is a consequence.
    """
    return diagnose_mismatch(arranged(evidence))


def diagnose_mismatch(known: HangEvidence) -> Diagnosis | None:
    """As `locate_mismatch`, with evidence that is arranged already."""
    found = first_mismatch(list(known.states.values()), known.given.groups)
    if found is None:
        return None
    odd, sure, told = _odd(found)
    if found.is_tied and not told and len(odd) > FEW:
        odd = []  # to name half of many ranks tells nothing
    # On a GPU all ranks call from two threads, their own and autograd's, one after the other.
    usual = max(len(_threads(known.states[rank], found.group)) for rank in found.classes[0])
    twice = [
        rank
        for rank in odd
        if _waits_twice(known.states[rank], found.group)
        or (not found.is_tied and len(_threads(known.states[rank], found.group)) > max(usual, 1))
    ]
    in_words = _in_words(found, odd)
    culprits = tuple(
        replace(culprit, detail="; ".join(filter(None, (in_words, culprit.detail))))
        for rank in odd[:MAX_CULPRITS]
        for cause in [_TWO_THREADS if rank in twice else _CAUSES[found.aspect]]
        for culprit in [known.culprit(rank, None, sure, cause)]
    )
    lines = [in_words, *_sites(found, odd), *told]
    if ended := [rank for rank, call in sorted(found.calls.items()) if _has_fallen(known.states[rank], call)]:
        lines.append(f"{ranks_of(ended)} failed in it or died: a consequence, whoever it was")
    if twice:
        lines.append(f"{ranks_of(twice)} called the group from two threads: their order is left to chance")
    missing = (
        ("which of them is meant: as many ranks called it one way as the other",) if found.is_tied else ()
    )
    main = next(
        (p for p in known.pending if (p.group, p.seq, p.collective) == (found.group, found.seq, True)), None
    )
    diagnosis = known.diagnosis(culprits, set(odd), main, lines, missing, "desync")
    victims = sorted({*diagnosis.victims, *found.calls} - set(odd))
    names = "/".join(Op(op).name for op in sorted({call.op for call in found.calls.values()}))
    stands = main is not None and main.stuck_s >= 1 and " stuck " in diagnosis.summary
    stuck = f" stuck {main.stuck_s:.0f} s" if main is not None and stands else ""
    summary = f"group {shown_name(found.group)} {names} seq {found.seq}: {_DIFFER[found.aspect]}{stuck}"
    return replace(diagnosis, victims=tuple(victims), summary=summary)


def _odd(found: Mismatch) -> tuple[list[int], Confidence, list[str]]:
    """The odd ranks, how sure that is, and evidence: the minority; of equally many those who never called it there."""
    most, *others = found.classes
    if not found.is_tied:
        is_most = 2 * len(most) > found.members
        return sorted(rank for ranks in others for rank in ranks), "high" if is_most else "medium", []
    tied = [ranks for ranks in found.classes if len(ranks) == len(most)]
    fewer = [rank for ranks in found.classes if len(ranks) < len(most) for rank in ranks]
    habits = {ranks: habit([found.calls[rank] for rank in ranks]) for ranks in tied}
    new = [ranks for ranks in tied if habits[ranks] == 0]
    used = [ranks for ranks in tied if habits[ranks] > 0]
    if len(new) + len(used) == len(tied) and len(used) == 1:
        odd = sorted(fewer + [rank for ranks in new for rank in ranks])
        told = (
            f"{ranks_of(odd)} had never called it after what came before; "
            f"{ranks_of(used[0])} had, {habits[used[0]]} times"
        )
        return odd, "low", [told]
    return sorted(rank for ranks in found.classes for rank in ranks), "low", []


def _in_words(found: Mismatch, odd: Sequence[int]) -> str:
    """``rank 1 in ALLGATHER of 80 B (20 float32), ranks 0,2 of 128 B (32 float32)``, the odd ones first."""
    parts: list[str] = []
    last_op = -1
    for ranks in _odd_first(found, odd):
        call = found.calls[ranks[0]]
        words = named(
            call,
            found.members,
            with_op=call.op != last_op or not call.element,
            with_reduction=found.aspect == "reduction",
        )
        parts.append(
            f"{ranks_of(ranks)} {words}" if words.startswith("of ") else f"{ranks_of(ranks)} in {words}"
        )
        last_op = call.op
    return ", ".join(parts)


def _sites(found: Mismatch, odd: Sequence[int]) -> list[str]:
    """A line with the places in the user's code that called it."""
    where = {ranks: site_of(found.calls[rank] for rank in ranks) for ranks in _odd_first(found, odd)}
    known = {ranks: site for ranks, site in where.items() if site}
    if not known:
        return []
    if len(set(where.values())) == 1:
        return [f"all called it at {next(iter(known.values()))}"]
    return ["called by " + ", by ".join(f"{ranks_of(ranks)} at {site}" for ranks, site in known.items())]


def _odd_first(found: Mismatch, odd: Sequence[int]) -> list[tuple[int, ...]]:
    return sorted(found.classes, key=lambda ranks: (not set(ranks) <= set(odd), len(ranks), ranks))


def _has_fallen(state: RankState, call: Call) -> bool:
    return call.failed or (call.is_open and not state.alive)


def _threads(state: RankState, group: str) -> set[int]:
    """The threads from which the rank has made its last calls of the group."""
    inside = [one.thread for one in (*state.in_flight, *state.failed) if one.group == group and one.peer < 0]
    left = [one.thread for stream in state.streams if stream.group == group for one in stream.ended]
    return {thread for thread in (*inside, *left) if thread}


def _waits_twice(state: RankState, group: str) -> bool:
    """Whether two threads of the rank are in operations of the group at once, and wait."""
    inside = [one for one in state.in_flight if one.group == group and one.peer < 0]
    threads = {one.thread for one in inside if one.thread}
    return len(threads) > 1 and sum(one.waits for one in inside) > 1
