"""How fast NCCL's proxy threads send to each peer, by their link tables: bytes over the time with some in flight."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from keepstep.agent.sensors.nccl_links import members_of
from keepstep.agent.sensors.path_rates import PathRates
from keepstep.agent.sensors.sockets import Look, busiest
from keepstep.core.errors import RingError
from keepstep.core.link_counters import LinkSnapshot
from keepstep.core.summary import GroupInfo, PeerTraffic, rank_address
from keepstep.ring.link_reader import LinkReader

_LOOKS = 32
_RATES = 64  # rates that are kept of a link
_NEWEST, _FEWEST = (
    8,
    8,
)  # how many of the newest say nothing of what is usual, and how many others are needed for it
_LEAST_BYTES = 65536  # fewer bytes between two looks show no rate
_LEAST_S = 1.0  # between two looks
_COSTS = 400  # a look that takes so long is followed by a pause this many times as long

_Key = tuple[int, int, int, int, bool, int]  # rank, communicator, its generation, channel, direction, peer


class NcclTraffic:
    """Samples the link tables of the node's ranks, as often as costs a quarter of a percent of a core at most."""

    def __init__(self, tables: Mapping[int, str]) -> None:
        """``tables``: paths by rank."""
        self._tables = tables
        self.rates = PathRates("NCCL")
        self._looks: deque[Look] = deque(maxlen=_LOOKS)
        self._last: dict[_Key, tuple[int, int]] = {}
        self._rates: dict[_Key, deque[float]] = {}
        self._looked_s = 0.0
        self._next_s = 0.0

    def look(self, now_s: float, groups_of: Callable[[int], Sequence[GroupInfo]]) -> None:
        """Take a sample if one is due. ``groups_of``: the groups that a rank is in."""
        if not self._tables or now_s < self._next_s:
            return
        began_s = time.thread_time()
        sent: dict[tuple[str, str], tuple[int, float]] = {}
        last: dict[_Key, tuple[int, int]] = {}
        for rank, path in self._tables.items():
            try:
                seen = LinkReader(path).snapshot()
            except RingError:
                continue
            if seen.pid:
                self._of(rank, seen, groups_of(rank), sent, last)
        self._last = last
        self._rates = {key: rates for key, rates in self._rates.items() if key in last}
        if self._looked_s:
            self._looks.append(Look(self._looked_s, now_s, sent))
            self.rates.add(sent)
        self._looked_s = now_s
        self._next_s = now_s + max(_LEAST_S, _COSTS * (time.thread_time() - began_s))

    def _of(
        self,
        rank: int,
        seen: LinkSnapshot,
        groups: Sequence[GroupInfo],
        sent: dict[tuple[str, str], tuple[int, float]],
        last: dict[_Key, tuple[int, int]],
    ) -> None:
        """Add what a rank has sent since the last look."""
        members = {one.index: members_of(one, rank, groups) for one in seen.communicators}
        for key, row in zip(_keys(rank, seen), seen.links, strict=True):
            counts = last[key] = int(row["bytes"]), int(row["busy_ns"])
            known = self._last.get(key)
            if known is None or not row["send"]:
                continue
            nbytes, busy_s = counts[0] - known[0], (counts[1] - known[1]) * 1e-9
            if nbytes < 0 or busy_s <= 0:
                continue
            if nbytes >= _LEAST_BYTES:
                self._rates.setdefault(key, deque(maxlen=_RATES)).append(nbytes / busy_s)
            ranks = members.get(int(row["comm"]))
            if ranks is not None and 0 <= row["peer"] < len(ranks):
                path = rank_address(rank), rank_address(ranks[int(row["peer"])])
                before = sent.get(path, (0, 0.0))
                sent[path] = before[0] + nbytes, before[1] + busy_s

    def usual(self, rank: int, seen: LinkSnapshot) -> NDArray[np.float64]:
        """For each link of a snapshot its usual rate, bytes a second: the median of its older ones; NaN: not known."""
        return np.array([self._usual(key) for key in _keys(rank, seen)], np.float64)

    def _usual(self, key: _Key) -> float:
        rates = list(self._rates.get(key, ()))[:-_NEWEST]
        return median(rates) if len(rates) >= _FEWEST else math.nan

    def traffic(self, onset_s: float, node: str, most: int) -> tuple[PeerTraffic, ...]:
        """What was sent to each rank in the samples that ended before ``onset_s``, and in those begun after it."""
        return busiest(self._looks, onset_s, node, most, "NCCL")


def _keys(rank: int, seen: LinkSnapshot) -> list[_Key]:
    """What tells each link of a snapshot apart for as long as its communicator lives."""
    generation = {one.index: one.generation for one in seen.communicators}
    found: list[_Key] = []
    for row in seen.links:
        comm, channel, peer = int(row["comm"]), int(row["channel"]), int(row["peer"])
        found.append((rank, comm, generation.get(comm, 0), channel, bool(row["send"]), peer))
    return found
