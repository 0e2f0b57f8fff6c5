"""Who holds everybody up: the roots of the wait-for graph (MegaTrace §III-C, "Locate hang issue").

A rank in an operation waits for the members that have not entered it. The culprit waits for nobody: it is in
no operation, or its process is stopped or dead. If all members are in and none gets out, the transfer is
stuck (`_hang_network`). If ranks wait for each other, one has skipped an operation (`_hang_desync`). If they called
one operation differently, that comes before all else (`mismatch`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from keepstep.core.events import STEP_PHASES, Op, Phase, phase_place, phase_title
from keepstep.core.evidence import Evidence
from keepstep.core.incident import LEFT_LOOP, Confidence, Culprit, Diagnosis
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import STOPPED
from keepstep.locate._calls import ranks_of
from keepstep.locate._hang_desync import diagnose_alone, diagnose_circle, ranks_in_a_circle
from keepstep.locate._hang_graph import (
    FEW,
    MAX_CULPRITS,
    UNKNOWN_PROCESS,
    HangEvidence,
    Roots,
    arranged,
)
from keepstep.locate._hang_network import (
    cut_links,
    diagnose_silent,
    diagnose_still_devices,
    diagnose_transfer,
)
from keepstep.locate._left import diagnose_left, left_well
from keepstep.locate._message_mismatch import diagnose_message_mismatch
from keepstep.locate._waiting import Pending
from keepstep.locate._wrong_peer import diagnose_wrong_peer
from keepstep.locate.mismatch import diagnose_mismatch

_PLACE = re.compile(r"(.+):(\d+) ")
_LINES = re.compile(r"(.+):(\d+)-(\d+)$")


def locate_hang(evidence: Evidence) -> Diagnosis:
    """Name who never entered, stopped, died or entered another operation, or the transfer that is stuck.

    It reads ``states``, ``groups``, ``nodes``, ``silent_nodes``, ``clocks``, ``traffic``, ``ports``, ``probes``,
    ``addresses``
    and, in ``findings``, which ranks have left with exit code 0.
    """
    if left := left_well(evidence):
        return diagnose_left(evidence, left, locate_hang)
    known = arranged(evidence)
    if found := diagnose_mismatch(known):
        return found
    gone = [state.rank for state in evidence.states if not state.alive or state.process_state in STOPPED]
    if gone:
        return _diagnose_gone(known, sorted(gone))
    if found := diagnose_message_mismatch(known) or diagnose_wrong_peer(known):
        return found
    if found := diagnose_still_devices(known):
        return found
    roots = _find_roots(known)
    if left := _left_in(known, roots.ranks):
        return _diagnose_left_behind(known, roots, left)
    if roots.ranks:
        return _diagnose_never_entered(known, roots)
    return _diagnose_no_root(known, roots)


def _find_roots(known: HangEvidence) -> Roots:
    """Ranks that others wait for and that wait for nobody themselves.

    An asynchronous operation in flight looks like a wait. If that leaves nobody to blame (everybody waits for
    somebody), doubtful waits are ignored: first sends, then operations after which a rank did other things.
    """
    blocking = [p for p in known.pending if not p.entered_by_all]
    in_transfer = [p for p in known.pending if p.entered_by_all and p.through == 0]
    senders = frozenset(p.source for p in in_transfer if p.firm and _still_sends(known, p))
    awaited = {rank for p in blocking for rank in p.absent}
    told_by_all = not any(p.unknown for p in blocking)
    blocked: frozenset[int] = frozenset()
    # A silent rank or a stuck transfer may explain why no root is left: then only sends are doubted.
    for level in range(3 if told_by_all and not in_transfer else 2):
        waits = [p for p in blocking if level == 0 or not p.one_sided] + in_transfer
        blocked = frozenset(rank for p in waits for rank in (p.firm if level == 2 else p.waiting)) | senders
        ranks = tuple(sorted(awaited - blocked))
        if ranks:
            return Roots(ranks, blocked, level == 0)
        if level == 0 and _all_wait_for_silent(known, blocking):
            break
    return Roots((), blocked, False)


def _all_wait_for_silent(known: HangEvidence, blocking: Sequence[Pending]) -> bool:
    """Whether everybody waits for a silent rank, directly or through others, by traces of what devices are in.

    A device works in order, so in a trace a send in flight is a wait as good as any other.
    """
    explained = {rank for p in blocking if p.unknown for rank in p.waiting}
    waiting = {rank for p in blocking for rank in p.waiting}
    if not explained or any(known.states[rank].process_state != UNKNOWN_PROCESS for rank in waiting):
        return False
    grows = True
    while grows:
        before = len(explained)
        explained.update(rank for p in blocking if not explained.isdisjoint(p.absent) for rank in p.waiting)
        grows = len(explained) > before
    return explained == waiting


def _still_sends(known: HangEvidence, message: Pending) -> bool:
    """Whether the sender still has this message in flight, which the receiver is waiting for."""
    wanted = Op.SEND, message.group, message.target, message.seq
    sender = None if message.collective else known.states.get(message.source)
    return sender is not None and any(
        (flight.op, flight.group, flight.peer, flight.seq) == wanted for flight in sender.in_flight
    )


def _diagnose_never_entered(known: HangEvidence, roots: Roots) -> Diagnosis:
    """Name the roots, which have not entered operations in which others wait; the most awaited one comes first."""
    waited_for: dict[int, int] = {}
    for p in known.pending:
        for rank in p.absent:
            waited_for[rank] = waited_for.get(rank, 0) + len(p.waiting)
    last = known.last_progress_s(roots.ranks)
    order = sorted(roots.ranks, key=lambda rank: (-waited_for[rank], last[rank]))
    first = next(p for p in known.pending if order[0] in p.absent)
    is_over = all(known.states[rank].process_state == UNKNOWN_PROCESS for rank in order)
    if alone := diagnose_alone(known, first, order, is_over=is_over):
        return alone
    if len(order) > FEW and 2 * len(order) > len(known.states):
        return _diagnose_hardly_any_entered(known, order, first)
    confidence: Confidence = "high" if roots.sure else "medium"
    idle = not any(known.states[rank].in_flight for rank in order)
    if len(order) > FEW or (is_over and idle and len(first.waiting) < len(first.absent)):
        confidence = "low"  # those in it may have made a call too many
    elif known.silent:
        confidence = "medium"
    culprits = tuple(_never_entered(known, rank, first, confidence) for rank in order[:MAX_CULPRITS])
    roots_text = f"{len(order)} roots, ranks {fold_ranks(order)}"
    if len(order) == 1:
        roots_text = f"one root, rank {order[0]}"
    graph = f"wait-for graph has {roots_text}"
    return known.diagnosis(culprits, set(order), first, (graph, *known.progress_lines(order)))


def _never_entered(known: HangEvidence, rank: int, p: Pending, confidence: Confidence) -> Culprit:
    """A rank that has not entered an operation; it may have left the loop in which the others are."""
    loop = known.states[rank].left_loop
    if not loop or not any(_is_inside(flight.site, loop) for flight in known.parts_of(p)):
        return known.culprit(rank, p, confidence)
    culprit = known.culprit(rank, p, confidence, LEFT_LOOP)
    told = f"it is out of {loop}, where {ranks_of(p.waiting)} still are"
    return replace(culprit, detail="; ".join(filter(None, (told, culprit.detail))))


def _is_inside(site: str, loop: str) -> bool:
    """Whether a place in the code, "file:line function", is in the lines "file:first-last"."""
    place, lines = _PLACE.match(site), _LINES.match(loop)
    return (
        place is not None
        and lines is not None
        and place[1] == lines[1]
        and int(lines[2]) <= int(place[2]) <= int(lines[3])
    )


def _left_in(known: HangEvidence, ranks: Sequence[int]) -> list[Pending]:
    """Operations that others have completed, if every one of these ranks waits in one of them."""
    found = [
        p
        for p in known.pending
        if p.collective and p.entered_by_all and p.through and not set(ranks).isdisjoint(p.waiting)
    ]
    flows = bool(found) and bool(cut_links(known.states, set(ranks)))
    waiting = {rank for p in found for rank in p.waiting if flows or known.waits_in(rank, p)}
    return found if waiting.issuperset(ranks) else []


def _diagnose_left_behind(known: HangEvidence, roots: Roots, left: Sequence[Pending]) -> Diagnosis:
    """Others completed an operation and went on: a path to those left is bad, or they hang themselves."""
    network = diagnose_transfer(known, left)
    if network.culprits:
        return network
    blamed = _diagnose_never_entered(known, roots)
    culprits = blamed.culprits
    if not network.paths or any(known.paths.condition(pair) != "sound" for pair in network.paths):
        culprits = tuple(replace(one, confidence="medium") for one in culprits)
    evidence = (*blamed.evidence, *(line for line in network.evidence if line not in blamed.evidence))
    return replace(blamed, culprits=culprits, evidence=evidence, paths=network.paths)


def _diagnose_hardly_any_entered(known: HangEvidence, order: Sequence[int], first: Pending) -> Diagnosis:
    """Most ranks have yet to enter and only a few wait, so nobody is singled out."""
    places = sorted({phase_place(known.states[rank].phase) for rank in order} - {""})
    where = ", ".join(places) or "in no known phase"
    told = f"ranks {fold_ranks(order)} have not entered {first}; they are {where}"
    missing = ("what most ranks are busy with: none of it goes through a process group",)
    return known.diagnosis((), set(), first, (told,), missing)


def _diagnose_gone(known: HangEvidence, gone: Sequence[int]) -> Diagnosis:
    """Dead and stopped processes explain all waits for them, whatever operation they were in."""
    first = next((p for p in known.pending if set(gone) & {*p.absent, *p.waiting}), None)
    last = known.last_progress_s(gone)
    order = sorted(gone, key=lambda rank: (last[rank], rank))
    culprits = tuple(known.culprit(rank, first, "high") for rank in order[:MAX_CULPRITS])
    return known.diagnosis(culprits, set(gone), first, known.progress_lines(order))


def _diagnose_still(known: HangEvidence) -> Diagnosis | None:
    """The few ranks that do nothing while threads of all others spin; None where it is not so.

    Who waits on a device spins: a thread of NCCL's, or the one that waits for the device. Who hangs asleep on the host
    has nothing on its device, and nothing of it moves.
    """
    living = [state for state in known.states.values() if state.alive]
    members = {rank for name in known.device.names for rank in known.given.groups[name].members}
    still = [state.rank for state in living if state.stillness is not None and state.stillness.how == "still"]
    others = [state for state in living if state.rank not in still]
    spin = all(one.stillness is not None and one.stillness.how in ("moves", "spins") for one in others)
    if known.silent or not 0 < len(still) <= min(FEW, (len(living) - 1) // 2) or not spin:
        return None
    if not members.issuperset(state.rank for state in living):
        return None
    told = f"nothing of {ranks_of(still)} moves; threads of all others spin, as they do while a device waits"
    missing = ("what the ranks' devices have not finished: torch's flight recorder does not tell",)
    culprits = tuple(known.culprit(rank, None, "low") for rank in still)
    return known.diagnosis(culprits, set(still), None, (told, *known.progress_lines(still)), missing)


def _diagnose_last_step(known: HangEvidence) -> Diagnosis | None:
    """The few ranks that are still in a step while all others have come to their ends; None where it is not so."""
    living = [state for state in known.states.values() if state.alive]
    inside = [state.rank for state in living if state.phase in STEP_PHASES]
    over = [state.rank for state in living if state.phase == Phase.TEARDOWN]
    if known.silent or not over or not 0 < len(inside) <= FEW or len(inside) + len(over) < len(living):
        return None
    told = f"{ranks_of(over)} {'has' if len(over) == 1 else 'have'} ended all steps, {ranks_of(inside)} not the last"
    culprits = tuple(known.culprit(rank, None, "medium") for rank in inside)
    return known.diagnosis(culprits, set(inside), None, (told, *known.progress_lines(inside)))


def _diagnose_mute(known: HangEvidence, p: Pending) -> Diagnosis:
    """All others wait for ranks whose processes do not say what they have called on their devices."""
    mute = sorted({rank for one in known.pending for rank in one.unknown} & known.device.mute)
    held = [
        rank for rank in mute if (device := known.states[rank].device) is not None and not device.answered
    ]
    if len(held) < len(mute) or len(held) > min(FEW, len(known.states) // 2):
        told = (f"the processes of {ranks_of(held)} do not answer",) if held else ()
        missing = (f"what {ranks_of(mute)} called on a device: torch's flight recorder does not tell",)
        return known.diagnosis((), set(), p, told, missing)
    culprits: list[Culprit] = []
    for rank in held:
        culprit = known.culprit(rank, p, "medium" if len(held) == 1 else "low")
        told = "its process does not answer: something holds it up"
        culprits.append(replace(culprit, detail="; ".join(filter(None, (told, culprit.detail)))))
    return known.diagnosis(tuple(culprits), set(held), p, known.progress_lines(held))


def _diagnose_no_root(known: HangEvidence, roots: Roots) -> Diagnosis:
    """Every rank that others wait for waits itself: a stuck transfer, a silent rank or a circle of waits."""
    stuck = [p for p in known.pending if p.entered_by_all and p.through == 0]
    certain = [p for p in stuck if p.firm == p.waiting]
    if certain:  # all members report to be in it: silent ranks elsewhere do not matter
        return diagnose_transfer(known, certain)
    for p in known.pending:
        if p.unknown:
            if circle := ranks_in_a_circle(known):
                return diagnose_circle(known, circle)
            if known.device.mute.issuperset(p.unknown):
                return _diagnose_mute(known, p)
            return diagnose_silent(known, p)
    stuck += [p for p in known.pending if p.entered_by_all and p.through and known.paths.bad(known.pairs(p))]
    if stuck:
        return diagnose_transfer(known, stuck)
    unfinished = [p for p in known.pending if p.entered_by_all and p.through > len(p.waiting)]
    if unfinished:
        ranks = sorted({rank for p in unfinished for rank in p.waiting})
        culprits = tuple(
            known.culprit(r, unfinished[0], "medium", "did not finish") for r in ranks[:MAX_CULPRITS]
        )
        told = f"{unfinished[0].through} members are through {unfinished[0]}"
        return known.diagnosis(culprits, set(ranks), unfinished[0], (told,))
    if roots.blocked:
        return diagnose_circle(known, sorted(roots.blocked))
    if (still := _diagnose_still(known)) is not None:
        return still
    if (last := _diagnose_last_step(known)) is not None:
        return last
    phases = sorted({phase_title(state.phase) for state in known.states.values()})
    told = f"no rank is in an operation; phases: {', '.join(phases) or 'none told'}"
    missing = ("what all ranks wait for: none of it goes through a process group",)
    return known.diagnosis((), set(), None, (told,), missing)
