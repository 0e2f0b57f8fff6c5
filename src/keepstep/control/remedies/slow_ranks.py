"""Ranks that turn slow where the pace does not show it: while shares are unequal, or while the job begins again.

One that turns slow behind a slower stage costs nothing until that is fast again; then the shares that fit only change.
Those that watch a job that has begun again have seen no faster iterations. What a micro-batch takes each rank of a
stage tells who it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from keepstep.control.remedies.device_speeds import times_as_long
from keepstep.control.remedies.moves import Look
from keepstep.core.incident import Culprit

_SLOW = 1.2  # times what the middle rank of its stage takes for a micro-batch
_LOOKS = 2  # one after the other that say so
_MOST = 8  # named at once


@dataclass(slots=True)
class SlowRanks:
    """Of one job. ``since``: the iteration at which each was first seen to be slow, by rank."""

    since: dict[int, int] = field(default_factory=dict[int, int])
    _looks: dict[int, int] = field(default_factory=dict[int, int])

    def found(
        self, look: Look, step: int, node_of: Mapping[int, str], blamed: Collection[str]
    ) -> tuple[Culprit, ...]:
        """Those that hold up their replica, seen slow twice; none on a node that is blamed already.

        Args:
            look: with what a micro-batch takes, by rank, and their stages.
            step: the newest iteration in it.
            node_of: names by rank.
            blamed: names of nodes.
        """
        slow = {rank: times for rank, times in _slow(look).items() if node_of.get(rank, "") not in blamed}
        self._looks = {rank: self._looks.get(rank, 0) + 1 for rank in slow}
        self.since = {rank: self.since.get(rank, step) for rank in slow}
        sure = sorted((rank for rank in slow if self._looks[rank] >= _LOOKS), key=lambda rank: -slow[rank])
        return tuple(
            Culprit(rank, None, node_of.get(rank, ""), "", round(slow[rank], 2), "medium", "compute")
            for rank in sorted(sure[:_MOST])
        )


def _slow(look: Look) -> dict[int, float]:
    """How many times as long those take that hold up their replica, by rank."""
    slowest: dict[int, int] = {}  # by replica
    for rank, seconds in look.seconds.items():
        replica = look.splits[rank].replica
        if seconds > look.seconds.get(slowest.get(replica, -1), 0.0):
            slowest[replica] = rank
    times = times_as_long(look)
    return {rank: times[rank] for rank in slowest.values() if times[rank] >= _SLOW}
