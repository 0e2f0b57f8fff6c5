"""Diagnoses a desync: ranks that left the common order of operations, found by who waits for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from keepstep.core.events import Op
from keepstep.core.incident import Confidence, Diagnosis
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import OpInFlight
from keepstep.locate._calls import Call, calls_of, habit, ranks_of
from keepstep.locate._hang_graph import FEW, MAX_CULPRITS, HangEvidence, is_of
from keepstep.locate._waiting import Pending

SKIPPED = "skipped an operation"
ANOTHER_ORDER = "another order of operations"
ALONE = "made a call that no other rank made"
_MOST_CROSSED = 16  # open operations that are compared, two by two


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
    if odd is None and (crossed := _crossed(open_operations)) is not None:
        return _diagnose_crossed(known, crossed, told)
    suspect = odd if odd is not None else _most_missed(open_operations)
    if suspect is None:
        missing = ("which rank left the common order of operations: each of these waits for another of them",)
        sites = _both_sites(known, open_operations[:2])
        return known.diagnosis((), set(), open_operations[0], (told, *sites), missing, "desync")
    main = next((p for p in open_operations if suspect in p.absent), open_operations[0])
    culprit = known.culprit(suspect, main, "medium", SKIPPED)
    where = [f"rank {suspect} waits{_called_at(known, [suspect])}"] if _called_at(known, [suspect]) else []
    if _called_at(known, main.waiting, main):
        where.append(f"{ranks_of(main.waiting)} wait for it{_called_at(known, main.waiting, main)}")
    return known.diagnosis((culprit,), {suspect}, main, (told, *where), (), "desync")


def _crossed(pending: Sequence[Pending]) -> tuple[Pending, Pending] | None:
    """Two collectives of two groups, each lacking all ranks that wait in the other; the one with more ranks first."""
    waits = [p for p in pending if p.collective]
    for first in waits[:_MOST_CROSSED]:
        for second in waits[:_MOST_CROSSED]:
            lacks = set(second.waiting) <= set(first.absent) and set(first.waiting) <= set(second.absent)
            if first.group != second.group and lacks and len(first.waiting) >= len(second.waiting):
                return first, second
    return None


def _diagnose_crossed(known: HangEvidence, crossed: tuple[Pending, Pending], told: str) -> Diagnosis:
    """Ranks make the operations of two groups in another order than the others do: the fewer are odd.

    Of equally many, those that had never before come to the one from where they come.
    """
    most, fewer = crossed
    habits = {p: habit([call for rank in p.waiting for call in _calls_in(known, rank, p)]) for p in crossed}
    tied = len(most.waiting) == len(fewer.waiting)
    if tied and habits[most] == 0 < habits[fewer]:
        most, fewer = fewer, most
    known_apart = habits[fewer] == 0 < habits[most]
    sure: Confidence = "medium"
    if tied:
        sure = "low"
    elif known_apart:
        sure = "high"
    odd = fewer.waiting
    if tied and not known_apart:
        odd = tuple(sorted({*most.waiting, *fewer.waiting}))
        odd = odd if len(odd) <= FEW else ()
    lines = [told, *_both_sites(known, (fewer, most))]
    if known_apart:
        lines.append(
            f"{ranks_of(fewer.waiting)} had never come to it after what came before; "
            f"{ranks_of(most.waiting)} had to theirs, {habits[most]} times"
        )
    missing = ("which order is meant: as many ranks keep to one as to the other",) if tied else ()
    culprits = tuple(
        replace(culprit, detail="; ".join(filter(None, (f"entered {mine} before {other}", culprit.detail))))
        for rank in odd[:MAX_CULPRITS]
        for mine, other in [(fewer, most) if rank in fewer.waiting else (most, fewer)]
        for culprit in [known.culprit(rank, None, sure, ANOTHER_ORDER)]
    )
    return known.diagnosis(culprits, set(odd), most, lines, missing, "desync")


def _calls_in(known: HangEvidence, rank: int, p: Pending) -> list[OpInFlight]:
    return [one for one in known.states[rank].in_flight if is_of(one, p)]


def _both_sites(known: HangEvidence, operations: Sequence[Pending]) -> list[str]:
    """A line with the places in the user's code from which ranks came to these operations."""
    told = [f"{ranks_of(p.waiting)}{where}" for p in operations if (where := _called_at(known, p.waiting, p))]
    return [f"called by {', by '.join(told)}"] if told else []


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
    """The one rank that has started more or fewer collectives than all others that wait in the same one.

    The first stages of pipelines, the last ones and those between are compared each with their like: they differ in
    what they call, the last for the loss, for example.
    """
    for p in pending:
        alike: dict[frozenset[bool], list[int]] = {}
        for rank in p.waiting if p.collective and len(p.waiting) > 2 else ():
            # In which directions it exchanges messages.
            directions = frozenset(one.peer > rank for one in known.states[rank].streams if one.peer >= 0)
            alike.setdefault(directions, []).append(rank)
        for ranks in alike.values():
            totals: dict[int, list[int]] = {}
            for rank in ranks:
                total = sum(stream.started for stream in known.states[rank].streams if stream.peer < 0)
                totals.setdefault(total, []).append(rank)
            few = min(totals.values(), key=len)
            if len(ranks) > 2 and len(totals) == 2 and len(few) == 1:
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


def diagnose_alone(
    known: HangEvidence, p: Pending, others: Sequence[int], *, is_over: bool
) -> Diagnosis | None:
    """Fewer ranks are in an operation than have yet to come, and these are in none: is it a call too many?

    It is one if the ranks in it had never called it there before, or if they had made one call that the others had not
    made, so that one of the group's operations is left over. ``others``: the ranks that have not entered.
    ``is_over``: nobody will come any more, as in dumps that were written when ranks had given up.

    Returns:
        None where it is not so.
    """
    inside = p.waiting
    if not p.collective or p.unknown or len(inside) > len(others) or set(others) != set(p.absent):
        return None
    if len(others) < 2 and not is_over:
        return None
    if any(known.states[rank].in_flight for rank in others):
        return None
    if any(_entered(known, rank, p.group) != p.seq - 1 for rank in others):
        return None
    where = _called_at(known, inside, p)
    who = f"{ranks_of(inside)} alone {'is' if len(inside) == 1 else 'are'} in {p}{where}"
    times = habit([call for rank in inside for call in _calls_in(known, rank, p)])
    is_even = len(inside) == len(others)
    if times == 0 or (is_over and is_even and times < 0 and all(_is_new(known, r, p) for r in inside)):
        told, detail = f"{who}: it had never been called after what came before", f"in {p}{where}"
    elif is_over and (extra := _left_over(known, p, others)):
        told, detail = f"{who}, but made {extra}, which {ranks_of(others)} had not made", f"made {extra}"
    else:
        return None
    have, are, were = ("has", "is", "was") if len(others) == 1 else ("have", "are", "were")
    done = f"{ranks_of(others)} {have} entered {p.seq - 1} operations of the group, and {are} in none"
    missing = (f"whether {ranks_of(others)} {were} to enter {p}, too",)
    if not is_over:
        return known.diagnosis((), set(), p, (told, done), missing, "hang")
    sure: Confidence = "low" if is_even else "medium"
    culprits = [
        replace(one, detail="; ".join(filter(None, (detail, one.detail))))
        for rank in inside[:MAX_CULPRITS]
        for one in [known.culprit(rank, None, sure, ALONE)]
    ]
    if is_even:  # It is as likely that the others left one out.
        if len(inside) + len(others) > FEW:
            return known.diagnosis((), set(), p, (told, done), missing, "desync")
        culprits += [known.culprit(rank, p, sure) for rank in others]
        done += "".join(f"; {ranks_of([rank])} made its last{_last_site(known, rank, p)}" for rank in others)
    blamed = {one.rank for one in culprits if one.rank is not None}
    return known.diagnosis(tuple(culprits), blamed, p, (told, done), missing, "desync")


def _is_new(known: HangEvidence, rank: int, p: Pending) -> bool:
    """Whether the rank is known to have made calls, and none of them where it called ``p``."""
    past = {one.site for stream in known.states[rank].streams for one in stream.ended}
    return bool(past) and all(call.site and call.site not in past for call in _calls_in(known, rank, p))


def _left_over(known: HangEvidence, p: Pending, others: Sequence[int]) -> str:
    """The call without which the ranks in ``p`` would have made the same calls of the group as the others; "" if none.

    It shows by its place in the code, as its kind and size were those of the call that the others made instead.
    """
    numbers = calls_of(known.states[rank] for rank in (*p.waiting, *others)).get(p.group, {})
    mine = {seq: _common(numbers[seq], p.waiting) for seq in numbers}
    theirs = {seq: _common(numbers[seq], others) for seq in numbers}
    told = sorted(seq for seq in numbers if mine[seq] and theirs[seq])
    first = next((seq for seq in told if mine[seq] != theirs[seq]), None)
    if first is None or first == told[0] > 1:
        return ""
    if any(mine.get(seq + 1) != theirs.get(seq) or not theirs.get(seq) for seq in range(first, p.seq)):
        return ""
    op, site = mine[first] or (0, "")
    return f"{Op(op).name} seq {first} at {site}"


def _common(calls: Mapping[int, Call], ranks: Sequence[int]) -> tuple[int, str] | None:
    """The operation and place in the code that all these ranks' calls have; None where they differ or are not known."""
    found = {(calls[rank].op, calls[rank].site) if rank in calls else (0, "") for rank in ranks}
    op, site = found.pop()
    return (op, site) if site and not found else None


def _last_site(known: HangEvidence, rank: int, p: Pending) -> str:
    last = calls_of([known.states[rank]]).get(p.group, {}).get(p.seq - 1, {}).get(rank)
    return f" at {last.site}" if last is not None and last.site else ""


def _entered(known: HangEvidence, rank: int, group: str) -> int:
    streams = known.states[rank].streams
    return max((one.started for one in streams if one.group == group and one.peer < 0), default=0)
