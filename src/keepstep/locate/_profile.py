"""Medians over a few iterations, rank by rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keepstep.core.iteration_table import column
from keepstep.core.summary import IterationSummary

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FIELDS = ("duration_s", "self_s", "blocked_s", "data_s", "backward_s", "optimizer_s", "gc_s", "ahead_s")
MAD_TO_SIGMA = 1.4826  # from a median absolute deviation to a standard deviation


@dataclass(frozen=True, slots=True)
class Profile:
    """Medians over the iterations of each rank, in seconds; arrays of shape (ranks,), ranks ascending."""

    ranks: Ints
    counts: Ints  # how many iterations each rank has
    duration_s: Floats
    self_s: Floats
    blocked_s: Floats
    data_s: Floats
    backward_s: Floats
    optimizer_s: Floats
    gc_s: Floats
    ahead_s: Floats  # how far the host is before the GPU at the end; below 0: the times are the host's
    most_ahead_s: Floats  # how far the host was ahead in the iteration in which it was furthest
    noise_s: Floats  # robust standard deviation of self_s from iteration to iteration

    def at(self, ranks: Ints) -> Profile:
        """The profile of some of these ranks only."""
        where = np.searchsorted(self.ranks, ranks)
        return Profile(*(getattr(self, name)[where] for name in self.__slots__))


def profile(summaries: Sequence[IterationSummary]) -> Profile:
    """Medians and noise of every rank that has at least one iteration."""
    ranks = column(summaries, "rank").astype(np.int64)
    order = np.argsort(ranks, kind="stable")
    ranks = ranks[order]
    first = np.flatnonzero(np.diff(ranks, prepend=ranks[:1] - 1))
    known, counts = ranks[first], np.diff(first, append=len(ranks))
    width = int(counts.max(initial=0))
    place = np.arange(len(order)) - np.repeat(first, counts)
    row = np.repeat(np.arange(len(known)), counts)
    whole = len(order) == len(known) * width
    median = np.median if whole else np.nanmedian  # the latter takes ten times as long
    medians: dict[str, Floats] = {}
    noise: Floats = np.zeros(len(known))
    most_ahead: Floats = np.zeros(len(known))
    for name in FIELDS:
        values = column(summaries, name).astype(np.float64)[order]
        table = np.full((len(known), width), np.nan)
        table[row, place] = values
        middle: Floats = median(table, axis=1) if width else np.zeros(0)
        medians[name] = middle
        if name == "self_s" and width:
            noise = MAD_TO_SIGMA * median(np.abs(table - middle[:, None]), axis=1)
        if name == "ahead_s" and width:
            most_ahead = np.nanmax(table, axis=1)
    return Profile(ranks=known, counts=counts, most_ahead_s=most_ahead, noise_s=noise, **medians)
