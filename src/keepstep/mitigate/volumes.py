"""Estimates of the traffic between nodes from the operations of ranks, where no counters show it, as over RDMA.

Collectives count as rings over their group's members in order: an all-reduce of n bytes sends 2 (w - 1) / w n over each
link of a ring of w ranks; reduce-scatter, all-gather and all other collectives send half of that. (FALCON's appendix
derives the volumes of data and pipeline parallelism from the model's size; here they come from the recorded calls.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from keepstep.core.events import Op
from keepstep.core.iteration_table import table_of
from keepstep.core.summary import GroupInfo, IterationSummary

_MOST = 1 << 24  # more than any rank number: packs two ranks into one key
_OPERATIONS = 64  # more than any operation code


def volumes(
    rows: Sequence[IterationSummary], groups: Mapping[str, GroupInfo], node_of: Mapping[int, int]
) -> dict[tuple[int, int], float]:
    """Bytes of an iteration by pair of nodes, in both directions together. ``node_of``: node ranks by rank."""
    found: dict[tuple[int, int], float] = {}

    def add(sender: int, receiver: int, count: float) -> None:
        one, other = node_of.get(sender), node_of.get(receiver)
        if one is not None and other is not None and one != other:
            pair = min(one, other), max(one, other)
            found[pair] = found.get(pair, 0.0) + count

    if not len(rows):
        return found
    table = table_of(rows)
    # On a GPU only iterations in which transfers were measured tell of them.
    table = table.where((table.column("ahead_s") < 0) | (table.column("streams") > 0))
    which, streams = table.flat()
    ranks = table.column("rank").astype(np.int64)
    iterations = len(np.unique(table.column("step")))
    rank, peer = ranks[which], streams["peer"].astype(np.int64)
    named = (streams["group"] >= 0) & (streams["bytes"] > 0)
    sent = named & (streams["op"] == Op.SEND) & (peer >= 0)
    for key, count in _sums(rank[sent] * _MOST + peer[sent], streams["bytes"][sent]):
        add(*divmod(key, _MOST), count / iterations)
    shared = named & (peer < 0)
    kind = streams["group"][shared].astype(np.int64) * _OPERATIONS + streams["op"][shared]
    largest: dict[int, float] = {}
    for key, count in _sums(kind * _MOST + rank[shared], streams["bytes"][shared]):
        largest[key // _MOST] = max(largest.get(key // _MOST, 0.0), count / iterations)
    for key, count in largest.items():
        name, op = table.names[key // _OPERATIONS], key % _OPERATIONS
        members = groups[name].members if name in groups else ()
        if len(members) > 1:
            part = (len(members) - 1) / len(members) * (2 if op == Op.ALLREDUCE else 1)
            for sender, receiver in zip(members, (*members[1:], members[0]), strict=True):
                add(sender, receiver, part * count)
    return found


def _sums(keys: NDArray[np.int64], counts: NDArray[np.int64]) -> Iterator[tuple[int, float]]:
    """Each key with the sum of its counts."""
    known, places = np.unique(keys, return_inverse=True)
    yield from zip(
        known.tolist(), np.bincount(places, weights=counts, minlength=len(known)).tolist(), strict=True
    )
