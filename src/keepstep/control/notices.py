"""What agents and the controller notice about nodes is told once, and little of it where it is so on all nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_AGAIN_S = 3600.0  # time after which a line that held before is told again, and for which lines are counted
_MOST_TOLD = 8
_MOST_KEPT = 4096
_MORE = "more such lines are in `keepstep status`"


class Notices:
    """Decides which lines the operator is told."""

    def __init__(self) -> None:
        # When each last held.
        self._held_s: dict[str, float] = {}
        self._hour_s = float("-inf")  # when the hour began in which these lines were told
        self._lines = 0

    def fresh(self, texts: Iterable[str], now_s: float) -> Iterator[str]:
        """What is to be told now, of what holds now."""
        for text in texts:
            last_s = self._held_s.get(text)
            if len(self._held_s) < _MOST_KEPT or last_s is not None:
                self._held_s[text] = now_s
            if last_s is not None and now_s - last_s < _AGAIN_S:
                continue
            if now_s - self._hour_s >= _AGAIN_S:
                self._hour_s, self._lines = now_s, 0
            self._lines += 1
            if self._lines <= _MOST_TOLD:
                yield text
            elif self._lines == _MOST_TOLD + 1:
                yield _MORE
