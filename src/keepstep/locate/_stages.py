"""Pipelines from point-to-point traffic: who is upstream of whom."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from keepstep.core.events import Op
from keepstep.core.iteration_table import IterationTable
from keepstep.core.summary import IterationSummary


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
    if not votes:
        return Chains("none", {}, 0, False, groups)
    down: dict[int, int] = {}
    up: dict[int, int] = {}
    for (source, target), count in votes.items():
        if count <= votes.get((target, source), 0):
            continue
        if source in down or target in up:
            return Chains("other", {}, 0, False, groups)
        down[source], up[target] = target, source
    stages: dict[int, int] = {}
    lengths = [_walk(first, down, stages) for first in sorted(set(down) - set(up))]
    clear = True
    for first in sorted(down):  # what is left are cycles: interleaved stages come back to the first rank
        if first not in stages:
            clear = False
            lengths.append(_walk(first, down, stages))
    if not lengths:  # everybody sends to everybody: no direction wins
        return Chains("other", {}, 0, False, groups)
    if not clear and not both_ways:
        return Chains("ring", {}, 0, False, groups)
    return Chains("pipeline", stages, max(lengths), clear and len(set(lengths)) == 1, groups)


def _votes(
    summaries: Sequence[IterationSummary],
) -> tuple[dict[tuple[int, int], int], bool, frozenset[str]]:
    """How often (upstream, downstream) was seen; whether any pair sends both ways; the groups used."""
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
    return votes, both_ways, frozenset(groups)


def _table_votes(table: IterationTable) -> tuple[dict[tuple[int, int], int], bool, frozenset[str]]:
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
    pairs: list[tuple[int, int]] = list(
        zip((edges >> 32).tolist(), (edges & 0xFFFFFFFF).tolist(), strict=True)
    )
    votes: dict[tuple[int, int], int] = dict(zip(pairs, counts.tolist(), strict=True))
    used = np.bincount(streams["group"], minlength=len(table.names))
    groups = frozenset(itertools.compress(table.names, used.tolist()))
    return votes, both_ways, groups


def _walk(first: int, down: Mapping[int, int], stages: dict[int, int]) -> int:
    rank: int | None = first
    length = 0
    while rank is not None and rank not in stages:
        stages[rank] = length
        length += 1
        rank = down.get(rank)
    return length
