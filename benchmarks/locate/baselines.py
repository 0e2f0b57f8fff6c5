"""What others do, written for this bench from their descriptions: simple rules on the same messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from keepstep.core.incident import Culprit, Diagnosis
from keepstep.core.summary import GroupInfo, IterationSummary, RankState

_OVER = 1.2  # of the median rank's own time
_Z = 3.0
_LEAST_S = 0.005


def fixed_threshold(after: Sequence[IterationSummary], stages: Mapping[int, int]) -> Diagnosis:
    """A rank whose compute time is over 1.2 x the median of all."""
    own = _medians(after, "self_s")
    usual = median(own.values())
    return _diagnosis(after, [rank for rank, value in own.items() if value > _OVER * usual])


def heatmap(after: Sequence[IterationSummary], stages: Mapping[int, int]) -> Diagnosis:
    """A rank that stands out of its row of the heat map of compute times, stage by stage (z-score above 3)."""
    own = _medians(after, "self_s")
    rows: dict[int, list[int]] = defaultdict(list)
    for rank in own:
        rows[stages.get(rank, 0)].append(rank)
    odd: list[int] = []
    for ranks in rows.values():
        values = np.array([own[rank] for rank in ranks])
        spread = max(float(values.std()), 1e-9)
        odd += [
            r for r, v in zip(ranks, values, strict=True) if v - values.mean() > max(_Z * spread, _LEAST_S)
        ]
    return _diagnosis(after, odd)


def collective_times(after: Sequence[IterationSummary], groups: Mapping[str, GroupInfo]) -> Diagnosis:
    """The rank that is in its group's collectives for shorter than the other members, by the largest robust z-score
    of all groups: it arrives last.
    """
    busy: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in after:
        for stream in one.streams:
            if stream.peer < 0:
                busy[stream.group, stream.op][one.rank].append(stream.busy_s)
    worst = (_Z, -1)
    for rows in busy.values():
        if len(rows) < 3:
            continue
        ranks = list(rows)
        values = np.array([median(rows[rank]) for rank in ranks])
        middle = float(np.median(values))
        spread = 1.4826 * float(np.median(np.abs(values - middle)))
        first = int(values.argmin())
        if middle - values[first] > _LEAST_S:
            worst = max(worst, (float(middle - values[first]) / max(spread, _LEAST_S / _Z), ranks[first]))
    return _diagnosis(after, [worst[1]] if worst[1] >= 0 else [])


def oldest_progress(states: Sequence[RankState], groups: Mapping[str, GroupInfo]) -> Diagnosis:
    """Hangs: the rank that has been silent for longest."""
    worst = max(states, key=lambda state: state.now_s - state.last_progress_s)
    return Diagnosis(
        "hang", (Culprit(worst.rank, stage="backward" if worst.phase == 2 else "forward"),), (), (), ()
    )


def _medians(rows: Sequence[IterationSummary], name: str) -> dict[int, float]:
    by_rank: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        by_rank[row.rank].append(getattr(row, name))
    return {rank: median(values) for rank, values in by_rank.items()}


def _diagnosis(rows: Sequence[IterationSummary], odd: Sequence[int]) -> Diagnosis:
    own, backward = _medians(rows, "self_s"), _medians(rows, "backward_s")
    usual, usual_backward = median(own.values()), median(backward.values())
    culprits = []
    for rank in odd:
        share = (backward[rank] - usual_backward) / max(own[rank] - usual, 1e-9)
        culprits.append(Culprit(rank, stage="backward" if share > 0.5 else "forward"))
    return Diagnosis("slow", tuple(culprits), (), (), ())
