"""Takes heartbeats as samples: of each rank that has finished an iteration since the last look."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from keepstep.view.run_snapshot import RankTable
from keepstep.view.samples import SampleStore

_MOST_RANKS = 1 << 20


class BeatIntake:
    """Feeds a store with the newest heartbeats of the ranks, each iteration once."""

    def __init__(self, samples: SampleStore) -> None:
        self._samples = samples
        self._incarnation = -1
        self._taken: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # step by rank; -1: none

    def take(self, ranks: RankTable, incarnation: int, unix_s: float) -> None:
        """Take a table of heartbeats. ``unix_s``: when they were so."""
        if not len(ranks):
            return
        room = min(int(ranks.rank[-1]) + 1, _MOST_RANKS)
        if incarnation != self._incarnation or room > len(self._taken):
            taken = np.full(max(room, len(self._taken)), -1, np.int64)
            if incarnation == self._incarnation:
                taken[: len(self._taken)] = self._taken
            self._incarnation, self._taken = incarnation, taken
        known = ranks.rank < len(self._taken)
        places = np.flatnonzero(known)
        places = places[ranks.step[places] != self._taken[ranks.rank[places]]]
        if not len(places):
            return
        self._taken[ranks.rank[places]] = ranks.step[places]
        iteration_s = ranks.iteration_s[places]
        begun = unix_s - ranks.idle_s[places].astype(np.float64) - iteration_s
        self._samples.take(
            ranks.rank[places], ranks.step[places], ranks.self_s[places], iteration_s, incarnation, begun
        )
