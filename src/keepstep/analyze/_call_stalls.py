"""One stalled step in logs of the hosts' calls: which rank held up the others, and went on first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from keepstep.core.incident import Culprit, Diagnosis
from keepstep.core.ranges import fold_ranks
from keepstep.locate import CallStep

_LEAST_SHARE = 0.5  # part of the time lost that a rank must have spent between two calls to be looked at
_SURE = 3  # times as far ahead as ranks usually begin apart
_LEAST_FIRST = 0.002  # part of the time lost by which the first to go on must be ahead of the others


def locate_stall(steps: Mapping[int, Sequence[CallStep]], begin_s: float, usual_s: float) -> Diagnosis:
    """Name the rank that stalled in the step that begins at about ``begin_s``, on one clock of all ranks.

    Everybody stands still in a stall, each between two calls. Those that wait go on when what they wait for has come,
    thus later than the one that they wait for. Their clocks may differ, by no more than their steps begin apart.
    """
    gaps: dict[
        int, tuple[float, float]
    ] = {}  # begin and end of the longest time without a call, of each rank
    lost: list[float] = []
    for rank, own in steps.items():
        stalled = min(own, key=lambda step: abs(step.begin_s - begin_s), default=None)
        if stalled is not None and abs(stalled.begin_s - begin_s) < 0.5 * usual_s:
            gaps[rank] = _longest_gap(stalled)
            lost.append(stalled.duration_s - usual_s)
    lost_s = median(lost) if lost else 0.0
    stood = {rank: gap for rank, gap in gaps.items() if gap[1] - gap[0] >= _LEAST_SHARE * lost_s > 0}
    missing = ("a second such step: one alone may be chance",)
    order = sorted(stood, key=lambda rank: stood[rank][1])
    apart_s = _apart(steps, usual_s)
    if len(order) < 2 or stood[order[1]][1] - stood[order[0]][1] < max(_LEAST_FIRST * lost_s, apart_s):
        return Diagnosis("slow", missing=("a rank that went on before all others: none is known", *missing))
    first, second = order[:2]
    told = (
        f"rank {first} made no call for {stood[first][1] - stood[first][0]:.3g} s, and was the first to go on, "
        f"{stood[second][1] - stood[first][1]:.2g} s before the next"
    )
    stopped = min(stood, key=lambda rank: stood[rank][0])
    evidence = (told, f"rank {first} was the first to stop, too") if stopped == first else (told,)
    # The clocks of hosts may be as far apart as steps begin; then an order of times says little.
    sure = stopped == first and stood[second][1] - stood[first][1] >= _SURE * apart_s
    victims = tuple(rank for rank in sorted(steps) if rank != first)
    culprit = Culprit(
        first, confidence="medium" if sure else "low", cause="stalled",
        detail=f"it stood still for {stood[first][1] - stood[first][0]:.3g} s while ranks {fold_ranks(victims)} waited",
    )  # fmt: skip
    return Diagnosis("slow", (culprit,), victims, evidence, missing)


def _apart(steps: Mapping[int, Sequence[CallStep]], usual_s: float) -> float:
    """How far apart ranks usually begin the same step, the earliest and the latest of them, by their clocks."""
    reference = max(steps.values(), key=len, default=())
    late: list[float] = []
    for own in steps.values():
        begins = np.array([step.begin_s for step in own])
        if not len(begins):
            continue
        nearest = [float(begins[np.abs(begins - step.begin_s).argmin()]) - step.begin_s for step in reference]
        near = [lag for lag in nearest if abs(lag) < 0.5 * usual_s]
        late += [median(near)] if near else []
    return max(late) - min(late) if late else 0.0


def _longest_gap(step: CallStep) -> tuple[float, float]:
    times = [step.begin_s, *(call.at_s for call in step.calls)]
    place = max(range(1, len(times)), key=lambda place: times[place] - times[place - 1])
    return times[place - 1], times[place]
