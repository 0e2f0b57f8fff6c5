"""Decides which of the saved steps go to storage. Pure: times are arguments, in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from keepstep.checkpoint.storage.cost import MOST_STEPS, Costs, Limits, best_interval
from keepstep.core.errors import CheckpointError

_DAY_S = 86400.0
_MEASURED = 8  # saves that are measured before an interval is computed
_REMEMBERED = 32


@dataclass(frozen=True, slots=True)
class Storing:
    """Where and how often steps are brought to storage.

    Attributes:
        where: path or URL of the storage.
        every: steps between two that go to storage; 0: only those that the script asks for; None: the cost model
            decides.
        failures_per_day: failures of the whole job, for the cost model.
    """

    where: str
    every: int | None = None
    failures_per_day: float = 1.0


class Cadence:
    """Says when a step is due. Ranks pass the same steps and agree on intervals, so all get the same answers."""

    def __init__(self, storing: Storing) -> None:
        self._failures_per_day = storing.failures_per_day
        self._auto = storing.every is None
        self.steps = storing.every or 0
        """Steps between two that go to storage; 0: not known yet, or never."""
        self._last = 0
        self._saves = 0
        self._noted: tuple[int, float] | None = None
        self._step_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._save_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._wanted_s: float | None = None
        self._stored_s = 0.0

    def begin(self, step: int) -> None:
        """Begin an incarnation, which goes on after ``step``."""
        self._last, self._saves, self._noted, self._wanted_s = step, 0, None, None

    def note(self, step: int, now_s: float, blocked_s: float, *, pending: bool) -> None:
        """Measure the time between saves, at the beginning of a save; ``now_s`` is of any steady clock.

        ``blocked_s``: how long training waited for the previous save. ``pending``: whether a step is on its
        way to storage.
        """
        self._saves += 1
        if self._noted:
            steps, spent_s = step - self._noted[0], now_s - self._noted[1]
            self._save_s.append(blocked_s)
            self._step_s.append(max(spent_s - blocked_s, 1e-6) / steps)
        self._noted = step, now_s
        if self._wanted_s is not None and not pending:
            self._stored_s, self._wanted_s = now_s - self._wanted_s, None

    def due(self, step: int) -> bool:
        """Whether the step is due to go to storage."""
        if self._auto and not self.steps:
            return self._saves > _MEASURED
        return self.steps > 0 and step // self.steps > self._last // self.steps

    def proposal(self) -> int:
        """The interval that this rank proposes, in steps; 0 when it has none to propose."""
        if not self._auto or not self._step_s:
            return 0
        try:
            costs = Costs(
                period_s=_DAY_S,
                failures=self._failures_per_day,
                recovery_s=0.0,
                checkpoint_s=median(self._save_s),
                step_s=median(self._step_s),
            )
            return best_interval(costs, Limits(backup_s=self._stored_s)).steps
        except CheckpointError:
            return MOST_STEPS

    def agree(self, proposals: Iterable[int]) -> None:
        """Set the interval to the longest that a rank proposes."""
        if self._auto:
            self.steps = max(proposals)

    def accepted(self, step: int, now_s: float) -> None:
        """Note that all ranks bring the step to storage."""
        self._last, self._wanted_s = step, now_s
