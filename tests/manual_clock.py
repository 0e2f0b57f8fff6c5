"""Time that moves only when a test says so."""

from __future__ import annotations


class ManualClock:
    """Stands in for ``time.monotonic``; begins at 0."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (>= 0)."""
        assert seconds >= 0
        self._now_s += seconds
