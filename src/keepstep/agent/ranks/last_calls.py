"""The last collectives of a rank as its ring has them, and whether it is used to call them at that place.

A rank that took another way than the others often makes a call that it has never made at that place before. So for
each call it is counted how often the same line called the same operation there (`core.habits`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.agent.ranks.event_buffer import Rows
from keepstep.core.events import Flag, Kind, element_of, reduction_of
from keepstep.core.habits import usual
from keepstep.core.summary import OpEnded

MOST_CALLS = 8192  # collectives of the past that are looked at
_ENDED = 4  # calls of a group that are told; more would make the states of large jobs too long
_GROUPS = 3  # groups of which calls are told: those used last
_OPEN = 64  # calls in flight of which is said how usual they are
_RECENT = 64  # latest calls of which the usual place in the code is looked for
_SITE_CHARACTERS = 200
_FAILED = int(Flag.FAILED)


@dataclass(frozen=True, slots=True)
class LastCalls:
    """The last collectives of a rank.

    Attributes:
        ended: those that it has left, by the number of their group, oldest first.
        usual: of those in flight, by ticket: how often it has made this call at this place before; -1: not known.
        main_site: the number of the place in the code that made most of the latest calls; 0: not known.
    """

    ended: Mapping[int, tuple[OpEnded, ...]] = field(default_factory=dict[int, tuple[OpEnded, ...]])
    usual: Mapping[int, int] = field(default_factory=dict[int, int])
    main_site: int = 0


def last_calls(records: Rows, sites: Sequence[str] = ()) -> LastCalls:
    """The last collectives among the records of a ring, given in the order of tickets."""
    calls = records[records["kind"] == Kind.COLLECTIVE][-MOST_CALLS:]
    if not len(calls):
        return LastCalls()
    alike, sited = _alike(calls), calls["site"] != 0
    has_ended = calls["end_ns"] != 0
    open_at = np.flatnonzero(~has_ended)[-_OPEN:].tolist()
    habit = {at: usual(alike, at) if sited[at] else -1 for at in open_at}
    groups = list(dict.fromkeys(calls["group"][::-1].tolist()))[:_GROUPS]
    ended: dict[int, tuple[OpEnded, ...]] = {}
    for group in groups:
        last = np.flatnonzero(has_ended & (calls["group"] == group))[-_ENDED:].tolist()
        ended[group] = tuple(_ended(calls[at], usual(alike, at) if sited[at] else -1, sites) for at in last)
    open_ones = {int(calls["ticket"][at]): count for at, count in habit.items()}
    return LastCalls(ended, open_ones, int(np.bincount(calls["site"][-_RECENT:]).argmax()))


def _alike(calls: Rows) -> NDArray[np.uint64]:
    """One number for each call, equal for the same operation of the same group from the same line."""
    numbers = calls["site"].astype(np.uint64) << np.uint64(24)
    numbers |= (calls["group"].astype(np.uint64) & np.uint64(0xFFFF)) << np.uint64(8)
    numbers |= calls["op"].astype(np.uint64)
    return numbers


def _ended(call: Any, habit: int, sites: Sequence[str]) -> OpEnded:
    flags, site = int(call["flags"]), int(call["site"])
    return OpEnded(
        seq=int(call["seq"]),
        op=int(call["op"]),
        bytes=int(call["bytes"]),
        element=element_of(flags),
        reduction=reduction_of(flags),
        site=sites[site][-_SITE_CHARACTERS:] if site < len(sites) else "",
        usual=habit,
        failed=(flags & _FAILED) != 0,
        thread=int(call["thread"]),
    )
