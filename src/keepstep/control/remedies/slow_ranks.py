"""Ranks that turn slow without a change of the job's pace: while shares are unequal, or while the job restarts.

A rank that turns slow behind a slower stage costs nothing until that stage is fast again. Agents that begin to watch
after a restart have seen no faster iterations. In both cases a slow rank is found by its time for a micro-batch,
compared with the other ranks of its stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from keepstep.control.remedies.device_speeds import times_as_long
from keepstep.control.remedies.moves import Look
from keepstep.core.incident import Culprit

_SLOW = 1.2  # a rank is slow that takes so many times as long as the median rank of its stage
_LOOKS = 2  # successive looks that must find a rank slow
_MOST = 8  # ranks blamed at once


@dataclass(slots=True)
class SlowRanks:
    """The slow ranks of one job. ``since``: by rank, the iteration at which it was first seen to be slow."""

    since: dict[int, int] = field(default_factory=dict[int, int])
    _looks: dict[int, int] = field(default_factory=dict[int, int])

    def found(
        self, look: Look, step: int, node_of: Mapping[int, str], blamed: Collection[str]
    ) -> tuple[Culprit, ...]:
        """Culprits: ranks that hold up their replica and were slow in successive looks.

        Args:
            look: seconds for a micro-batch and stages, by rank.
            step: the newest iteration in ``look``.
            node_of: node names by rank.
            blamed: names of nodes that are blamed already; their ranks are left out.
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
    """How many times as long the ranks take that hold up their replica, by rank; only slow ones."""
    slowest: dict[int, int] = {}  # rank by replica
    for rank, seconds in look.seconds.items():
        replica = look.splits[rank].replica
        if seconds > look.seconds.get(slowest.get(replica, -1), 0.0):
            slowest[replica] = rank
    times = times_as_long(look)
    return {rank: times[rank] for rank in slowest.values() if times[rank] >= _SLOW}
