"""Operations that somebody is in and has not left: who is in them, who has not come, who is through."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from keepstep.core.events import MESSAGES, SET_UP, SYNCHRONISING, Op, ends_of
from keepstep.core.group_names import shown_name
from keepstep.core.summary import GroupInfo, RankState, StreamProgress

_PER_GROUP = 8  # operations of a group that are looked at; those with the lowest numbers come first and block
_RECENT_S = 1e-3  # an operation that began this shortly before the last progress is still the last thing done


@dataclass(frozen=True, slots=True)
class Pending:
    """One operation in flight. ``source`` and ``target`` are -1 for collectives."""

    group: str
    ops: tuple[int, ...]  # more than one when members entered different operations under one number
    seq: int
    source: int
    target: int
    waiting: tuple[int, ...]  # ranks that are in it
    firm: tuple[int, ...]  # ranks in it that have done nothing since: certainly blocked in it
    absent: tuple[int, ...]  # ranks that have not entered it
    unknown: tuple[int, ...]  # members whose state is not known
    through: int  # how many members completed it
    stuck_s: float
    waits: bool  # whether a rank was seen to begin to wait for it
    members: tuple[int, ...]  # ranks of the collective, in the group's order; the two ends of a message

    @property
    def collective(self) -> bool:
        return self.source < 0

    @property
    def one_sided(self) -> bool:
        """Whether it is a send without a receive: the sender may have gone on, if it was not seen to wait."""
        return not self.collective and self.ops == (int(Op.SEND),) and not self.waits

    @property
    def entered_by_all(self) -> bool:
        return not self.absent and not self.unknown

    def __str__(self) -> str:
        if self.group == SET_UP:
            return f"the set-up of process groups, call {self.seq}"
        names = "/".join(Op(op).name for op in self.ops)
        group = f"group {shown_name(self.group)}"
        if self.collective:
            return f"{group} {names} seq {self.seq}"
        return f"{group} {names} from rank {self.source} to rank {self.target} seq {self.seq}"


_Stream = tuple[str, int, int, int]  # group, op (0 for collectives), source, target
_Here = dict[int, tuple[int, float]]  # rank -> (op, since)
_Flights = dict[int, _Here]  # seq -> who is in it


def pending_operations(
    states: Sequence[RankState],
    groups: Mapping[str, GroupInfo],
    mute: Collection[int] = (),
    mute_in: Collection[str] = (),
) -> list[Pending]:
    """All operations in flight, the one with most waiting ranks first. Linear in ranks and operations.

    ``mute``: ranks of which it is not known what they have entered in the groups ``mute_in``.
    """
    by_rank = {state.rank: state for state in states}
    flights: dict[_Stream, _Flights] = {}
    waits: set[tuple[_Stream, int]] = set()
    for state in states:
        rank = state.rank
        for flight in state.in_flight:
            op = flight.op if flight.op in MESSAGES else 0
            key = flight.group, op, *ends_of(flight.op, rank, flight.peer)
            flights.setdefault(key, {}).setdefault(flight.seq, {})[rank] = (flight.op, flight.since_s)
            if flight.waits:
                waits.add((key, flight.seq))
    progress: dict[str, dict[int, StreamProgress]] = {key[0]: {} for key in flights if key[1] == 0}
    for state in states:
        rank = state.rank
        for stream in state.streams:
            if stream.group in progress and stream.op not in MESSAGES:
                progress[stream.group][rank] = stream
    found: list[Pending] = []
    for key, by_seq in flights.items():
        for seq in sorted(by_seq)[:_PER_GROUP]:
            here, seen = by_seq[seq], (key, seq) in waits
            if key[1] == 0:
                silent = mute if key[0] in mute_in else ()
                found.append(_collective(key[0], seq, here, seen, by_rank, groups, progress[key[0]], silent))
            elif (message := _message(key, seq, here, seen, by_rank)) is not None:
                found.append(message)
    return sorted(found, key=lambda p: (-len(p.waiting), p.group, p.seq, p.source, p.target))


def _collective(
    group: str,
    seq: int,
    here: _Here,
    waits: bool,
    by_rank: Mapping[int, RankState],
    groups: Mapping[str, GroupInfo],
    progress: Mapping[int, StreamProgress],
    silent: Collection[int],
) -> Pending:
    """A collective that the ranks ``here`` are in (rank -> operation and since when)."""
    members = groups[group].members if group in groups else tuple(sorted(progress.keys() | here.keys()))
    started = {rank: stream.started for rank, stream in progress.items()}
    told = by_rank.keys() - set(silent) if silent else by_rank.keys()
    absent = tuple(m for m in members if m in told and m not in here and started.get(m, 0) < seq)
    unknown = tuple(m for m in members if m not in told)
    through = sum(m not in here and m in progress and progress[m].completed >= seq for m in members)
    ops = {op for op, _ in here.values()}
    if through and ops <= SYNCHRONISING:
        unknown = ()  # a member has completed it, so all have entered
    ops |= {progress[m].op for m in members if m not in here and started.get(m, 0) == seq}
    return Pending(
        group, tuple(sorted(ops)), seq, -1, -1, tuple(sorted(here)), _firm(here, by_rank), absent, unknown, through,
        _stuck_s(here, by_rank), waits, members,
    )  # fmt: skip


def _message(
    key: _Stream, seq: int, here: _Here, waits: bool, by_rank: Mapping[int, RankState]
) -> Pending | None:
    """A message of which one side is in flight; None for a send whose receive is in flight too: that one counts."""
    group, op, source, target = key
    receives = op == Op.RECV
    peer = source if receives else target
    wanted = (target, Op.SEND, group) if receives else (source, Op.RECV, group)
    streams = by_rank[peer].streams[::-1] if peer in by_rank else ()
    other = next((one for one in streams if (one.peer, one.op, one.group) == wanted), None)
    came = other is not None and other.started >= seq
    through = other is not None and other.completed >= seq
    if came and not receives:
        return None
    return Pending(
        group, (op,), seq, source, target, tuple(here), _firm(here, by_rank),
        (peer,) if not came and peer in by_rank else (), () if peer in by_rank else (peer,),
        # A send that is through says nothing about the receive, which ends later.
        int(through and not receives), _stuck_s(here, by_rank), waits, (source, target),
    )  # fmt: skip


def _firm(here: _Here, by_rank: Mapping[int, RankState]) -> tuple[int, ...]:
    """Ranks that have made no progress since they entered the operation."""
    return tuple(rank for rank in sorted(here) if here[rank][1] >= by_rank[rank].last_progress_s - _RECENT_S)


def _stuck_s(here: _Here, by_rank: Mapping[int, RankState]) -> float:
    """How long the operation has been in flight."""
    return max(by_rank[rank].now_s - since_s for rank, (_, since_s) in here.items())
