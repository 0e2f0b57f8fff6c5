"""Finds pipelines in point-to-point traffic: which rank is upstream of which."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keepstep.core.events import Op
from keepstep.core.iteration_table import IterationTable, table_of
from keepstep.core.summary import IterationSummary

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chains:
    """What the point-to-point traffic of a job looks like.

    ``shape``: pipelines, a ring that only sends one way, something else, or no such traffic at all.
    """

    shape: Literal["pipeline", "ring", "other", "none"]
    stages: Mapping[int, int]  # stage by rank; empty unless there are pipelines
    length: int  # stages of the longest pipeline
    groups: frozenset[str]  # names of the groups that carry the traffic


def chains(summaries: Sequence[IterationSummary]) -> Chains:
    """Order ranks along the messages that they exchanged in a few iterations.

    A rank has sent an activation before it can receive the gradient for it, so a neighbour is downstream when the
    mean send to it comes before the mean receive from it; both times are on one clock.
    """
    votes, both_ways, groups = _votes(table_of(summaries))
    if len(votes) == 0:
        return Chains("none", {}, 0, groups)
    ranks, ends = np.unique(votes[:, :2], return_inverse=True)
    ends = np.reshape(ends, (-1, 2))
    source, target, count = ends[:, 0], ends[:, 1], votes[:, 2]
    path, back = source * len(ranks) + target, target * len(ranks) + source
    order = np.argsort(path)
    place = order[np.minimum(np.searchsorted(path, back, sorter=order), len(path) - 1)]
    wins = count > np.where(path[place] == back, count[place], 0)
    source, target = source[wins], target[wins]
    if max(np.bincount(source).max(initial=0), np.bincount(target).max(initial=0)) > 1:
        return Chains("other", {}, 0, groups)
    down, is_target = np.full(len(ranks), -1), np.zeros(len(ranks), np.bool_)
    down[source], is_target[target] = target, True
    stages, length = _walk_down(down, is_target)
    clear = bool((stages[source] >= 0).all())
    # Ranks without a stage now lie on cycles: interleaved stages come back to the first rank.
    for here in np.sort(source).tolist():
        stage = 0
        while stages[here] < 0:
            stages[here] = stage
            here, stage = int(down[here]), stage + 1
        length = max(length, stage)
    if not length:  # every rank sends to every other, so no order of ranks can be told
        return Chains("other", {}, 0, groups)
    if not clear and not both_ways:
        return Chains("ring", {}, 0, groups)
    told = stages >= 0
    by_rank = dict(zip(ranks[told].tolist(), stages[told].tolist(), strict=True))
    return Chains("pipeline", by_rank, length, groups)


def _walk_down(down: Ints, is_target: NDArray[np.bool_]) -> tuple[Ints, int]:
    """Stage by rank (-1 for none) of the chains that have a first rank, and the length of the longest of them.

    ``down``: the rank downstream of each, -1 for none.
    """
    stages = np.full(len(down), -1)
    here = np.flatnonzero((down >= 0) & ~is_target)
    length = 0
    while len(here):
        stages[here] = length
        length += 1
        following = down[here]
        here = following[following >= 0]
    return stages, length


def _means(place: Ints, counts: Ints, times_s: NDArray[np.float32]) -> NDArray[np.float64]:
    """By place the mean of the times that were counted so often; infinite where none was.

    Messages between two ranks may be on several communicators of the device's library.
    """
    total = np.bincount(place, weights=counts)
    sums = np.bincount(place, weights=counts * times_s)
    return np.divide(sums, total, out=np.full(len(total), np.inf), where=total > 0)


def _votes(table: IterationTable) -> tuple[Ints, bool, frozenset[str]]:
    """Rows of (upstream, downstream, how often seen); whether any pair sends both ways; the groups used."""
    row, streams = table.flat()
    messages = np.flatnonzero((streams["op"] == Op.SEND) | (streams["op"] == Op.RECV))
    row, streams = row[messages], streams.take(messages)
    rank, peer = table.column("rank")[row].astype(np.int64), streams["peer"].astype(np.int64)
    sends = streams["op"] == Op.SEND
    pair, place = np.unique(row << 32 | peer, return_inverse=True)
    sent = _means(place, np.where(sends, streams["count"], 0), streams["start_s"])
    received = _means(place, np.where(sends, 0, streams["count"]), streams["end_s"])
    ends = np.zeros((len(pair), 2), np.int64)
    ends[place, 0], ends[place, 1] = rank, peer
    # A missing send or receive is at infinity: a rank that only sends is upstream, one that only receives downstream.
    ends = np.where((sent < received)[:, None], ends, ends[:, ::-1])
    both_ways = bool((np.isfinite(sent) & np.isfinite(received)).any())
    edges, counts = np.unique(ends[:, 0] << 32 | ends[:, 1], return_counts=True)
    votes = np.stack((edges >> 32, edges & 0xFFFFFFFF, counts), axis=1)
    used = np.bincount(streams["group"], minlength=len(table.names))
    groups = frozenset(itertools.compress(table.names, used.tolist()))
    return votes, both_ways, groups
