"""How long a save may wait for other ranks: no longer than a step of the job takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

LEAST_S = 0.5
"""Waiting so long once costs no job anything, and covers what a loaded machine keeps a rank from coming."""

PATIENCE_S = 30.0


class _Save(NamedTuple):
    begun_s: float
    collectives: int  # how many this rank had begun; 0: nobody counts them
    event: torch.cuda.Event | None  # behind them on the GPU; None: the host waits for its collectives


class Pace:
    """When this rank saved, and how many collectives it had begun then."""

    def __init__(self, collectives: Callable[[], int | None]) -> None:
        self._collectives = collectives
        self._saves: deque[_Save] = deque(maxlen=3)

    def note(self, now_s: float) -> None:
        """A save begins."""
        event = None
        if torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record()
        self._saves.append(_Save(now_s, self._collectives() or 0, event))

    @property
    def collectives(self) -> int:
        """How many collectives this rank had begun at its last save; 0 unless there were some since the one before."""
        counts = [save.collectives for save in self._saves][-2:]
        return counts[1] if len(counts) == 2 and 0 < counts[0] < counts[1] else 0

    @property
    def in_step(self) -> bool:
        """Whether all ranks are known to have taken part in collectives between two of this one's last three saves.

        Hence all have been where this one saved first. On a GPU that is known once its collectives are over there: the
        host may be far ahead of them, and of the other ranks.
        """
        return any(
            0 < one.collectives < other.collectives and _is_over(other.event)
            for one, other in pairwise(self._saves)
        )

    def patience_s(self, known_late: bool = False) -> float:
        """As long as it took from the save before to this one, within bounds.

        ``known_late``: the others did come the last time, only later; then there is no upper bound.
        """
        interval_s = self._saves[-1].begun_s - self._saves[-2].begun_s if len(self._saves) > 1 else 0.0
        return max(LEAST_S, interval_s if known_late else min(interval_s, PATIENCE_S))


def _is_over(event: torch.cuda.Event | None) -> bool:
    try:
        return event is None or event.query()
    except RuntimeError:  # the GPU has failed: nothing is known
        return False
