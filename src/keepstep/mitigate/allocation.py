"""Remedy S2 (GREYHOUND §5.2): slow data-parallel groups get fewer micro-batches, so that all end together.

The paper minimises the variance of the groups' times with a quadratic solver. But an iteration takes the maximum of
these times, whose least value can be found exactly without a solver: with k micro-batches group *i* takes
``fixed[i] + k * seconds[i]``; each group offers these times in ascending order, and the cheapest offers of all groups
are the best allocation.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_HALVINGS = 60  # most halvings in the search for the time of the slowest group
_FEW = 32  # with at most so many offers left, these are taken one by one


def allocate_microbatches(
    seconds_per_microbatch: Sequence[float],
    total: int,
    multiple_of: int = 1,
    at_most: int | None = None,
    fixed_seconds: Sequence[float] | None = None,
) -> list[int]:
    """How many of ``total`` micro-batches each group takes, so that the slowest group ends as early as possible.

    Every group takes a multiple of ``multiple_of`` (the number of pipeline stages, where the schedule requires that),
    at least one such multiple and at most ``at_most``. ``fixed_seconds``: time that a group takes whatever its share
    is (filling the pipeline, the optimizer). The result is exact; among equally good ones the other groups end early,
    too. Raises ValueError, in one line, when there is no such allocation.
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
    units = most = total // multiple_of
    if at_most is not None:
        if at_most < multiple_of:
            raise ValueError(f"at_most: {at_most} is less than {multiple_of}")
        most = min(at_most // multiple_of, units)
    if units < len(seconds):
        raise ValueError(
            f"{total} micro-batches are too few for {len(seconds)} groups, of which each takes {multiple_of} or more"
        )
    if (room := len(seconds) * most) < units:
        raise ValueError(
            f"{total} micro-batches do not fit: the groups take {room * multiple_of} at most, by at_most"
        )
    return (_cheapest(seconds * multiple_of, fixed, units, most) * multiple_of).tolist()


def _check(name: str, times: npt.NDArray[np.float64], possible: npt.NDArray[np.bool_]) -> None:
    wrong = np.flatnonzero(~(np.isfinite(times) & possible))
    if len(wrong):
        raise ValueError(f"{name}: {times[wrong[0]]} of group {wrong[0]} is not a time")


def _cheapest(
    seconds: npt.NDArray[np.float64],
    fixed: npt.NDArray[np.float64],
    units: int,
    most: int,
) -> npt.NDArray[np.int64]:
    """How many offers of each group are among the ``units`` cheapest ones; at least one."""
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
    # The remaining offers come from the groups whose next ones are the cheapest.
    cheapest = np.argpartition(following, min(left, len(seconds)) - 1)[:left]
    offers = [(float(following[place]), int(place)) for place in cheapest]
    heapq.heapify(offers)
    for _ in range(left):
        _, place = offers[0]
        taken[place] += 1
        if taken[place] < most:
            heapq.heapreplace(offers, (float(fixed[place] + (taken[place] + 1) * seconds[place]), place))
        else:
            heapq.heappop(offers)
    return taken


def _within(
    limit: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64], most: int
) -> npt.NDArray[np.int64]:
    """How many offers of each group cost its ``limit`` at most; at least one."""
    count = np.minimum(np.floor(limit / seconds), most)
    count -= count * seconds > limit  # where the division was rounded up
    return np.maximum(count, 1).astype(np.int64)
