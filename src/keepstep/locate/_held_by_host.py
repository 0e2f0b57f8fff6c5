"""Ranks that only waited while their hosts waited for their GPUs: a check on own times, by the time in collectives.

A host that synchronises with its GPU while a collective goes on launches nothing meanwhile, so the compute stream is
not blocked by a wait but empty, and the rank's own time grows as if it had computed. Megatron does so after each
exchange of messages, while gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.evidence import Evidence
from keepstep.core.iteration_table import IterationTable, table_of
from keepstep.core.summary import IterationSummary

_MOST_PEERS = 64  # ranks of a large group, enough to compare with

# Least part of what a rank's own time is over that of its fastest peer which a hidden wait has to explain.
_LEAST_HIDDEN = 0.5

_Path = tuple[str, int]  # group, operation


def waits_grown(evidence: Evidence, ranks: Sequence[int]) -> dict[int, float]:
    """By how many seconds an iteration these ranks are longer in collectives than before, beyond the transfers.

    Collectives of several groups may go on at once, so the one that has grown most counts. A slower transfer takes all
    members longer, so what the member has grown by that grew least is left out.
    """
    wanted = set(ranks)
    peers = {
        name: {*wanted.intersection(group.members), *group.members[:: 1 + len(group.members) // _MOST_PEERS]}
        for name, group in evidence.groups.items()
        if len(group.members) > 1 and not wanted.isdisjoint(group.members)
    }
    asked = sorted(set[int]().union(*peers.values()))
    before = _busy(table_of(evidence.before).of_ranks(asked))
    after = _busy(table_of(evidence.after).of_ranks(asked))
    grown = dict.fromkeys(ranks, 0.0)
    for path in before.keys() & after.keys():
        members = peers.get(path[0], set[int]())
        known = members & before[path].keys() & after[path].keys()
        by_rank = {rank: after[path][rank] - before[path][rank] for rank in known}
        if len(by_rank) < 2 or len(by_rank) < len(members):
            continue
        for rank in wanted & known:
            grown[rank] = max(grown[rank], by_rank[rank] - min(by_rank.values()))
    return grown


def without_hidden_waits(
    evidence: Evidence, stages: Mapping[int, int], healthy: Mapping[int, float] | None = None
) -> IterationTable:
    """The iterations in ``after``, own times without what ranks waited in collectives while their streams were empty.

    Ranks are compared with each other. A rank has come to its collectives earlier than the
    last of their members by the time for which it is longer in them: by the mean of a path's collectives, so that lags
    which one wait at the end makes good count once. Of that is left out for how much longer than its peers' its stream
    was blocked, as that is not in its own time. No own time becomes shorter than that of the rank when it was
    ``healthy`` (seconds by rank), or for want of that than the shortest of the peers, which are the ranks of the same
    pipeline stage (``stages``, by rank).
    """
    table = table_of(evidence.after)
    own_s = np.array(table.column("self_s"), np.float64)
    if not len(table):
        return table
    ranks = table.column("rank").tolist()
    peers = _coded(table.column("step"), np.array([stages.get(rank, -1) for rank in ranks]))
    shortest_s, blocked_s = _least(peers, own_s), np.array(table.column("blocked_s"), np.float64)
    hidden_s = np.maximum(_early_by(table, evidence) - (blocked_s - _least(peers, blocked_s)), 0.0)
    known_s = np.array([(healthy or {}).get(rank, np.nan) for rank in ranks])
    shortest_s = np.where(np.isnan(known_s), shortest_s, known_s)
    explains = (hidden_s >= _LEAST_HIDDEN * (own_s - shortest_s)) & (table.column("ahead_s") >= 0)
    rows: Any = np.array(table.rows)
    rows["self_s"] = np.where(explains, np.maximum(own_s - hidden_s, shortest_s), own_s)
    return replace(table, rows=rows)


def _early_by(table: IterationTable, evidence: Evidence) -> NDArray[np.float64]:
    """For each iteration, how much longer its rank was in a collective than the last member to come, in seconds."""
    owners, streams = table.flat()
    known = [evidence.groups.get(name) for name in table.names]
    sizes = np.array([len(group.members) if group is not None else 0 for group in known])
    wanted = (streams["peer"] < 0) & (streams["count"] > 0)
    owners, streams = owners[wanted], streams[wanted]
    mean_s = streams["busy_s"].astype(np.float64) / streams["count"]
    keys = _coded(table.column("step")[owners], streams["group"], streams["op"])
    whole = np.bincount(keys)[keys] == sizes[streams["group"]]
    early_s = np.where(whole, mean_s - _least(keys, mean_s), 0.0)
    found = np.zeros(len(table))
    np.maximum.at(found, owners, early_s)
    return found


def _coded(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """One number from 0 for each row of these columns, the same for the same rows: one sort of numbers a column."""
    coded = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        known, place = np.unique(column, return_inverse=True)
        coded = np.unique(coded * len(known) + place, return_inverse=True)[1]
    return coded


def _least(keys: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each value the least of those with the same key."""
    least = np.full(int(keys.max(initial=-1)) + 1, np.inf)
    np.minimum.at(least, keys, values)
    return least[keys]


def _busy(summaries: Sequence[IterationSummary]) -> Mapping[_Path, dict[int, float]]:
    """Seconds an iteration that each rank is in the collectives of each path, as medians."""
    rows: dict[_Path, dict[int, list[float]]] = {}
    for summary in summaries:
        for stream in summary.streams:
            if stream.peer < 0 and stream.count > 0:
                rows.setdefault((stream.group, stream.op), {}).setdefault(summary.rank, []).append(
                    stream.busy_s
                )
    return {path: {rank: median(values) for rank, values in ranks.items()} for path, ranks in rows.items()}
