"""Keeps the series of a time-series database few, whatever names a job comes up with."""

from __future__ import annotations


class NamedSeries:
    """Lets few new label sets in: ``most`` at once, and then as many a day. Those it knows cost nothing."""

    def __init__(self, most: int) -> None:
        self.refused = 0  # how often a new one was not let in
        self._most = most
        self._left = float(most)
        self._then_s: float | None = None
        self._known: dict[tuple[str, ...], None] = {}  # the one that was not asked for longest first

    def admits(self, labels: tuple[str, ...], now_s: float) -> bool:
        """Whether a series with these labels may be exposed at ``now_s``, seconds of a steady clock."""
        if labels in self._known:
            del self._known[labels]
        else:
            since_s = now_s - (now_s if self._then_s is None else self._then_s)
            self._left = min(self._left + max(since_s, 0.0) * self._most / 86_400, self._most)
            self._then_s = now_s
            if self._left < 1:
                self.refused += 1
                return False
            self._left -= 1
        self._known[labels] = None
        if len(self._known) > 2 * self._most:
            del self._known[next(iter(self._known))]
        return True
