"""Whether a rank is the slow one in each slow iteration, or whether others take turns with it.

Medians over a few iterations name whoever had the most to do in these. Where the work differs from step to step that
is another rank soon, and no device is slow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keepstep.core.iteration_table import table_of
from keepstep.core.slow_steps import UNSTEADY, SlowSteps
from keepstep.core.summary import IterationSummary

_ABOVE = (
    0.5  # part of what a rank takes longer than its peers in the middle by which it is the slow one of a step
)
_LEAST_ABOVE = 0.03  # part of an iteration; less above its peers is no slowness
_TOLD = 3  # ranks of which it is told that they are not steadily slow
_UNEVEN = 2.0  # growth of a middle rank's spread from which on the work is not as even as before
# In each iteration one of so many peers may be held up by chance.
_PEERS = 64


@dataclass(frozen=True, slots=True)
class _Steps:
    """Growth of own times in slow iterations. ``gain_s`` is of shape (steps, ranks)."""

    steps: NDArray[np.int64]
    ranks: NDArray[np.int64]
    gain_s: NDArray[np.float64]
    iteration_s: float

    @property
    def spread_s(self) -> float:
        """The standard deviation of a middle rank's own time from step to step, beyond what all ranks share."""
        return self.spread_of(self.ranks.tolist())

    def spread_of(self, ranks: Collection[int]) -> float:
        """The same of some ranks; 0 where it cannot be told."""
        these = np.isin(self.ranks, np.fromiter(ranks, np.int64))
        if len(self.steps) < 2 or not these.any():
            return 0.0
        apart_s = (self.gain_s - np.median(self.gain_s, axis=1, keepdims=True))[:, these]
        return float(np.median(np.std(apart_s, axis=0, ddof=1)))


def slow_steps(
    rows: Sequence[IterationSummary],
    base_s: Mapping[int, float],
    blamed: Collection[int],
    slow_s: float = 0.0,
) -> dict[int, SlowSteps]:
    """For each blamed rank in which slow iterations it was clearly slower than the ranks that are not blamed.

    ``base_s``: the own times that ranks would have, in seconds; others are left out. An iteration is slow that takes
    most ranks ``slow_s`` or longer.
    """
    return _slow_steps(_by_step(rows, base_s, slow_s), blamed)


def _slow_steps(its: _Steps, blamed: Collection[int]) -> dict[int, SlowSteps]:
    if not len(its.steps) or not blamed:
        return {}
    spread_s = its.spread_s
    is_blamed = np.isin(its.ranks, np.fromiter(blamed, np.int64))
    found: dict[int, SlowSteps] = {}
    for place in np.flatnonzero(is_blamed):
        others = ~is_blamed
        if not others.any():
            # All ranks are blamed: each has the other ones as its peers.
            others = np.arange(len(its.ranks)) != place
        if not others.any():
            continue
        peers_s = np.sort(its.gain_s[:, others], axis=1)[:, -1 - int(others.sum()) // _PEERS]
        above_s = its.gain_s[:, place] - peers_s
        usual_s = float(np.median(above_s))
        is_slow = above_s >= max(_ABOVE * usual_s, _LEAST_ABOVE * its.iteration_s)
        by_step = dict(zip(its.steps.tolist(), is_slow.tolist(), strict=True))
        times = usual_s / spread_s if spread_s > 0 else float("inf")
        found[int(its.ranks[place])] = SlowSteps(by_step, times)
    return found


def steady_ranks(
    rows: Sequence[IterationSummary],
    base_s: Mapping[int, float],
    slow: Collection[int],
    chosen: Collection[int],
    slow_s: float,
    usual_s: float,
) -> tuple[frozenset[int], frozenset[int], tuple[str, ...]]:
    """Which of the chosen ranks stay the slow ones, which of these surely do, and lines on those that do not.

    ``slow``: all ranks that are slower than before; only others are their peers. ``slow_s``: as in `slow_steps`.
    ``usual_s``: the standard deviation of an own time from step to step before. While it has not grown, the work is as
    even as it was.
    """
    its = _by_step(rows, base_s, slow_s)
    if max(its.spread_s, its.spread_of(chosen)) <= _UNEVEN * usual_s:
        return frozenset(chosen), frozenset(chosen), ()
    seen = _slow_steps(its, slow)
    found: dict[int, SlowSteps] = {rank: seen[rank] for rank in chosen if rank in seen}
    turns = {rank: one for rank, one in found.items() if one.steadiness == "unsteady"}
    unsure = {rank for rank, one in found.items() if one.steadiness == "unsure"}
    told = tuple(
        f"rank {rank} is the slow one in {one.slow} of {len(one.by_step)} slow iterations"
        for rank, one in sorted(turns.items())[:_TOLD]
    )
    steady = frozenset(chosen).difference(turns)
    return steady, steady - unsure, (UNSTEADY, *told) if turns else ()


def slowest_in_turn_s(rows: Sequence[IterationSummary], base_s: Mapping[int, float], slow_s: float) -> float:
    """What the slowest rank takes longer than it would, in the middle of the slow iterations; 0 if it is always one."""
    its = _by_step(rows, base_s, slow_s)
    if not its.gain_s.size or len(np.unique(its.gain_s.argmax(axis=1))) < 2:
        return 0.0
    return float(np.median(its.gain_s.max(axis=1)))


def _by_step(rows: Sequence[IterationSummary], base_s: Mapping[int, float], slow_s: float) -> _Steps:
    """The slow iterations that all ranks have told which have told half of them or more."""
    table = table_of(rows)
    ranks, row_rank = np.unique(table.column("rank").astype(np.int64), return_inverse=True)
    steps, row_step = np.unique(table.column("step").astype(np.int64), return_inverse=True)
    own_s, duration_s = (np.full((len(steps), len(ranks)), np.nan) for _ in range(2))
    own_s[row_step, row_rank] = table.column("self_s")
    duration_s[row_step, row_rank] = table.column("duration_s")
    base = np.array([base_s.get(int(rank), np.nan) for rank in ranks])
    told = (~np.isnan(own_s)).sum(axis=0)
    of_ranks = ~np.isnan(base) & (2 * told >= told.max(initial=0))
    own_s, duration_s = own_s[:, of_ranks], duration_s[:, of_ranks]
    if not of_ranks.any():
        return _Steps(steps[:0], ranks[:0], np.zeros((0, 0)), 0.0)
    whole = ~np.isnan(own_s).any(axis=1)
    middle_s = np.median(duration_s[whole], axis=1)
    slow = middle_s >= slow_s
    gain_s = (own_s[whole] - base[of_ranks])[slow]
    return _Steps(
        steps[whole][slow], ranks[of_ranks], gain_s, float(np.median(middle_s[slow])) if slow.any() else 0.0
    )
