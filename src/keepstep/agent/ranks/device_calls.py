"""What a rank's device has not finished, by torch's flight recorder, under the names and numbers of the rank's ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from keepstep.core.events import MESSAGES
from keepstep.core.summary import DeviceCalls, GroupInfo, StreamProgress
from keepstep.traces.dump_sets import Dump
from keepstep.traces.flight_recorder import state_of, torchs_name

_MOST_IN_FLIGHT = 64
_ENDED = 8  # calls of a group that are told
_GROUPS = 256  # groups of which calls are told


def has_device_groups(groups: Sequence[GroupInfo]) -> bool:
    """Whether a rank may wait for others unseen, on a group of a device."""
    return bool(_of_device(groups))


def _of_device(groups: Sequence[GroupInfo]) -> set[str]:
    """Names of torch's groups of a device; NCCL's communicators are seen by the shim, and torch knows none."""
    return {group.name for group in groups if not group.records_waits and not group.is_communicator}


def device_calls(
    dump: Dump, rank: int, groups: Sequence[GroupInfo], streams: Sequence[StreamProgress], ago_s: float
) -> DeviceCalls | None:
    """The calls on groups of a device; None where the dump has none of them, or does not tell which group is which.

    Args:
        dump: what the flight recorder of the rank's process holds.
        groups: the process groups of its ring.
        streams: how far it is by its ring, which numbers messages as both ends do.
        ago_s: add this to a time on the node's clock to get the clock of the dump.
    """
    of_device = _of_device(groups)
    if any("#" in name for name in of_device):
        return None  # torch has given a name again: entries of the former group are among those of this one
    named = {label: torchs_name(group) for label, group in dump.groups.items()}
    names = {label: name for label, name in named.items() if name in of_device}
    entries = [one for one in dump.entries if one.group in names]
    own = replace(dump, entries=entries)
    own = replace(own, counts={group: pair for group, pair in dump.counts.items() if group in names})
    if not own.counts and not own.entries:
        return None
    found = state_of(own, rank)
    collectives = [
        replace(one, group=names[one.group], ended=one.ended[-_ENDED:])
        for one in found.streams
        if one.peer < 0
    ]
    if not own.tells_ends:
        return DeviceCalls((), tuple(collectives[:_GROUPS]), is_whole=False)
    # Only the oldest call that is not done: a device works in order.
    flights = [
        replace(one, group=names[one.group], since_s=one.since_s - ago_s)
        for one in found.in_flight
        if one.peer < 0
    ]
    inside = {(names[one.group], one.op, one.peer): one for one in found.in_flight if one.peer >= 0}
    messages = _messages(own, names, streams, set(inside))
    flights += [
        replace(inside[key], group=one.group, seq=one.started, since_s=inside[key].since_s - ago_s)
        for one in messages
        if (key := (one.group, one.op, one.peer)) in inside
    ]
    sent = sum(one.op in MESSAGES and one.group in of_device and one.started > 0 for one in streams)
    is_whole = len(messages) == sent
    return DeviceCalls(
        tuple(flights[:_MOST_IN_FLIGHT]), (*collectives[:_GROUPS], *messages), is_whole=is_whole
    )


def _messages(
    dump: Dump,
    names: dict[str, str],
    streams: Sequence[StreamProgress],
    inside: set[tuple[str, int, int]],
) -> list[StreamProgress]:
    """How far the rank is in its messages, by the ring's numbers; without those that the dump does not hold.

    ``inside``: group, operation and peer of those that its device is in.
    """
    told: set[tuple[str, int, int]] = set()
    undone: dict[tuple[str, int, int], list[bool | None]] = {}  # whether the device has begun each
    for one in dump.entries:
        if one.op in MESSAGES:
            key = names[one.group], int(one.op), one.peer
            told.add(key)
            if not one.done:
                undone.setdefault(key, []).append(one.begun)
    found: list[StreamProgress] = []
    for one in streams:
        key = one.group, one.op, one.peer
        if key in told:
            begun = undone.get(key, [])
            completed = max(one.started - len(begun), 0)
            waits = key not in inside and begun[:1] != [True]  # behind another call: a device works in order
            started = min(one.started, completed + (not waits))
            found.append(replace(one, started=started, completed=completed))
    return found
