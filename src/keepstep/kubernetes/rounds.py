"""When each job is asked how it stands. Pure: each in its own time, so that one that is silent holds up no other."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

ASK_S, ASK_SILENT_S = 1.0, 5.0
"""Time between two questions to one job, and to one that has not answered lately."""
_LATELY_S = 30.0
"""A job that fell silent within this time may be just beginning again, when its word matters most."""
_ASK_EACH_S = 0.005
"""Of very many jobs, each is asked so much more seldom for each of them."""
_AT_ONCE = 64

Key = TypeVar("Key")


class Rounds(Generic[Key]):
    """The questions of one operator. Times are seconds of any steady clock."""

    def __init__(self) -> None:
        self._asking: set[Key] = set()
        self._next_s: dict[Key, float] = {}
        self._heard_s: dict[Key, float] = {}
        self._usual_s = ASK_S

    def begin(self, jobs: Collection[Key], now_s: float) -> list[Key]:
        """Those of all ``jobs`` to ask now, the longest due first; each of them until `end`."""
        self._usual_s = max(ASK_S, _ASK_EACH_S * len(jobs))
        self._next_s = {job: self._next_s.get(job, float("-inf")) for job in jobs}
        self._heard_s = {job: at_s for job, at_s in self._heard_s.items() if job in self._next_s}
        due = [job for job, at_s in self._next_s.items() if at_s <= now_s and job not in self._asking]
        begun = sorted(due, key=self._next_s.__getitem__)[: _AT_ONCE - len(self._asking)]
        self._asking.update(begun)
        return begun

    def end(self, job: Key, now_s: float, *, heard: bool) -> None:
        """Note that a job was asked, and whether it has answered."""
        self._asking.discard(job)
        if job not in self._next_s:
            return
        if heard:
            self._heard_s[job] = now_s
        lately = now_s - self._heard_s.get(job, float("-inf")) < _LATELY_S
        self._next_s[job] = now_s + (self._usual_s if lately else max(self._usual_s, ASK_SILENT_S))
