"""Diagnoses a desync: ranks that left the common order of operations, found by who waits for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from keepstep.core.events import Op
from keepstep.core.incident import Confidence, Diagnosis
from keepstep.core.ranges import fold_ranks
from keepstep.locate._hang_graph import HangEvidence, is_of
from keepstep.locate._waiting import Pending


def diagnose_desync(known: HangEvidence, mixed: Pending) -> Diagnosis:
    """Ranks entered different operations under one sequence number: the minority are the culprits."""
    entered: dict[int, list[int]] = {}
    for rank, state in known.states.items():
        for flight in state.in_flight:
            if flight.group == mixed.group and flight.peer < 0 and flight.seq == mixed.seq:
                entered.setdefault(flight.op, []).append(rank)
                break
        else:
            for stream in state.streams:
                if stream.group == mixed.group and stream.peer < 0 and stream.started == mixed.seq:
                    entered.setdefault(stream.op, []).append(rank)
    by_size = sorted(entered, key=lambda op: (len(entered[op]), op))
    tie = len(entered[by_size[0]]) == len(entered[by_size[-1]])
    odd = sorted(rank for op in (by_size if tie else by_size[:-1]) for rank in entered[op])
    told = ", ".join(
        f"ranks {fold_ranks(entered[op])} in {Op(op).name}{_called_at(known, entered[op], mixed)}"
        for op in reversed(by_size)
    )
    confidence: Confidence = "low" if tie else "high"
    culprits = tuple(known.culprit(rank, mixed, confidence, "entered another operation") for rank in odd)
    missing = ("which of the two is meant: as many ranks entered one as the other",) if tie else ()
    return known.diagnosis(culprits, set(odd), mixed, (told,), missing, "desync")


def ranks_in_a_circle(known: HangEvidence) -> list[int]:
    """Ranks that reported and wait for each other in a circle, which no silent rank can explain."""
    waits = [p for p in known.pending if p.absent and not p.one_sided]
    inside = {rank for p in waits for rank in p.waiting}
    while True:
        waits = [p for p in waits if not inside.isdisjoint(p.absent)]
        left = {rank for p in waits for rank in p.waiting}
        if left == inside:
            return sorted(inside)
        inside = left


def diagnose_circle(known: HangEvidence, circle: Sequence[int]) -> Diagnosis:
    """Ranks wait for each other, so one has left the common order of operations: find which."""
    open_operations = [p for p in known.pending if p.absent]
    told = f"ranks {fold_ranks(circle)} wait for each other: {'; '.join(str(p) for p in open_operations[:2])}"
    odd = _fewer_than_its_company(known, open_operations)
    suspect = odd if odd is not None else _most_missed(open_operations)
    if suspect is None:
        missing = ("which rank left the common order of operations: each of these waits for another of them",)
        return known.diagnosis((), set(), open_operations[0], (told,), missing, "desync")
    main = next((p for p in open_operations if suspect in p.absent), open_operations[0])
    culprit = known.culprit(suspect, main, "medium", "skipped an operation")
    where = [f"rank {suspect} waits{_called_at(known, [suspect])}"] if _called_at(known, [suspect]) else []
    if _called_at(known, main.waiting, main):
        where.append(f"ranks {fold_ranks(main.waiting)} wait for it{_called_at(known, main.waiting, main)}")
    return known.diagnosis((culprit,), {suspect}, main, (told, *where), (), "desync")


def _called_at(known: HangEvidence, ranks: Sequence[int], p: Pending | None = None) -> str:
    """The line of user code where most of these ranks called ``p``, or by default the operation each entered first."""
    sites = Counter(
        flight.site
        for rank in ranks
        for flight in [one for one in known.states[rank].in_flight if p is None or is_of(one, p)][:1]
        if flight.site
    )
    return f" at {sites.most_common(1)[0][0]}" if sites else ""


def _fewer_than_its_company(known: HangEvidence, pending: Sequence[Pending]) -> int | None:
    """The one rank that has started more or fewer collectives than all others that wait in the same one."""
    for p in pending:
        if not p.collective or len(p.waiting) < 3:
            continue
        totals: dict[int, list[int]] = {}
        for rank in p.waiting:
            total = sum(stream.started for stream in known.states[rank].streams if stream.peer < 0)
            totals.setdefault(total, []).append(rank)
        few = min(totals.values(), key=len)
        if len(totals) == 2 and len(few) == 1:
            return few[0]
    return None


def _most_missed(pending: Sequence[Pending]) -> int | None:
    """The rank that most others wait for: one that skipped an operation is often alone absent from it."""
    blame: dict[int, float] = {}
    for p in pending:
        for rank in p.absent:
            blame[rank] = max(blame.get(rank, 0.0), len(p.waiting) / len(p.absent))
    order = sorted(blame, key=lambda rank: -blame[rank])
    return order[0] if len(order) == 1 or blame[order[0]] >= 1.5 * blame[order[1]] else None
