"""Bounds what is printed of slowdowns, and for which of them rings are saved.

A job with short steps on a busy host slows down for moments all the time. Each is an incident with a file of its own,
and few are worth a page on the console: the first one is, then one after growing pauses. A slowdown that lasts is told,
and so are hangs, deaths and what is done about any incident.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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
    """Slowdowns that are alike: with the same culprits for sure, or with none."""

    told: int = 0
    pause_s: float = _FIRST_PAUSE_S
    silent_until_s: float = 0.0


class Talk:
    """Decides what of an incident is told. Times are the controller's, in seconds."""

    def __init__(self) -> None:
        self._untold = 0  # incidents of which nothing was printed since the last verdict that was
        self._kinds: dict[Hashable, _Kind] = {}
        self._silent: dict[
            int, float
        ] = {}  # since when, by number: open incidents of which nothing was printed

    def tells(self, incident: Incident, say: Saying, now_s: float) -> Saying:
        """What is printed of what there is to ``say`` about an incident; "" for nothing.

        One that was not told is, in full, once it has lasted, or names somebody for sure and that is due.
        """
        number = incident.number
        if say == "verdict" and incident.kind == "slow" and not self._is_due(incident.culprits, now_s):
            self._untold += 1
            self._silent[number] = now_s
            return ""
        since_s = self._silent.get(number)
        if since_s is None:
            return say
        if say == "acts" or incident.status != "open":
            del self._silent[number]
            return say if say == "acts" else ""
        sharper = say == "sharper" and _named(incident.culprits) and self._is_due(incident.culprits, now_s)
        if not sharper and now_s - since_s < _LASTS_S:
            return ""
        self._untold -= self._untold > 0
        del self._silent[number]
        return "verdict"

    def take_untold(self) -> int:
        """How many incidents were not told since this was asked last."""
        count, self._untold = self._untold, 0
        return count

    def _is_due(self, culprits: Sequence[Culprit], now_s: float) -> bool:
        named = _named(culprits)
        if named not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            named = ()
        kind = self._kinds.setdefault(named, _Kind())
        if now_s < kind.silent_until_s:
            return False
        if now_s > kind.silent_until_s + kind.pause_s:  # it was quiet
            kind.told, kind.pause_s = 0, _FIRST_PAUSE_S
        kind.told += 1
        if kind.told >= (_SURE_AT_ONCE if named else 1):
            kind.silent_until_s = now_s + kind.pause_s
            kind.pause_s = min(kind.pause_s * _PAUSE_GROWS, _LONGEST_PAUSE_S)
        return True


def _named(culprits: Sequence[Culprit]) -> tuple[str, ...]:
    """Who is named for sure."""
    return tuple(sorted(str((one.rank, one.link)) for one in culprits if one.confidence == "high"))
