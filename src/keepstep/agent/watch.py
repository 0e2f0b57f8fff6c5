"""The local part of detection on one rank: its iteration times changed, it makes no progress, it does again."""

from __future__ import annotations

from collections import deque

from keepstep.core.events import Phase
from keepstep.core.finding import Finding
from keepstep.detect import ChangePointDetector, HangDetector

_STEPS_KEPT = 4096


class RankWatch:
    """Feed it every finished iteration and, at each look, how far the rank has come; it returns findings.

    All ranks of a job may find the same change; the controller sorts that out.
    """

    def __init__(self, rank: int, node: str) -> None:
        self._rank, self._node = rank, node
        self._hang = HangDetector()
        self._looked = False
        self._hanging = False
        self.forget_iterations()

    def forget_iterations(self) -> None:
        """Start anew with the iteration times (a new process, or iterations of another length)."""
        self._changes = ChangePointDetector(warmup=0)
        self._steps: deque[int] = deque(maxlen=_STEPS_KEPT)
        self._first_index = 0
        self._count = 0

    def iteration(self, step: int, duration_s: float, now_s: float) -> Finding | None:
        """An iteration after the warm-up, in order of steps."""
        if len(self._steps) == _STEPS_KEPT:
            self._first_index += 1
        self._steps.append(step)
        change = self._changes.update(duration_s)
        if change is None:
            return None
        place = min(max(change.index - self._first_index, 0), len(self._steps) - 1)
        return Finding(
            "slow" if change.after > change.before else "relief",
            self._rank,
            self._node,
            now_s,
            step,
            onset_step=self._steps[place],
            before_s=change.before,
            after_s=change.after,
            confidence=change.confidence,
        )

    def progress(self, now_s: float, progress: int, phase: int, step: int, waiting: bool) -> Finding | None:
        """How far the rank has come at ``now_s``: a number that grows with every record and every end.

        ``waiting``: it is blocked in an operation.
        """
        if not self._looked:  # by an agent that came later: the steps before it count, too
            self._looked = True
            self._hang.observe(now_s, progress, Phase.STARTUP, step=0 if step >= 0 else -1)
        stuck = self._hang.observe(now_s, progress, Phase(phase), step=step, waiting=waiting)
        if stuck is not None:
            self._hanging = True
            return Finding(
                "hang",
                self._rank,
                self._node,
                now_s,
                step,
                stuck_s=stuck.stuck_s,
                limit_s=stuck.limit_s,
                phase=phase,
            )
        if self._hanging and self._hang.stuck is None:
            self._hanging = False
            return Finding("resumed", self._rank, self._node, now_s, step, phase=phase)
        return None
