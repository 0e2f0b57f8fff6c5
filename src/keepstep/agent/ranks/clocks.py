"""Picks operations by which node clocks are compared, so that all members of a group pick the same ones.

Each member picks operations whose sequence number is a multiple of a power of two. It adapts the power to the rate of
the group, for one to eight samples a second. If members use different powers for a while, they still share the
operations of the larger power.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from keepstep.agent.ranks.event_buffer import Rows, chosen, joined
from keepstep.core.events import Flag, Kind, Op
from keepstep.core.summary import ClockSample, GroupInfo

MOST_PER_GROUP = 8
_KEPT = 512
_FIRST_STRIDE = 16
_LAST_STRIDE = 1 << 14
_MOST_UNSEEN = 8192
_PHASE, _P2P = int(Kind.PHASE), int(Kind.P2P)
# Flags of operations whose end says nothing about other members' starts.
_NO_ORDER = int(Flag.FAILED | Flag.ON_DEVICE)
# Operations that end on one member only after they have started on all others, or on the peer.
_ORDERING = frozenset(
    {Op.ALLREDUCE, Op.ALLGATHER, Op.REDUCE_SCATTER, Op.ALLTOALL, Op.BARRIER, Op.SEND, Op.RECV}
)


class ClockSampler:
    """The clock samples of one rank, without groups inside the node and operations on a device.

    ``local``: the node's ranks. For collectives, only the lowest local rank of a group takes samples.
    """

    def __init__(self, rank: int, local: Collection[int]) -> None:
        self._rank = rank
        self._local = frozenset(local)
        self._names: list[str] = []
        self._mask = np.zeros(0, np.uint32)  # the power of two minus 1, by group number
        self._collective = np.zeros(0, np.bool_)
        self._p2p = np.zeros(0, np.bool_)
        self._waiting: list[ClockSample] = []
        self._unseen: list[Rows] = []
        self._unseen_count = 0
        self._counts: dict[int, int] = {}
        self._kept: deque[ClockSample] = deque(maxlen=_KEPT)

    def know(self, groups: Sequence[GroupInfo]) -> None:
        """Take the list of the rank's groups, in the order of the ring's group numbers."""
        old = self._mask
        self._names = [group.name for group in groups]
        remote = [not self._local.issuperset(group.members) for group in groups]
        lowest = [min(self._local.intersection(group.members), default=-1) == self._rank for group in groups]
        self._p2p = np.array(remote, np.bool_)
        self._collective = np.array([far and low for far, low in zip(remote, lowest, strict=True)], np.bool_)
        self._mask = np.full(len(groups), _FIRST_STRIDE - 1, np.uint32)
        self._mask[: len(old)] = old

    def take(self, finished: Rows) -> None:
        """Take completed records, which are searched together about once a second."""
        self._unseen.append(finished)
        self._unseen_count += len(finished)
        if self._unseen_count > _MOST_UNSEEN:
            self._look()

    def _look(self) -> None:
        unseen, self._unseen, self._unseen_count = self._unseen, [], 0
        if not unseen or not bool(self._p2p.any()):
            return
        finished = joined(unseen)
        group: NDArray[np.int16] = finished["group"]
        kinds = finished["kind"]
        known = (group >= 0) & (group < len(self._mask)) & (kinds != _PHASE)
        place = np.where(known, group, 0)
        useful = np.where(kinds == _P2P, self._p2p[place], self._collective[place])
        picked = chosen(finished, known & useful & ((finished["seq"] & self._mask[place]) == 0))
        fields: list[tuple[int, ...]] = picked[
            ["group", "op", "peer", "seq", "start_ns", "end_ns", "kind", "flags"]
        ].tolist()
        for number, op, peer, seq, start_ns, end_ns, kind, flags in fields:
            count = self._counts[number] = self._counts.get(number, 0) + 1
            inside = kind == _P2P and peer in self._local
            if count > MOST_PER_GROUP or op not in _ORDERING or flags & _NO_ORDER or inside:
                continue
            times_s = start_ns * 1e-9, end_ns * 1e-9
            sample = ClockSample(self._names[number], op, peer, seq, self._rank, *times_s)
            self._waiting.append(sample)
            self._kept.append(sample)

    def drain(self) -> tuple[ClockSample, ...]:
        """The samples since the last call. To be called once a second, because it adapts the powers to the counts."""
        self._look()
        for group in range(len(self._mask)):
            count, mask = self._counts.get(group, 0), int(self._mask[group])
            if count > MOST_PER_GROUP and mask < _LAST_STRIDE - 1:
                self._mask[group] = 2 * mask + 1
            elif count < 2 and mask > 0:
                self._mask[group] = mask // 2
        self._counts.clear()
        samples, self._waiting = tuple(self._waiting), []
        return samples

    def recent(self) -> tuple[ClockSample, ...]:
        """The last few hundred samples, oldest first."""
        self._look()
        return tuple(self._kept)
