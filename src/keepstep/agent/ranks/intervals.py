"""Unions of time intervals, on arrays of nanoseconds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
_NONE: Times = np.zeros(0, np.int64)


class Union:
    """A union of intervals as sorted, disjoint intervals, made from intervals that may overlap, in any order."""

    __slots__ = ("_before", "ends", "starts", "total_ns")

    def __init__(self, starts: NDArray[Any], ends: NDArray[Any]) -> None:
        if len(starts):
            real = ends > starts
            if not real.all():
                starts, ends = starts[real], ends[real]
        if not len(starts):
            self.starts, self.ends, self.total_ns, self._before = _NONE, _NONE, 0, _NONE
            return
        if len(starts) > 1:
            order = np.argsort(starts, kind="stable")
            starts, reach = starts[order], np.maximum.accumulate(ends[order])
            new = np.flatnonzero(starts[1:] > reach[:-1])
            self.starts: Times = np.concatenate((starts[:1], starts[new + 1]))
            self.ends: Times = np.concatenate((reach[new], reach[-1:]))
        else:
            self.starts, self.ends = starts, ends
        self._before: Times = np.zeros(len(self.starts) + 1, np.int64)
        np.cumsum(self.ends - self.starts, out=self._before[1:])
        self.total_ns = int(self._before[-1])

    def until(self, times: NDArray[Any]) -> Times:
        """For each of ``times``, how many nanoseconds of this union lie before it."""
        if not len(self.starts):
            return np.zeros(len(times), np.int64)
        place = np.searchsorted(self.starts, times, "right") - 1
        inside = np.minimum(times, self.ends[place]) - self.starts[place]
        return np.where(place < 0, 0, self._before[place] + inside)

    def within(self, starts: NDArray[Any], ends: NDArray[Any]) -> Times:
        """For each interval, how many nanoseconds of this union lie inside it."""
        return self.until(ends) - self.until(starts)

    def joined(self, other: Union) -> Union:
        """The union of this and ``other``."""
        if not other.total_ns:
            return self
        if not self.total_ns:
            return other
        return Union(np.concatenate((self.starts, other.starts)), np.concatenate((self.ends, other.ends)))

    def less(self, other: Union) -> int:
        """How many nanoseconds of this union lie outside ``other``."""
        if not self.total_ns or not other.total_ns:
            return self.total_ns
        return self.total_ns - int(other.within(self.starts, self.ends).sum())


NOTHING = Union(_NONE, _NONE)


def clipped(starts: NDArray[Any], ends: NDArray[Any], low: int, high: int) -> tuple[Times, Times]:
    """The parts of the intervals within [low, high]; an interval outside gets an end that is not after its start."""
    return np.maximum(starts, low), np.minimum(ends, high)
