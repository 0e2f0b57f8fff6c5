"""How long a save waits for a slot, by what is known of the other ranks.

Ranks that run without collectives may be at different steps, and who saves first waits. Where this rank has begun a
collective of all ranks between its saves, the others have come as far: a rank that still holds nothing when this one
has saved twice does not save at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from keepstep.checkpoint.memory.slots import Key

PATIENCE_S = 30.0
_SAVES = 3  # the two that fill the slots, and the one that finds them full


class Pace:
    """When this rank saved, and how many collectives it had begun then."""

    def __init__(self, collectives: Callable[[], int | None]) -> None:
        self._collectives = collectives
        self._saves: deque[tuple[float, int | None]] = deque(maxlen=_SAVES)

    def note(self, now_s: float) -> None:
        """A save begins."""
        self._saves.append((now_s, self._collectives()))

    @property
    def in_step(self) -> bool:
        """Whether all ranks took part in collectives between the last saves of this one."""
        counts = [count for _, count in self._saves if count is not None]
        return len(counts) == _SAVES and counts[0] < counts[1] < counts[2]

    def patience_s(self, held: Sequence[frozenset[Key]], missed: Sequence[frozenset[Key]]) -> float:
        """How long to wait for a slot. Both by rank: ``held``, what each rank holds now; ``missed``, what they held
        when a slot was waited for in vain."""
        if not self.in_step:
            return PATIENCE_S
        if list(held) == list(missed):
            return 0.0
        if all(held):
            return PATIENCE_S
        return min(self._saves[-1][0] - self._saves[-2][0], PATIENCE_S)
