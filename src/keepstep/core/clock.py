"""Time as an argument: code that waits takes a ``Clock``, so its tests need not wait."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock of one node; seconds since an arbitrary origin (Linux: boot, ``CLOCK_MONOTONIC``)."""

    def now_s(self) -> float:
        """Seconds on this clock."""
        ...


class MonotonicClock:
    """The node's own clock, the same that ring records are stamped with."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told: for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (>= 0)."""
        if seconds < 0:
            raise ValueError(f"a clock does not run backwards: advance({seconds})")
        self._now_s += seconds
