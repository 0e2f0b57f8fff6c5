"""The job's pace over time, for a trace: how long iterations took, what of them was lost and what was waited."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.core.summary import IterationSummary


@dataclass(frozen=True, slots=True)
class Counter:
    """A figure that changes with time: ``points`` are (microseconds, value), each valid until the next."""

    name: str
    unit: str
    points: tuple[tuple[float, float], ...]


@dataclass(slots=True)
class _Step:
    """One step, of all ranks that told of it."""

    rank: int  # the lowest of them, whose clock counts
    start_s: float
    count: int = 0
    duration_s: float = 0.0  # sums over ranks
    self_s: float = 0.0


class StepTimes:
    """Takes the iterations of a run in the order of its files. A step that is made again after a restart is another."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], _Step] = {}  # by how often the job had begun again, and step
        self._last: dict[int, tuple[int, int, float]] = {}  # by rank: restarts, newest step, when it began

    def add(self, row: IterationSummary) -> None:
        """Take one iteration of one rank."""
        restarts, step, start_s = self._last.get(row.rank, (0, -1, 0.0))
        # An earlier step that began earlier was only written late.
        if row.step <= step and row.start_s > start_s:
            restarts, step = restarts + 1, -1
        if row.step > step:
            self._last[row.rank] = restarts, row.step, row.start_s
        key = restarts, row.step
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = _Step(row.rank, row.start_s)
        elif row.rank < found.rank:
            found.rank, found.start_s = row.rank, row.start_s
        found.count += 1
        found.duration_s += row.duration_s
        found.self_s += row.self_s

    def starts(self) -> dict[int, float]:
        """When each step was begun for the last time, in Unix seconds on the clock of its lowest rank."""
        return {step: self._steps[restarts, step].start_s for restarts, step in sorted(self._steps)}

    def counters(self) -> list[Counter]:
        """The counters over all steps: ``pace``, ``lost`` and ``waiting``; none without a step.

        Lost is the share of an iteration that it took longer than the usual one, which is the fastest quarter's.
        """
        steps = sorted(
            (one for one in self._steps.values() if one.duration_s > 0), key=lambda one: one.start_s
        )
        if not steps:
            return []
        paces = [one.duration_s / one.count for one in steps]
        usual_s = sorted(paces)[(len(paces) - 1) // 4]
        lost = [max(1 - usual_s / pace, 0.0) for pace in paces]
        waiting = [min(max(1 - one.self_s / one.duration_s, 0.0), 1.0) for one in steps]
        times = [one.start_s * 1e6 for one in steps]
        told = (("pace", "seconds", paces), ("lost", "share", lost), ("waiting", "share", waiting))
        return [Counter(name, unit, tuple(zip(times, values, strict=True))) for name, unit, values in told]
