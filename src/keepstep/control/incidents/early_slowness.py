"""Slowness from the first steps on: there is no healthy time to compare with, so that peers are the measure.

Detectors on the agents learn a rank's pace from its own steps, two dozen at least, and take for usual what they learn.
Until then the ranks' own times in the heartbeats are compared with each other. One that stands out is no verdict yet:
it is profiled, and named where its peers of the same pipeline stage were faster for steps on end (GREYHOUND §4.3).
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.control.cluster import Cluster
from keepstep.core.finding import Finding
from keepstep.core.incident import Diagnosis
from keepstep.core.summary import IterationSummary

FIRST_STEPS = 3  # steps of an incarnation that are not compared: memory is allocated, connections are made
_SIXTH = 5  # the step from which on ranks are compared
LEAST_STEPS = 3  # slow steps on end that a verdict needs
_LAST_STEP = 30  # steps after which a rank's own history is the measure
_EVERY_STEPS = 2
_MOST_LOOKS = 8  # profiles that are asked for in one incarnation
_MOST_MILD = 3  # profiles for ranks that are not slow enough to be named by the host's times
_RATIO = 1.4  # own time of a slow rank over that of its peers
_RATIO_ON_DEVICE = 1.2  # least such ratio where all times are the GPUs', which busy hosts do not disturb
_SHARE = 0.2  # part of an iteration that a slow rank must cost


class EarlySlowness:
    """Looks at what heartbeats tell of the first steps of an incarnation."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.begin_again()

    def begin_again(self) -> None:
        """Forget the last incarnation."""
        self._first: int | None = None
        self._step = -1
        self._looks = self._mild = 0

    def look(self, now_s: float) -> Finding | None:
        """A rank that seems to be slow, once in a few steps; to be called at every tick."""
        nodes = self._cluster.nodes.values()
        node = next(iter(nodes), None)
        ranks = node.beat.ranks if node is not None and node.beat is not None else ()
        step = ranks[0].step if ranks else -1
        if step < 0 or self._looks >= _MOST_LOOKS:
            return None
        if self._first is None:
            self._first = step
        early = step <= self._first + _LAST_STEP
        if not early or step < max(self._first + _SIXTH, self._step + _EVERY_STEPS):
            return None
        beats = [(one, node) for node in nodes if node.beat is not None for one in node.beat.ranks]
        beats = [(one, node) for one, node in beats if one.iteration_s > 0]
        if len(beats) < max(self._cluster.known_ranks, 2):
            return None
        self._step = step
        usual_s = sorted(one.self_s for one, _ in beats)[(len(beats) - 1) // 2]
        worst, node = max(beats, key=lambda pair: pair[0].self_s)
        more_s = worst.self_s - usual_s
        mild = worst.self_s < _RATIO * usual_s
        if worst.self_s < _RATIO_ON_DEVICE * usual_s or more_s < _SHARE * worst.iteration_s:
            return None
        if mild and self._mild >= _MOST_MILD:
            return None
        self._looks, self._mild = self._looks + 1, self._mild + mild
        return Finding(
            "slow",
            worst.rank,
            node.name,
            now_s,
            worst.step,
            onset_step=worst.step,
            before_s=worst.iteration_s - more_s,
            after_s=worst.iteration_s,
        )


def least_ratio(rows: Sequence[IterationSummary]) -> float:
    """How much slower than its peers a rank has to be that is named by these iterations."""
    return _RATIO_ON_DEVICE if all(row.ahead_s >= 0 for row in rows) else _RATIO


def slow_since(rows: Sequence[IterationSummary], rank: int, ratio: float = _RATIO) -> int | None:
    """The step from which on a rank was slower than its peers in every step; None: not for so long as a verdict needs.

    ``rows``: the iterations of an incarnation from its first one on.
    """
    own: dict[int, list[float]] = {}
    its: dict[int, float] = {}
    for row in rows:
        own.setdefault(row.step, []).append(row.self_s)
        if row.rank == rank:
            its[row.step] = row.self_s
    most = max(map(len, own.values()), default=0)
    steps = sorted(step for step in its if len(own[step]) == most)
    since = None
    slow = 0
    for step in reversed(steps):
        usual_s = sorted(own[step])[(most - 1) // 2]
        if its[step] < ratio * usual_s:
            break
        since, slow = step, slow + 1
    return since if slow >= LEAST_STEPS else None


def names_for_sure(diagnosis: Diagnosis, ratio: float = _RATIO) -> bool:
    """Whether a diagnosis against peers names ranks, and these were slow enough."""
    named = diagnosis.culprits
    return bool(named) and all(one.rank is not None and one.slowdown >= ratio for one in named)
