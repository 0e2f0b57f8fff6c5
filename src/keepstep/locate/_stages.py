"""Pipelines from point-to-point traffic: who is upstream of whom."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keepstep.core.events import Op
from keepstep.core.iteration_table import IterationTable
from keepstep.core.summary import IterationSummary

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chains:
    """``shape``: pipelines, a ring that only sends one way, something else, or no such traffic at all."""

    shape: Literal["pipeline", "ring", "other", "none"]
    stages: Mapping[int, int]  # by rank; only for pipelines
    length: int  # of the longest
    even: bool  # all of one length, and each with a clear beginning
    groups: frozenset[str]  # that carry the traffic


def chains(summaries: Sequence[IterationSummary]) -> Chains:
    """Order ranks along their messages.

    A rank has sent an activation before it can receive the gradient for it, so a neighbour is downstream when the
    mean send to it comes before the mean receive from it; both times are on one clock.
    """
    votes, both_ways, groups = _votes(summaries)
    if len(votes) == 0:
        return Chains("none", {}, 0, False, groups)
    ranks, ends = np.unique(votes[:, :2], return_inverse=True)
    ends = np.reshape(ends, (-1, 2))
    source, target, count = ends[:, 0], ends[:, 1], votes[:, 2]
    path, back = source * len(ranks) + target, target * len(ranks) + source
    order = np.argsort(path)
    place = order[np.minimum(np.searchsorted(path, back, sorter=order), len(path) - 1)]
    wins = count > np.where(path[place] == back, count[place], 0)
    source, target = source[wins], target[wins]
    if max(np.bincount(source).max(initial=0), np.bincount(target).max(initial=0)) > 1:
        return Chains("other", {}, 0, False, groups)
    down, is_target = np.full(len(ranks), -1), np.zeros(len(ranks), np.bool_)
    down[source], is_target[target] = target, True
    stages, lengths = _walk_down(down, is_target)
    clear = bool((stages[source] >= 0).all())
    for first in np.sort(
        source
    ).tolist():  # what is left are cycles: interleaved stages come back to the first rank
        if stages[first] < 0:
            lengths.append(_walk_around(first, down, stages))
    if not lengths:  # everybody sends to everybody: no direction wins
        return Chains("other", {}, 0, False, groups)
    if not clear and not both_ways:
        return Chains("ring", {}, 0, False, groups)
    told = stages >= 0
    by_rank = dict(zip(ranks[told].tolist(), stages[told].tolist(), strict=True))
    return Chains("pipeline", by_rank, max(lengths), clear and len(set(lengths)) == 1, groups)


def _walk_down(down: Ints, is_target: NDArray[np.bool_]) -> tuple[Ints, list[int]]:
    """Stages (-1 for none), and the lengths, of the chains that have a beginning. ``down``: -1 for nobody."""
    stages, lengths = np.full(len(down), -1), list[int]()
    here = np.flatnonzero((down >= 0) & ~is_target)
    stage = 0
    while len(here):
        stages[here] = stage
        stage += 1
        following = down[here]
        lengths += [stage] * int((following < 0).sum())
        here = following[following >= 0]
    return stages, lengths


def _walk_around(first: int, down: Ints, stages: Ints) -> int:
    """Number the ranks of a cycle from ``first`` on; how many they are."""
    here, length = first, 0
    while stages[here] < 0:
        stages[here] = length
        length += 1
        here = int(down[here])
    return length


def _votes(
    summaries: Sequence[IterationSummary],
) -> tuple[Ints, bool, frozenset[str]]:
    """Rows of (upstream, downstream, how often seen); whether any pair sends both ways; the groups used."""
    if isinstance(summaries, IterationTable):
        return _table_votes(summaries)
    votes: dict[tuple[int, int], int] = {}
    both_ways = False
    groups: set[str] = set()
    for summary in summaries:
        sent: dict[int, float] = {}
        received: dict[int, float] = {}
        for stream in summary.streams:
            if stream.op == Op.SEND:
                sent[stream.peer] = stream.start_s
            elif stream.op == Op.RECV:
                received[stream.peer] = stream.end_s
            else:
                continue
            groups.add(stream.group)
        for peer in sent.keys() | received.keys():
            if peer in sent and peer in received:
                both_ways = True
                downstream = sent[peer] < received[peer]
            else:
                downstream = peer in sent
            edge = (summary.rank, peer) if downstream else (peer, summary.rank)
            votes[edge] = votes.get(edge, 0) + 1
    rows = [(*edge, count) for edge, count in votes.items()]
    return np.reshape(np.array(rows, np.int64), (-1, 3)), both_ways, frozenset(groups)


def _table_votes(table: IterationTable) -> tuple[Ints, bool, frozenset[str]]:
    """The same from columns."""
    row, streams = table.flat()
    messages = np.flatnonzero((streams["op"] == Op.SEND) | (streams["op"] == Op.RECV))
    row, streams = row[messages], streams.take(messages)
    rank, peer = table.column("rank")[row].astype(np.int64), streams["peer"].astype(np.int64)
    sends = streams["op"] == Op.SEND
    pair, place = np.unique(row << 32 | peer, return_inverse=True)
    sent, received = np.full(len(pair), np.inf), np.full(len(pair), np.inf)
    sent[place[sends]], received[place[~sends]] = streams["start_s"][sends], streams["end_s"][~sends]
    ends = np.zeros((len(pair), 2), np.int64)
    ends[place, 0], ends[place, 1] = rank, peer
    # without a receive the rank is upstream, without a send downstream: what is missing is infinite
    ends = np.where((sent < received)[:, None], ends, ends[:, ::-1])
    both_ways = bool((np.isfinite(sent) & np.isfinite(received)).any())
    edges, counts = np.unique(ends[:, 0] << 32 | ends[:, 1], return_counts=True)
    votes = np.stack((edges >> 32, edges & 0xFFFFFFFF, counts), axis=1)
    used = np.bincount(streams["group"], minlength=len(table.names))
    groups = frozenset(itertools.compress(table.names, used.tolist()))
    return votes, both_ways, groups
