"""A message that its two ends call with different sizes: on NCCL neither of them ends."""

from __future__ import annotations

from dataclasses import replace

from keepstep.core.events import Op
from keepstep.core.incident import Diagnosis
from keepstep.core.summary import OpInFlight
from keepstep.locate._calls import Call, named
from keepstep.locate._hang_graph import HangEvidence

_ANOTHER_SIZE = "another size"


def diagnose_message_mismatch(known: HangEvidence) -> Diagnosis | None:
    """Name the two ranks that are in a message with different sizes; None where all sizes fit or are not known."""
    for p in known.pending:
        info = known.given.groups.get(p.group)
        if p.collective or (info is not None and info.backend and info.records_waits):
            continue  # Gloo receives a smaller message well
        ends = (
            _end(known, p.source, Op.SEND, p.group, p.target, p.seq),
            _end(known, p.target, Op.RECV, p.group, p.source, p.seq),
        )
        sent, got = ends
        if sent is None or got is None or not (sent.element and got.element) or sent.bytes == got.bytes:
            continue
        told = [
            f"rank {rank} in {named(Call(rank, end.op, end.bytes, end.element), 2)}"
            + (f" at {end.site}" if end.site else "")
            for rank, end in ((p.source, sent), (p.target, got))
        ]
        words = ", ".join(told)
        culprits = tuple(
            replace(one, detail="; ".join(filter(None, (mine, one.detail))))
            for rank, mine in zip((p.source, p.target), told, strict=True)
            for one in [known.culprit(rank, None, "low", _ANOTHER_SIZE)]
        )
        missing = (f"which size is meant: that of rank {p.source} or that of rank {p.target}",)
        return known.diagnosis(culprits, {p.source, p.target}, p, (words,), missing, "desync")
    return None


def _end(known: HangEvidence, rank: int, op: Op, group: str, peer: int, seq: int) -> OpInFlight | None:
    """The rank's end of a message that it is in."""
    state = known.states.get(rank)
    wanted = (group, op, peer, seq)
    flights = state.in_flight if state is not None else ()
    return next((one for one in flights if (one.group, one.op, one.peer, one.seq) == wanted), None)
