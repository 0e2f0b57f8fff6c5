"""The local part of detection on one rank: its iteration times changed, it makes no progress, it does again."""

from __future__ import annotations

from collections import deque
from statistics import median

from keepstep.core.events import Phase
from keepstep.core.finding import Finding
from keepstep.detect import ChangePoint, ChangePointDetector, HangDetector

_STEPS_KEPT = 4096
_SAME_STEPS = 5  # changes of iteration and own time this close are one
_PACE_STEPS = 16
_FELT = 1.05  # of the iteration time: a change of own time below it is absorbed by the job


class RankWatch:
    """Feed it every finished iteration and, at each look, how far the rank has come; it returns findings.

    Two series are watched: the iteration time, which slows for any cause, and the rank's own time (``self_s``), in
    which a slow rank stands out of the noise that the whole job shares. A change of own time counts when the iteration
    time moved with it. All ranks of a job may find the same change; the controller sorts that out.
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
        self._own_changes = ChangePointDetector(warmup=0)
        self._steps: deque[tuple[int, float]] = deque(maxlen=_STEPS_KEPT)  # step, iteration time
        self._first_index = 0
        self._told: dict[str, int] = {}  # kind to the onset last told

    def iteration(self, step: int, duration_s: float, self_s: float, now_s: float) -> Finding | None:
        """An iteration after the warm-up, in order of steps."""
        if len(self._steps) == _STEPS_KEPT:
            self._first_index += 1
        self._steps.append((step, duration_s))
        own = self._own_changes.update(self_s)
        change = self._changes.update(duration_s)
        if change is not None:
            return self._tell(change, change.before, change.after, now_s)
        if own is None:
            return None
        before_s, after_s = self._pace_around(own)
        slower = own.after > own.before
        felt = after_s >= _FELT * before_s if slower else "slow" in self._told and before_s >= _FELT * after_s
        return self._tell(own, before_s, after_s, now_s) if felt else None

    def _tell(self, change: ChangePoint, before_s: float, after_s: float, now_s: float) -> Finding | None:
        kind = "slow" if change.after > change.before else "relief"
        onset = self._steps[self._place(change)][0]
        if kind in self._told and abs(onset - self._told[kind]) <= _SAME_STEPS:
            return None
        self._told[kind] = onset
        return Finding(
            kind,
            self._rank,
            self._node,
            now_s,
            self._steps[-1][0],
            onset_step=onset,
            before_s=before_s,
            after_s=after_s,
            confidence=change.confidence,
        )

    def _place(self, change: ChangePoint) -> int:
        return min(max(change.index - self._first_index, 0), len(self._steps) - 1)

    def _pace_around(self, change: ChangePoint) -> tuple[float, float]:
        """Median iteration time of the steps before the change and since; equal where there are none before."""
        place = self._place(change)
        times = [time for _, time in self._steps]
        after_s = median(times[place:])
        return (median(times[max(place - _PACE_STEPS, 0) : place]) if place else after_s), after_s

    def lasted(self, phase: int, seconds: float) -> None:
        """A data or optimizer phase has ended that took that long."""
        self._hang.lasted(Phase(phase), seconds)

    @property
    def overdue_s(self) -> float:
        """How long the rank has waited for others, once that is over the usual; else 0."""
        return self._hang.overdue_s

    def progress(
        self,
        now_s: float,
        progress: int,
        phase: int,
        step: int,
        waiting: bool,
        stopped_s: float = 0.0,
        held: bool = False,
        moved_s: float | None = None,
    ) -> Finding | None:
        """How far the rank has come at ``now_s``: a number that grows with every record and every end.

        ``waiting``: it is blocked in an operation. ``stopped_s``: its process has been stopped for so long.
        ``held``: a hold is in force. ``moved_s``: the time of its last record or end.
        """
        if not self._looked:  # by an agent that came later: the steps before it count, too
            self._looked = True
            self._hang.observe(now_s, progress, Phase.STARTUP, step=0 if step >= 0 else -1)
        stuck = self._hang.observe(
            now_s,
            progress,
            Phase(phase),
            step=step,
            waiting=waiting,
            stopped_s=stopped_s,
            held=held,
            moved_s=moved_s,
        )
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
