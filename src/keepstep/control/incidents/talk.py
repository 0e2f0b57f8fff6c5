"""Bounds what is printed of slowdowns, and for which of them rings are saved.

A job with short steps on a busy host slows down for moments all the time. Each is an incident with a file of its own,
and few are worth a page on the console: the first one is, then one after growing pauses. A slowdown that lasts is told,
and so are hangs, deaths and what is done about any incident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from keepstep.core.incident import Culprit, Incident

Saying = Literal["verdict", "sharper", "acts", "closes", ""]  # what of an incident is printed

_FIRST_PAUSE_S = 120.0  # after a verdict that is told, before another one like it
_PAUSE_GROWS = 3.0
_LONGEST_PAUSE_S = 3600.0
_SURE_AT_ONCE = 3  # verdicts that name the same culprits for sure and are told without a pause
_LASTS_S = 30.0  # after this long an incident is told, whatever was told before
_MOST_KINDS = 256


@dataclass(slots=True)
class _Kind:
    """Slowdowns that are alike: the same culprits are named for sure, or nobody is."""

    told: int = 0  # before the pause
    pause_s: float = _FIRST_PAUSE_S
    silent_until_s: float | None = None


class Talk:
    """Decides what of an incident is told. Times are the controller's, in seconds."""

    def __init__(self) -> None:
        self._untold = 0  # slowdowns of which nothing was printed since this was last said
        self._kinds: dict[tuple[str, ...], _Kind] = {}
        # Open slowdowns by number: since when they are silent, None for those that were told.
        self._open: dict[int, float | None] = {}

    def knows(self, incident: Incident) -> None:
        """Note an open incident that an earlier controller has told."""
        self._open[incident.number] = None

    def is_overdue(self, incident: Incident, now_s: float) -> bool:
        """Whether nothing was printed of an open slowdown, and it has lasted."""
        since_s = self._open.get(incident.number)
        return since_s is not None and now_s - since_s >= _LASTS_S

    def tells(self, incident: Incident, say: Saying, now_s: float) -> Saying:
        """What is printed of what there is to ``say`` about an incident; "" for nothing.

        One that was not told is, in full, once it has lasted, names somebody for sure, or something is done about it.
        """
        if incident.kind != "slow":
            return say
        number, closed = incident.number, incident.status != "open"
        if number not in self._open:
            return self._tells_first(incident, say, now_s) if say else ""
        if self._open[number] is None:
            if closed:
                del self._open[number]
            return say
        lasted = self.is_overdue(incident, now_s)
        sure = say == "sharper" and _named(incident.culprits) and self._is_due(incident.culprits, now_s)
        if closed:
            del self._open[number]
        if not (lasted or sure or say == "acts"):
            return ""
        self._untold = max(self._untold - 1, 0)
        if closed:
            return "closes"
        self._open[number] = None
        return "verdict"

    def take_untold(self) -> int:
        """How many slowdowns were not told since this was asked last."""
        count, self._untold = self._untold, 0
        return count

    def _tells_first(self, incident: Incident, say: Saying, now_s: float) -> Saying:
        told = say == "acts" or self._is_due(incident.culprits, now_s)
        self._untold += not told
        if incident.status == "open":
            self._open[incident.number] = None if told else now_s
        return say if told else ""

    def _is_due(self, culprits: Sequence[Culprit], now_s: float) -> bool:
        named = _named(culprits)
        if named not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            named = ()
        kind = self._kinds.setdefault(named, _Kind())
        if kind.silent_until_s is not None:
            if now_s < kind.silent_until_s:
                return False
            if now_s > kind.silent_until_s + kind.pause_s:  # the kind was quiet for a whole pause
                kind.told, kind.pause_s, kind.silent_until_s = 0, _FIRST_PAUSE_S, None
        kind.told += 1
        if kind.told >= (_SURE_AT_ONCE if named else 1):
            kind.silent_until_s = now_s + kind.pause_s
            kind.pause_s = min(kind.pause_s * _PAUSE_GROWS, _LONGEST_PAUSE_S)
        return True


def _named(culprits: Sequence[Culprit]) -> tuple[str, ...]:
    """Who is named for sure."""
    return tuple(sorted(str((one.rank, one.link)) for one in culprits if one.confidence == "high"))
