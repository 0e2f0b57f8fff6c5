"""A rank that sends to, or receives from, another rank than the one that waits for it, by traces."""

from __future__ import annotations

from dataclasses import replace

from keepstep.core.events import MESSAGES, Op
from keepstep.core.incident import Diagnosis
from keepstep.core.summary import OpInFlight
from keepstep.locate._hang_graph import UNKNOWN_PROCESS, HangEvidence, is_of
from keepstep.locate._waiting import Pending

_WRONG_PEER = "a message with another peer"
_LEAST_PAST = 2  # messages between two ranks from which on they are used to each other


def diagnose_wrong_peer(known: HangEvidence) -> Diagnosis | None:
    """Name a rank in a message with one it never had any with, while one it is used to waits for just this message."""
    waits = [p for p in known.pending if not p.collective and p.absent and len(p.waiting) == 1]
    for p in waits:
        rank = p.waiting[0]
        mine = _end(known, p)
        if mine is None or mine.usual != 0 or known.states[rank].process_state != UNKNOWN_PROCESS:
            continue
        for other in waits:
            theirs = _end(known, other)
            awaits = other.group == p.group and other.absent == (rank,)
            if awaits and theirs is not None and theirs.usual >= _LEAST_PAST and theirs.op != mine.op:
                return _diagnose(known, p, other, mine)
    return None


def _diagnose(known: HangEvidence, p: Pending, other: Pending, mine: OpInFlight) -> Diagnosis:
    rank, waiting = p.waiting[0], other.waiting[0]
    place = f" at {mine.site}" if mine.site else ""
    way = "to" if mine.op == Op.SEND else "from"
    detail = f"in {Op(mine.op).name} {way} rank {mine.peer}{place}, where rank {waiting} waits for its own"
    told = f"rank {rank} had no message with rank {mine.peer} before, and rank {waiting} waits in {other}"
    culprit = replace(known.culprit(rank, None, "medium", _WRONG_PEER), detail=detail)
    return known.diagnosis((culprit,), {rank}, other, (told,), (), "desync")


def _end(known: HangEvidence, p: Pending) -> OpInFlight | None:
    """The waiting rank's end of a message."""
    peer = p.target if p.waiting[0] == p.source else p.source
    flights = known.states[p.waiting[0]].in_flight
    return next((one for one in flights if one.op in MESSAGES and one.peer == peer and is_of(one, p)), None)
