"""Findings that are not told at once: they count only if they still hold after a while.

Slowness is held back while an operator's order disturbs ranks (a trace) and after watching has come on again; a
standstill, where the operator has said that shorter ones are not to be told.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep.core.finding import Finding

_ENDED_BY = {"relief": "slow", "resumed": "hang"}  # the kind of finding that another one ends
_HISTORY_STEPS = 200  # agents remember little more: an older onset has no healthy steps to compare with


class HeldBack:
    """Findings of one job, at most one of a kind for each rank."""

    def __init__(self) -> None:
        self._until_s = 0.0  # until then slowness is held back
        # By kind and rank: the finding, when it came, and when it is due.
        self._held: dict[tuple[str, int], tuple[Finding, float, float]] = {}

    @property
    def until_s(self) -> float:
        """Until when slowness is held back."""
        return self._until_s

    def hold(self, until_s: float) -> None:
        """Hold slowness back until then, if not longer already."""
        self._until_s = max(self._until_s, until_s)
        self._held = {
            key: (finding, came_s, max(due_s, self._until_s) if key[0] == "slow" else due_s)
            for key, (finding, came_s, due_s) in self._held.items()
        }

    def takes(self, finding: Finding, hang_after_s: float, now_s: float) -> bool:
        """Whether the finding is kept here for now. One that ends another drops that."""
        if ended := _ENDED_BY.get(finding.kind):
            self._held.pop((ended, finding.rank), None)
            return False
        due_s = 0.0
        if finding.kind == "slow":
            due_s = self._until_s
        elif finding.kind == "hang":
            due_s = now_s + hang_after_s - finding.stuck_s
        if due_s <= now_s:
            return False
        self._held[finding.kind, finding.rank] = (finding, now_s, due_s)
        return True

    def due(self, newest_step: int, now_s: float) -> list[Finding]:
        """What has held for long enough, and is to be told now."""
        ready = [key for key, (_, _, due_s) in self._held.items() if now_s >= due_s]
        found = [self._held.pop(key) for key in ready]
        return [
            # A standstill has gone on since it was found.
            finding if finding.kind == "slow" else replace(finding, stuck_s=finding.stuck_s + now_s - came_s)
            for finding, came_s, _ in found
            if finding.kind != "slow" or finding.onset_step >= newest_step - _HISTORY_STEPS
        ]

    def forget(self) -> None:
        """Drop everything, as the job is not watched any more or begins again."""
        self._held.clear()
