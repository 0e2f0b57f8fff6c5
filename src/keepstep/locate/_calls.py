"""The collectives that ranks are in or have left last, side by side by their number, and in what they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from keepstep.core.events import SYNCHRONISING, UNTOLD, Op, item_bytes
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import GroupInfo, OpEnded, OpInFlight, RankState

Aspect = Literal["op", "bytes", "element", "reduction"]

# Operations of which each member brings or gets one part of the bytes that are counted.
_OF_PARTS = frozenset({Op.ALLGATHER, Op.REDUCE_SCATTER})


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's call of a collective. ``element`` "": what it moves is not known, so its bytes do not count."""

    rank: int
    op: int
    bytes: int = 0
    element: str = ""
    reduction: str = ""
    site: str = ""
    usual: int = -1  # see `core.summary.OpInFlight`
    is_open: bool = False  # the rank is in it
    failed: bool = False  # the rank has left it with an error


CallsOfGroup = Mapping[int, Mapping[int, Call]]  # by number, then by rank


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A collective that its members called differently.

    Attributes:
        aspect: what differs.
        classes: the ranks that called it alike, the most first.
    """

    group: str
    seq: int
    aspect: Aspect
    classes: tuple[tuple[int, ...], ...]
    calls: Mapping[int, Call]  # by rank
    members: int

    @property
    def is_tied(self) -> bool:
        """Whether no class is the largest."""
        return len(self.classes[0]) == len(self.classes[1])


def calls_of(states: Iterable[RankState]) -> dict[str, CallsOfGroup]:
    """The known collectives of these ranks, by group."""
    found: dict[str, dict[int, dict[int, Call]]] = {}
    for state in states:
        rank = state.rank
        for stream in state.streams:
            if stream.peer >= 0:
                continue
            numbers = found.setdefault(stream.group, {})
            if stream.started > 0:
                numbers.setdefault(stream.started, {})[rank] = Call(rank, stream.op)
            for ended in stream.ended:
                numbers.setdefault(ended.seq, {})[rank] = _of_ended(rank, ended)
        for flights, failed in ((state.in_flight, False), (state.failed, True)):
            for flight in flights:
                if flight.peer < 0:
                    numbers = found.setdefault(flight.group, {})
                    numbers.setdefault(flight.seq, {})[rank] = _of_flight(rank, flight, failed)
    return dict(found)


def _of_flight(rank: int, flight: OpInFlight, failed: bool) -> Call:
    content = flight.op, flight.bytes, flight.element, flight.reduction, flight.site, flight.usual
    failed = failed or flight.failed_s > 0
    return Call(rank, *content, is_open=not failed, failed=failed)


def _of_ended(rank: int, ended: OpEnded) -> Call:
    content = ended.op, ended.bytes, ended.element, ended.reduction, ended.site, ended.usual
    return Call(rank, *content, failed=ended.failed)


def first_mismatch(states: Sequence[RankState], groups: Mapping[str, GroupInfo]) -> Mismatch | None:
    """The first collective of a group in which its members' calls do not fit; of several groups, the largest."""
    newest = max((state.incarnation for state in states), default=-1)
    states = [state for state in states if state.incarnation in (-1, newest)]
    found: list[Mismatch] = []
    all_started = _started(states)
    for group, numbers in calls_of(states).items():
        members = groups[group].members if group in groups else ()
        started = all_started.get(group, {})
        # What a rank calls after an error, others do not call.
        last = min(
            (seq for seq, by_rank in numbers.items() if any(c.failed for c in by_rank.values())), default=None
        )
        for seq in sorted(numbers):
            if last is not None and seq > last:
                break
            absent = sum(member not in numbers[seq] and started.get(member, 0) < seq for member in members)
            size = max(len(members), len(numbers[seq]))
            one = _mismatch(group, seq, numbers[seq], size, absent)
            if one is not None:
                found.append(one)
                break
    return max(found, key=lambda one: (len(one.calls), one.group), default=None)


def _started(states: Iterable[RankState]) -> dict[str, dict[int, int]]:
    """How many collectives of each group each rank has started."""
    found: dict[str, dict[int, int]] = {}
    for state in states:
        for stream in state.streams:
            if stream.peer < 0:
                found.setdefault(stream.group, {})[state.rank] = stream.started
    return found


def _mismatch(group: str, seq: int, calls: Mapping[int, Call], size: int, absent: int) -> Mismatch | None:
    aspect = _aspect(list(calls.values()), absent)
    if aspect is None:
        return None
    classes: dict[str | int, list[int]] = {}
    for rank, call in sorted(calls.items()):
        if aspect == "op" or call.element:
            classes.setdefault(getattr(call, aspect), []).append(rank)
    classes.pop("", None)
    ordered = sorted(classes.values(), key=lambda ranks: (-len(ranks), ranks))
    return Mismatch(group, seq, aspect, tuple(map(tuple, ordered)), calls, size)


def _aspect(calls: Sequence[Call], absent: int) -> Aspect | None:
    """In what calls of one number differ, as far as that holds up a job."""
    ops = {call.op for call in calls}
    if len(ops) > 1:
        return "op"
    known = [call for call in calls if call.element]
    is_stuck = any(call.is_open or call.failed for call in calls)
    # Ranks that have left a broadcast show that its sizes did not matter; in an all-to-all they need not be equal.
    compared = bool(ops & SYNCHRONISING) or is_stuck
    if compared and Op.ALLTOALL not in ops and len({call.bytes for call in known}) > 1:
        return "bytes"
    if absent or not is_stuck:
        return (
            None  # another type of the same size moves well, so those that have not come hold up the others
        )
    if len({call.element for call in known}) > 1:
        return "element"
    return "reduction" if len({call.reduction for call in known} - {""}) > 1 else None


def habit(calls: Sequence[Call | OpInFlight]) -> int:
    """How often these ranks, the least used to it, had made this call at this place before; -1: not known."""
    return min((call.usual for call in calls), default=-1)


def ranks_of(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0,2-4``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {fold_ranks(ranks)}"


def named(call: Call, members: int, *, with_op: bool = True, with_reduction: bool = False) -> str:
    """The call in words: ``ALLGATHER of 80 B (20 float32)``, one member's part of it."""
    words = [Op(call.op).name] if with_op else []
    if with_reduction and call.reduction:
        words.append(call.reduction)
    if call.element == UNTOLD:
        words.append(f"of {call.bytes} elements")
    elif call.element:
        part = call.bytes // members if call.op in _OF_PARTS and members else call.bytes
        words.append(f"of {part} B ({part // item_bytes(call.element)} {call.element})")
    return " ".join(words)


def site_of(calls: Iterable[Call]) -> str:
    """The line of user code from which most of these calls came; "" where none is known."""
    sites = Counter(call.site for call in calls if call.site)
    return sites.most_common(1)[0][0] if sites else ""
