"""In which iterations a rank was the slow one, and whether that is the same rank for long enough to be blamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

UNSTEADY = "the slowest rank changes from step to step: the work per step differs"

_FEW = 6  # with fewer iterations a rank that is slow by chance looks like a slow one
# By how many standard deviations of a rank's own time from step to step a slow rank is above its peers.
_LEAST_TIMES, _LEAST_TIMES_OF_FEW = 1.5, 3.0
# A rank may miss being the slow one in one of so many iterations, to be named and to be moved.
_MISSES, _MISSES_TO_MOVE = 5, 6
_NEWEST = 4  # iterations of which it must be the slow one in all but one
_TO_MOVE = 8  # iterations that a remedy needs which moves or excludes a node
_MANY, _KEPT = 16, 32  # iterations by whose number alone a rank is judged, and those that are remembered

Steadiness = Literal["steady", "unsure", "unsteady"]


@dataclass(frozen=True, slots=True)
class SlowSteps:
    """Where one rank was clearly slower than its peers.

    Attributes:
        by_step: whether it was, by step; iterations that were not slow are left out.
        times: how far it is above them in the middle, in standard deviations of own times from step to step.
    """

    by_step: Mapping[int, bool] = field(default_factory=dict[int, bool])
    times: float = float("inf")

    @property
    def slow(self) -> int:
        """In how many iterations it was the slow one."""
        return sum(self.by_step.values())

    @property
    def steadiness(self) -> Steadiness:
        """Whether it can be named: *unsure* while few iterations, or uneven ones, may be chance."""
        known = len(self.by_step)
        if self.slow < known - known // _MISSES or not self._is_newest_slow():
            return "unsteady"
        return (
            "steady" if self.times >= (_LEAST_TIMES if known >= _FEW else _LEAST_TIMES_OF_FEW) else "unsure"
        )

    @property
    def may_be_moved(self) -> bool:
        """Whether it is the slow one for so long, and still, that its node may be moved or replaced."""
        known = len(self.by_step)
        # Shares that change meanwhile make own times differ, too: after many iterations it counts how often alone.
        clear = self.times >= _LEAST_TIMES or known >= _MANY
        return known >= _TO_MOVE and self._is_often_slow() and clear

    @property
    def must_stay(self) -> bool:
        """Whether its node is not to be moved, as others are the slow ones too often."""
        return len(self.by_step) >= _TO_MOVE and not self._is_often_slow()

    def then(self, newer: SlowSteps) -> SlowSteps:
        """With newer iterations; the oldest ones are forgotten."""
        both = {**self.by_step, **newer.by_step}
        return SlowSteps({step: both[step] for step in sorted(both)[-_KEPT:]}, newer.times)

    def _is_often_slow(self) -> bool:
        known = len(self.by_step)
        return self.slow >= known - known // _MISSES_TO_MOVE and self._is_newest_slow()

    def _is_newest_slow(self) -> bool:
        newest = [self.by_step[step] for step in sorted(self.by_step)[-_NEWEST:]]
        return sum(newest) >= min(len(newest), _NEWEST - 1)
