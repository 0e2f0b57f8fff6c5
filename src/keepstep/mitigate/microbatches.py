"""Remedy S2 (GREYHOUND §5.2): slow data-parallel groups get fewer micro-batches, so that all end together.

The paper minimises the variance of the groups' times with a quadratic solver; what an iteration takes is their maximum,
and that has an exact solution without one. With its k-th micro-batch group *i* takes ``fixed[i] + k * seconds[i]``:
each group offers these in ascending order, and the best allocation is the cheapest offers of all.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_HALVINGS = 60  # the search for the slowest group's time; fewer suffice where no offers are equal
_FEW = 32  # offers that are left to be taken one by one


def allocate_microbatches(
    seconds_per_microbatch: Sequence[float],
    total: int,
    multiple_of: int = 1,
    at_most: int | Sequence[int] | None = None,
    fixed_seconds: Sequence[float] | None = None,
) -> list[int]:
    """How many of ``total`` micro-batches each group takes, so that the slowest of them is done as early as possible.

    Every group takes at least ``multiple_of``, and a multiple of it (the stages of a pipeline, where its schedule asks
    for that); at most ``at_most``, of all or of each. ``fixed_seconds``: what a group takes besides, however few it
    has (the filling of a pipeline, the optimizer). Exact; among equally good ones the time of the groups that do not
    decide is small, too. Raises ValueError, in one line, when there is no such allocation.
    """
    seconds = np.asarray(seconds_per_microbatch, dtype=np.float64)
    if seconds.ndim != 1 or not len(seconds):
        raise ValueError("seconds_per_microbatch: one number for each group is needed")
    _check("seconds_per_microbatch", seconds, seconds > 0)
    fixed = np.zeros_like(seconds) if fixed_seconds is None else np.asarray(fixed_seconds, dtype=np.float64)
    if fixed.shape != seconds.shape:
        raise ValueError(f"fixed_seconds: {fixed.size} numbers for {len(seconds)} groups")
    _check("fixed_seconds", fixed, fixed >= 0)
    if multiple_of < 1 or total < 0 or total % multiple_of:
        raise ValueError(f"{total} micro-batches are not a multiple of {multiple_of}")
    units = total // multiple_of
    most = _at_most(at_most, len(seconds), multiple_of, units)
    if units < len(seconds):
        raise ValueError(
            f"{total} micro-batches are too few for {len(seconds)} groups, of which each takes {multiple_of} or more"
        )
    if (room := int(most.sum())) < units:
        raise ValueError(
            f"{total} micro-batches do not fit: the groups take {room * multiple_of} at most, by at_most"
        )
    return (_cheapest(seconds * multiple_of, fixed, units, most) * multiple_of).tolist()


def _check(name: str, times: npt.NDArray[np.float64], possible: npt.NDArray[np.bool_]) -> None:
    wrong = np.flatnonzero(~(np.isfinite(times) & possible))
    if len(wrong):
        raise ValueError(f"{name}: {times[wrong[0]]} of group {wrong[0]} is not a time")


def _at_most(
    at_most: int | Sequence[int] | None, groups: int, multiple_of: int, units: int
) -> npt.NDArray[np.int64]:
    """The bounds in units of ``multiple_of``."""
    if at_most is None:
        return np.full(groups, units)
    bounds = np.asarray(at_most, dtype=np.int64)
    if bounds.ndim == 0:
        bounds = np.full(groups, int(bounds))
    if bounds.shape != (groups,):
        raise ValueError(f"at_most: {bounds.size} bounds for {groups} groups")
    if (bounds < multiple_of).any():
        low = int(np.flatnonzero(bounds < multiple_of)[0])
        raise ValueError(f"at_most: {bounds[low]} of group {low} is less than {multiple_of}")
    return np.minimum(bounds // multiple_of, units)


def _cheapest(
    seconds: npt.NDArray[np.float64],
    fixed: npt.NDArray[np.float64],
    units: int,
    most: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """The ``units`` cheapest offers, one of each group among them: how many of each group."""
    taken = np.ones(len(seconds), dtype=np.int64)
    low, high = 0.0, float((fixed + most * seconds).max())
    for _ in range(_HALVINGS):
        if units - int(taken.sum()) <= _FEW:
            break
        middle = (low + high) / 2
        offered = _within(middle - fixed, seconds, most)
        if int(offered.sum()) <= units:
            low, taken = middle, offered
        else:
            high = middle
    left = units - int(taken.sum())
    if not left:
        return taken
    following = np.where(taken < most, fixed + (taken + 1) * seconds, np.inf)
    # What is left comes from the groups whose next offers are the cheapest.
    cheapest = np.argpartition(following, min(left, len(seconds)) - 1)[:left]
    offers = [(float(following[place]), int(place)) for place in cheapest]
    heapq.heapify(offers)
    for _ in range(left):
        _, place = offers[0]
        taken[place] += 1
        if taken[place] < most[place]:
            heapq.heapreplace(offers, (float(fixed[place] + (taken[place] + 1) * seconds[place]), place))
        else:
            heapq.heappop(offers)
    return taken


def _within(
    limit: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64], most: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """How many offers of each group cost its ``limit`` at most, and at least one."""
    count = np.minimum(np.floor(limit / seconds), most)
    count -= count * seconds > limit  # the division rounds
    return np.maximum(count, 1).astype(np.int64)
