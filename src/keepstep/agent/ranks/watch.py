"""Detects on one rank that its iteration times changed, that it makes no progress, or that it makes some again."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from statistics import median

from keepstep.core.events import Phase
from keepstep.core.finding import Finding
from keepstep.detect import ChangePoint, ChangePointDetector, HangDetector

PHASES = {int(phase): phase for phase in Phase}
"""By number: asking the class costs more than all else that is done at a look."""
_STEPS_KEPT = 4096
_SAME_STEPS = 5  # changes of iteration time and own time at most this many steps apart count as one
_PACE_STEPS = 16
_FELT = 1.05  # ratio of iteration times below which the job has absorbed a change of own time


class RankWatch:
    """Takes every finished iteration and the rank's progress at each look, and returns findings.

    Two series are watched: the iteration time, which grows for any cause, and the rank's own time (``self_s``), in
    which a slow rank stands out from the noise that the whole job shares. A change of own time counts if the iteration
    time changed with it. All ranks of a job may find the same change; the controller makes one incident of them.
    ``hang`` judges the rank's progress.
    """

    def __init__(self, rank: int, node: str) -> None:
        self._rank, self._node = rank, node
        self.hang = HangDetector()
        self.incarnation = 0
        self._looked = False
        self.forget_iterations()

    def forget_iterations(self) -> None:
        """Forget all iteration times, for a new process or iterations of another length."""
        self._changes = ChangePointDetector(warmup=0)
        self._own_changes = ChangePointDetector(warmup=0)
        self._steps: deque[tuple[int, float]] = deque(maxlen=_STEPS_KEPT)  # steps and their iteration times
        self._first_index = 0
        self._together = 1
        self._told: dict[str, int] = {}  # onset of the last finding of each kind

    def iteration(
        self, step: int, duration_s: float, self_s: float, now_s: float, together: int = 1
    ) -> Finding | None:
        """Take an iteration after the warm-up, in order of steps, or ``together`` ones with their mean times.

        ``step``: the first one's.
        """
        self._together = together
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
        if kind in self._told and abs(onset - self._told[kind]) <= _SAME_STEPS * self._together:
            return None
        self._told[kind] = onset
        last = self._steps[-1][0] + self._together - 1
        return Finding(
            kind,
            self._rank,
            self._node,
            now_s,
            last,
            onset_step=onset,
            together=self._together,
            before_s=before_s,
            after_s=after_s,
            confidence=change.confidence,
        )

    def _place(self, change: ChangePoint) -> int:
        return min(max(change.index - self._first_index, 0), len(self._steps) - 1)

    def _pace_around(self, change: ChangePoint) -> tuple[float, float]:
        """Median iteration times before and since the change; both are the same if no step is known before it."""
        place = self._place(change)
        times = [time for _, time in self._steps]
        after_s = median(times[place:])
        return (median(times[max(place - _PACE_STEPS, 0) : place]) if place else after_s), after_s

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
        still_s: float = 0.0,
        *,
        unseen: bool = False,
        device_still_s: float = math.inf,
    ) -> Finding | None:
        """Take the rank's progress at ``now_s``: the number of records that have begun or ended so far.

        ``waiting``: the rank is blocked in an operation. ``stopped_s``: for how long its process has been stopped.
        ``held``: a hold is in force. ``moved_s``: when its last record began or ended. ``still_s``: for how long its
        process has done nothing at all. ``unseen``: whether it is blocked in an operation is not known.
        ``device_still_s``: for how long its device had ended nothing when that was last known.
        """
        if not self._looked:  # steps before the start of this agent count as progress, too
            self._looked = True
            self.hang.observe(now_s, progress, Phase.STARTUP, step=0 if step >= 0 else -1)
        hanging, seen = self.hang.stuck is not None, (self._rank, self._node, now_s, step)
        stuck = self.hang.observe(
            now_s,
            progress,
            PHASES[phase],
            step=step,
            waiting=waiting,
            unseen=unseen,
            stopped_s=stopped_s,
            held=held,
            moved_s=moved_s,
            still_s=still_s,
            device_still_s=device_still_s,
        )
        if stuck is not None:
            found = Finding("hang", *seen, stuck_s=stuck.stuck_s, limit_s=stuck.limit_s, phase=phase)
            return replace(found, incarnation=self.incarnation)
        if hanging and self.hang.stuck is None:
            return Finding("resumed", *seen, phase=phase, incarnation=self.incarnation)
        return None
