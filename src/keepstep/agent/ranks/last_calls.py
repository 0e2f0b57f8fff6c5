"""The last collectives of a rank as its ring has them, and whether it is used to call them at that place.

A rank that took another way than the others often makes a call there that it has never made there before. So for each
call it is counted how often the same line called the same operation right after the same call before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.agent.ranks.event_buffer import Rows
from keepstep.core.events import Flag, Kind, element_of, reduction_of
from keepstep.core.summary import OpEnded

MOST_CALLS = 8192  # collectives of the past that are looked at
_ENDED = 4  # calls of a group that are told; more would make the states of large jobs too long
_GROUPS = 3  # groups of which calls are told: those used last
_OPEN = 64  # calls in flight of which is said how usual they are
_RECENT = 64  # latest calls of which the usual place in the code is looked for
_LEAST_PAST = 8  # fewer calls before it are no past to compare with
_SITE_CHARACTERS = 200
_FAILED = int(Flag.FAILED)
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))


@dataclass(frozen=True, slots=True)
class LastCalls:
    """The last collectives of a rank.

    Attributes:
        ended: those that it has left, by the number of their group, oldest first.
        usual: of those in flight, by ticket: how often it has made this call after the same one before; -1: not known.
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
    pairs = _pairs(calls)
    has_ended = calls["end_ns"] != 0
    open_at = np.flatnonzero(~has_ended)[-_OPEN:].tolist()
    usual = {int(calls["ticket"][at]): _usual(calls, pairs, at) for at in open_at}
    groups = list(dict.fromkeys(calls["group"][::-1].tolist()))[:_GROUPS]
    ended: dict[int, tuple[OpEnded, ...]] = {}
    for group in groups:
        last = np.flatnonzero(has_ended & (calls["group"] == group))[-_ENDED:].tolist()
        ended[group] = tuple(_ended(calls[at], _usual(calls, pairs, at), sites) for at in last)
    return LastCalls(ended, usual, int(np.bincount(calls["site"][-_RECENT:]).argmax()))


def _pairs(calls: Rows) -> NDArray[np.uint64]:
    """One number for each call and the one before it; equal where group, operation and line of both are equal."""
    words = calls["site"].astype(np.uint64) << np.uint64(24)
    words |= (calls["group"].astype(np.uint64) & np.uint64(0xFFFF)) << np.uint64(8)
    words |= calls["op"].astype(np.uint64)
    pairs = words * _MIX[0]
    pairs[1:] ^= (words[:-1] + np.uint64(1)) * _MIX[1]
    return pairs


def _usual(calls: Rows, pairs: NDArray[np.uint64], at: int) -> int:
    if at < _LEAST_PAST or not calls["site"][at]:
        return -1
    return int(np.count_nonzero(pairs[1:at] == pairs[at]))


def _ended(call: Any, usual: int, sites: Sequence[str]) -> OpEnded:
    flags, site = int(call["flags"]), int(call["site"])
    return OpEnded(
        seq=int(call["seq"]),
        op=int(call["op"]),
        bytes=int(call["bytes"]),
        element=element_of(flags),
        reduction=reduction_of(flags),
        site=sites[site][-_SITE_CHARACTERS:] if site < len(sites) else "",
        usual=usual,
        failed=(flags & _FAILED) != 0,
    )
