"""How long a save may wait for other ranks: no longer than a step of the job takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

LEAST_S = 0.5
"""Waiting so long once costs no job anything, and covers what a loaded machine keeps a rank from coming."""

PATIENCE_S = 30.0


class Pace:
    """When this rank saved, and how many collectives it had begun then."""

    def __init__(self, collectives: Callable[[], int | None]) -> None:
        self._collectives = collectives
        self._saves: deque[tuple[float, int | None]] = deque(maxlen=2)

    def note(self, now_s: float) -> None:
        """A save begins."""
        self._saves.append((now_s, self._collectives()))

    @property
    def collectives(self) -> int:
        """How many collectives this rank had begun at its last save; 0 unless there were some since the one before."""
        counts = [count or 0 for _, count in self._saves]
        return counts[1] if len(counts) == 2 and 0 < counts[0] < counts[1] else 0

    @property
    def in_step(self) -> bool:
        """Whether all ranks took part in collectives between the last two saves of this one."""
        return self.collectives > 0

    def patience_s(self, known_late: bool = False) -> float:
        """As long as it took from the save before to this one, within bounds.

        ``known_late``: the others did come the last time, only later; then there is no upper bound.
        """
        interval_s = self._saves[-1][0] - self._saves[-2][0] if len(self._saves) == 2 else 0.0
        return max(LEAST_S, interval_s if known_late else min(interval_s, PATIENCE_S))
