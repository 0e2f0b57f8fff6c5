"""For how long something has been so, by the operator's own clock: those of the API server and nodes may differ."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Since:
    """Remembers since when each thing has been seen to hold. ``turn`` forgets what no longer does."""

    now_s: float = 0.0
    _began_s: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    _seen: set[Hashable] = field(default_factory=set[Hashable])

    def seconds(self, what: Hashable) -> float:
        """Something holds now: for how many seconds it has been seen to."""
        self._seen.add(what)
        return self.now_s - self._began_s.setdefault(what, self.now_s)

    def turn(self, now_s: float) -> None:
        """Begin to look again at this moment. What was not asked for since the last turn does not hold any more."""
        self._began_s = {what: began_s for what, began_s in self._began_s.items() if what in self._seen}
        self._seen.clear()
        self.now_s = now_s
