"""Which remedy of a slowdown is applied when: in the order and at the losses that `ski_rental` chooses."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from keepstep.mitigate.ski_rental import RATIO, Offer, Schedule, optimum, schedule

_LEAST_SAVING = 0.05  # a remedy must save this share of an iteration: less is within the noise
_CHANGED = 0.1  # once a rate or cost has changed by this share, a new schedule is made
_LIVES = 256  # durations of slowdowns that are remembered


@dataclass(frozen=True, slots=True)
class Remedy:
    """A remedy that is possible: what it costs once, in seconds of training, and the iteration time after it."""

    name: str
    cost_s: float
    iteration_s: float


# What a schedule was made for: names of remedies; the loss rate, then the rate and cost of each remedy.
_Basis = tuple[tuple[str, ...], tuple[float, ...]]
_NOTHING: _Basis = (), (0.0,)


class Planner:
    """Plans the remedies of one job. Slowdowns that overlap count as one, as remedies act on the job as a whole.

    Call `look` whenever something new is known. It does not name a remedy that was refused until the slowdown is over.
    """

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=_LIVES)
        self._credit_s = 0.0
        self._spent_s = 0.0  # cost of this slowdown: loss, and remedies
        self._lost_s = 0.0
        self._since_s: float | None = None
        self._looked_s = 0.0
        self._applied: set[str] = set()
        self._refused: set[str] = set()
        self._made_for: _Basis = _NOTHING
        self._schedule = Schedule((), 1.0)
        self._optimum: tuple[float, list[Offer]] = (0.0, [])

    def look(
        self, now_s: float, began_s: float, healthy_s: float, iteration_s: float, untreated_s: float,
        remedies: Mapping[str, Remedy],
    ) -> Remedy | None:  # fmt: skip
        """The remedy to apply now, if any, of those that are possible (by name, whether in force or not).

        The slowdown began at ``began_s`` on the clock of ``now_s``. An iteration took ``healthy_s`` before it, takes
        ``iteration_s`` now, and would take ``untreated_s`` without the remedies that are in force.
        """
        if self._since_s is None:
            self._since_s = self._looked_s = min(began_s, now_s)
        passed_s, self._looked_s = max(now_s - self._looked_s, 0.0), max(now_s, self._looked_s)
        self._lost_s += passed_s * _rate(healthy_s, iteration_s)
        self._spent_s += passed_s * _rate(healthy_s, iteration_s)
        possible = {
            name: one
            for name, one in remedies.items()
            if name not in self._refused and one.iteration_s < (1 - _LEAST_SAVING) * untreated_s
        }
        names = sorted(possible)
        rate = _rate(healthy_s, untreated_s)
        offers = [
            Offer(possible[name].cost_s, _rate(healthy_s, possible[name].iteration_s)) for name in names
        ]
        costs = (number for one in offers for number in (one.rate, one.cost_s))
        basis = tuple(names), (rate, *costs)
        if _differs(basis, self._made_for):
            self._made_for = basis
            credit_s = self._credit_s + max((one.cost_s for one in offers), default=0.0)
            self._schedule = schedule(rate, offers, list(self._durations), credit_s)
            self._optimum = rate, offers
        for threshold_s, place in self._schedule.buys:
            if place < len(names) and names[place] not in self._applied and self._lost_s >= threshold_s:
                remedy = possible[names[place]]
                if remedy.iteration_s < (1 - _LEAST_SAVING) * iteration_s:
                    return remedy
        return None

    def applied(self, name: str, cost_s: float) -> None:
        """Note that a remedy is in force, and what it has cost."""
        self._applied.add(name)
        self._spent_s += cost_s

    def undone(self, name: str) -> None:
        """Note that a remedy is no longer in force; it may be named again."""
        self._applied.discard(name)

    def refused(self, name: str) -> None:
        """Note that a remedy is impossible or has failed: it is not named again while this slowdown lasts."""
        self._refused.add(name)

    def over(self, now_s: float) -> None:
        """Note that the slowdown is over and no remedy is in force."""
        if self._since_s is None:
            return
        lasted_s = max(now_s - self._since_s, 0.0)
        rate, offers = self._optimum
        self._durations.append(lasted_s)
        self._credit_s += RATIO * float(optimum(rate, offers, np.array([lasted_s]))[0]) - self._spent_s
        self._spent_s = self._lost_s = 0.0
        self._since_s = None
        self._applied.clear()
        self._refused.clear()
        self._made_for, self._schedule = _NOTHING, Schedule((), 1.0)


def _rate(healthy_s: float, iteration_s: float) -> float:
    """The share of time that is lost: seconds lost each second."""
    return max(1 - healthy_s / iteration_s, 0.0) if iteration_s > 0 else 0.0


def _differs(new: _Basis, old: _Basis) -> bool:
    """Whether the bases differ so much that a new schedule is needed."""
    return new[0] != old[0] or any(
        abs(one - other) > _CHANGED * max(abs(one), abs(other), 0.01)
        for one, other in zip(new[1], old[1], strict=True)
    )
