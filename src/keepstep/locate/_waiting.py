"""Operations that somebody is in and has not left: who is in them, who has not come, who is through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.core.events import Op
from keepstep.core.summary import GroupInfo, RankState

_PER_GROUP = 8  # operations of a group are in order: the lowest numbers are the ones that block
_RECENT_S = 1e-3
# Nobody leaves these before all members have entered; a broadcast's root does.
_NEEDS_ALL = {Op.ALLREDUCE, Op.ALLGATHER, Op.REDUCE_SCATTER, Op.ALLTOALL, Op.BARRIER}


@dataclass(frozen=True, slots=True)
class Pending:
    """One operation in flight. ``source`` and ``target`` are -1 for collectives."""

    group: str
    ops: tuple[int, ...]  # more than one when members entered different operations under one number
    seq: int
    source: int
    target: int
    waiting: tuple[int, ...]  # ranks in it
    firm: tuple[int, ...]  # those of them that did nothing since: certainly blocked in it
    absent: tuple[int, ...]  # ranks that have not entered it
    unknown: tuple[int, ...]  # members that told nothing
    through: int  # members that completed it
    stuck_s: float
    waits: bool = False  # somebody was seen to begin to wait for it

    @property
    def collective(self) -> bool:
        return self.source < 0

    @property
    def one_sided(self) -> bool:
        """A send whose receive has not been posted: the sender may well have gone on, if it was not seen to wait."""
        return not self.collective and self.ops == (int(Op.SEND),) and not self.waits

    @property
    def entered_by_all(self) -> bool:
        return not self.absent and not self.unknown

    def __str__(self) -> str:
        names = "/".join(Op(op).name for op in self.ops)
        if self.collective:
            return f"group {self.group} {names} seq {self.seq}"
        return f"group {self.group} {names} from rank {self.source} to rank {self.target} seq {self.seq}"


_Stream = tuple[str, int, int, int]  # group, op (0 for collectives), source, target


def pending_operations(states: Sequence[RankState], groups: Mapping[str, GroupInfo]) -> list[Pending]:
    """All operations in flight, those with most waiting ranks first. Linear in ranks and operations."""
    by_rank = {state.rank: state for state in states}
    started: dict[_Stream, dict[int, int]] = {}
    completed: dict[_Stream, dict[int, int]] = {}
    last_op: dict[str, dict[int, int]] = {}
    for state in states:
        for stream in state.streams:
            key = _stream(state.rank, stream.group, stream.op, stream.peer)
            started.setdefault(key, {})[state.rank] = stream.started
            completed.setdefault(key, {})[state.rank] = stream.completed
            if stream.peer < 0:
                last_op.setdefault(stream.group, {})[state.rank] = stream.op
    flights: dict[
        _Stream, dict[int, dict[int, tuple[int, float]]]
    ] = {}  # stream -> seq -> rank -> (op, since)
    waits: set[tuple[_Stream, int]] = set()
    for state in states:
        for flight in state.in_flight:
            key = _stream(state.rank, flight.group, flight.op, flight.peer)
            flights.setdefault(key, {}).setdefault(flight.seq, {})[state.rank] = (flight.op, flight.since_s)
            if flight.waits:
                waits.add((key, flight.seq))
    found: list[Pending] = []
    for key, by_seq in flights.items():
        for seq in sorted(by_seq)[:_PER_GROUP]:
            pending = (
                _collective(key[0], seq, by_seq[seq], by_rank, groups, started, completed, last_op)
                if key[1] == 0
                else _message(key, seq, by_seq[seq], by_rank, started, completed, (key, seq) in waits)
            )
            if pending is not None:
                found.append(pending)
    return sorted(found, key=lambda p: (-len(p.waiting), p.group, p.seq, p.source, p.target))


def _stream(rank: int, group: str, op: int, peer: int) -> _Stream:
    if op == Op.SEND:
        return group, op, rank, peer
    if op == Op.RECV:
        return group, op, peer, rank
    return group, 0, -1, -1


def _collective(
    group: str,
    seq: int,
    here: Mapping[int, tuple[int, float]],
    by_rank: Mapping[int, RankState],
    groups: Mapping[str, GroupInfo],
    started: Mapping[_Stream, Mapping[int, int]],
    completed: Mapping[_Stream, Mapping[int, int]],
    last_op: Mapping[str, Mapping[int, int]],
) -> Pending:
    counts = started.get((group, 0, -1, -1), {})
    ends = completed.get((group, 0, -1, -1), {})
    members = groups[group].members if group in groups else tuple(sorted(counts.keys() | here.keys()))
    absent = tuple(m for m in members if m in by_rank and m not in here and counts.get(m, 0) < seq)
    unknown = tuple(m for m in members if m not in by_rank)
    through = sum(m not in here and ends.get(m, 0) >= seq for m in members)
    ops = {op for op, _ in here.values()}
    if through and ops <= _NEEDS_ALL:
        unknown = ()  # somebody is through, so all have come
    latest = last_op.get(group, {})
    ops |= {latest[m] for m in members if m not in here and counts.get(m, 0) == seq and m in latest}
    return Pending(
        group, tuple(sorted(ops)), seq, -1, -1, tuple(sorted(here)), _firm(here, by_rank), absent, unknown, through,
        _stuck_s(here, by_rank),
    )  # fmt: skip


def _message(
    key: _Stream,
    seq: int,
    here: Mapping[int, tuple[int, float]],
    by_rank: Mapping[int, RankState],
    started: Mapping[_Stream, Mapping[int, int]],
    completed: Mapping[_Stream, Mapping[int, int]],
    waits: bool,
) -> Pending | None:
    """One side of a message; when both are in flight, the receiver's tells."""
    group, op, source, target = key
    receives = op == Op.RECV
    peer = source if receives else target
    other: _Stream = (group, int(Op.SEND if receives else Op.RECV), source, target)
    came = started.get(other, {}).get(peer, 0) >= seq
    through = completed.get(other, {}).get(peer, 0) >= seq
    if came and not receives:
        return None
    return Pending(
        group, (op,), seq, source, target, tuple(here), _firm(here, by_rank),
        (peer,) if not came and peer in by_rank else (), () if peer in by_rank else (peer,),
        # a send that is through says nothing of the receive, which ends later
        int(through and not receives), _stuck_s(here, by_rank), waits,
    )  # fmt: skip


def _firm(here: Mapping[int, tuple[int, float]], by_rank: Mapping[int, RankState]) -> tuple[int, ...]:
    return tuple(
        sorted(
            rank
            for rank, (_, since_s) in here.items()
            if since_s >= by_rank[rank].last_progress_s - _RECENT_S
        )
    )


def _stuck_s(here: Mapping[int, tuple[int, float]], by_rank: Mapping[int, RankState]) -> float:
    return max(by_rank[rank].now_s - since_s for rank, (_, since_s) in here.items())
