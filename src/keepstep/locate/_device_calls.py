"""Which calls devices have not finished, where the end of a call is not recorded because the host only enqueues it.

In this order:

1. What torch's flight recorder tells: of each group the first call that is not finished (`core.summary.DeviceCalls`).
2. The ranks' own counts. An operation that one member has not called cannot end for those that have, so a member that
   has called more than another is in the first operation that the other one lacks. Messages are counted for each sender
   and receiver.

The two number collectives differently, since the probe does not see what C++ calls on a device. So collectives are
taken from the recorder as soon as it tells of one rank; of the others nothing is known then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from keepstep.core.events import MESSAGES, Op
from keepstep.core.summary import DeviceCalls, GroupInfo, OpInFlight, RankState, StreamProgress


@dataclass(frozen=True, slots=True)
class DeviceGroups:
    """The ranks' states as if the ends of operations on groups of a device had been recorded.

    Attributes:
        states: of all ranks that reported, in the order given.
        names: the groups of a device.
        told: living ranks whose flight recorder told what is not finished.
        mute: living members of such groups of which nothing is known in them, though of others it is.
    """

    states: Sequence[RankState]
    names: frozenset[str] = frozenset()
    told: frozenset[int] = frozenset()
    mute: frozenset[int] = frozenset()


def device_groups(states: Sequence[RankState], groups: Mapping[str, GroupInfo]) -> DeviceGroups:
    """The states with what devices have not finished. Linear in ranks, groups and peers."""
    names = frozenset(name for name, group in groups.items() if not group.records_waits)
    if not names:
        return DeviceGroups(states)
    told = frozenset(one.rank for one in states if one.alive and one.device and one.device.answered)
    members = {rank for name in names for rank in groups[name].members}
    mute = {one.rank for one in states if told and one.alive and one.rank in members - told}
    streams = {one.rank: _streams(one, names, told) for one in states}
    counts = _Counts(streams, names, groups)
    arranged = [_with_device(one, names, told, counts, streams[one.rank]) for one in states]
    return DeviceGroups(arranged, names, told, frozenset(mute))


def _streams(state: RankState, names: frozenset[str], told: frozenset[int]) -> list[StreamProgress]:
    """How far a rank is on groups of a device, each stream by the source that all ranks have it from."""
    found: list[StreamProgress] = []
    if state.rank in told and state.device is not None:
        found = [one for one in state.device.streams if one.group in names]
    known = {_stream(one) for one in found}
    return found + [
        one
        for one in state.streams
        if one.group in names and (_stream(one) not in known if one.op in MESSAGES else not told)
    ]


class _Counts:
    """How many operations on groups of a device each rank has called, by its own count."""

    def __init__(
        self,
        streams: Mapping[int, Sequence[StreamProgress]],
        names: frozenset[str],
        groups: Mapping[str, GroupInfo],
    ) -> None:
        self._known = streams.keys()
        self._messages: dict[tuple[str, int, int, int], int] = {}  # group, operation, rank, peer
        collectives: dict[str, dict[int, int]] = {name: {} for name in names}
        for rank, of_rank in streams.items():
            for one in of_rank:
                if one.op in MESSAGES:
                    self._messages[one.group, one.op, rank, one.peer] = one.started
                else:
                    collectives[one.group][rank] = one.started
        self._least = {
            name: min((of.get(rank, 0) for rank in groups[name].members if rank in self._known), default=0)
            for name, of in collectives.items()
        }

    def lacking(self, rank: int, one: StreamProgress) -> int | None:
        """How many the member that is furthest behind has called, where that is less than this rank has."""
        least = self._least[one.group]
        if one.op in MESSAGES:
            opposite = int(Op.SEND if one.op == Op.RECV else Op.RECV)
            if one.peer not in self._known:
                return None
            least = self._messages.get((one.group, opposite, one.peer, rank), 0)
        return least if least < one.started else None


def _with_device(
    state: RankState,
    names: frozenset[str],
    told: frozenset[int],
    counts: _Counts,
    own: Sequence[StreamProgress],
) -> RankState:
    """The state of one rank, its operations on groups of a device replaced by what is not finished of them.

    ``own``: how far it is on these groups.
    """
    device = state.device if state.rank in told and state.device is not None else DeviceCalls()
    numbered = {_stream(one) for one in device.streams}
    # What the ring itself has in flight is a call that has not even returned to the host.
    in_flight = [
        one
        for one in state.in_flight
        if one.group not in names or (_stream(one) not in numbered if one.op in MESSAGES else not told)
    ]
    # The device is in what it has not finished, whatever the host has done since.
    in_flight += [
        replace(one, since_s=max(one.since_s, state.last_progress_s))
        for one in device.in_flight
        if one.group in names
    ]
    inside = {_stream(one) for one in in_flight}
    streams = [one for one in state.streams if one.group not in names]
    # Of a collective whose end the recorder knows nothing is open but what it has said.
    knows_ends = state.rank in told and device.is_whole
    for one in own:
        known = _stream(one) in inside or (knows_ends and one.op not in MESSAGES)
        lacking = None if known else counts.lacking(state.rank, one)
        if lacking is None:
            streams.append(one)
            continue
        streams.append(replace(one, started=lacking + 1, completed=lacking))
        if state.alive:
            in_flight.append(_call(one, lacking + 1, state.last_progress_s))
    return replace(state, in_flight=tuple(in_flight), streams=tuple(streams))


def _stream(one: StreamProgress | OpInFlight) -> tuple[str, int, int]:
    return one.group, one.op if one.op in MESSAGES else 0, one.peer


def _call(one: StreamProgress, seq: int, since_s: float) -> OpInFlight:
    """The call with this number, as far as it is known."""
    call = next((ended for ended in one.ended if ended.seq == seq), None)
    if call is None:
        return OpInFlight(one.group, one.op, one.peer, seq, since_s)
    return OpInFlight(
        one.group, call.op, one.peer, seq, since_s, call.site,
        bytes=call.bytes, element=call.element, reduction=call.reduction, usual=call.usual, thread=call.thread,
    )  # fmt: skip
