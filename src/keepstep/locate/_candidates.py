"""Which ranks' transfers may have become slow: only their operations are looked at one by one.

A large job has too many transfers to look at each. This pass works on columns, and leaves out only what cannot matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.events import Op
from keepstep.core.iteration_table import IterationTable, distinct
from keepstep.core.summary import GroupInfo
from keepstep.locate.clock_offsets import MAX_DRIFT

MOST_PATHS = 256  # collectives, and messages, that are looked at: those that may have grown most
MOST_NODES = 16  # if they are on no more nodes, all ranks there are looked at too: a fast path clears a pair
_OP_BITS, _PEER_BITS, _RANK_BITS = 5, 19, 18  # bits of a key; a peer may be nobody (-1)
_AT_ONCE = 32_768  # rows that are unfolded together, so that they stay in the caches

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Rows = NDArray[Any]  # structured
_Times = tuple[Ints, Floats]  # keys, ascending; seconds per iteration


def ranks_to_look_at(
    before: IterationTable,
    after: IterationTable,
    groups: Mapping[str, GroupInfo],
    nodes: Mapping[int, str],
    least_s: float,
) -> list[int]:
    """Ranks of the collectives and messages that may take ``least_s`` longer per iteration than before.

    The worst iteration now is compared with the best one before, of more than half of each: nothing that medians would
    show is missed.
    """
    elapsed_s = _span_s(before, after)
    before, after = _majority(before, newest=True), _majority(after, newest=False)
    number = {name: number for number, name in enumerate(dict.fromkeys((*before.names, *after.names)))}
    members = {number[name]: info.members for name, info in groups.items() if name in number}
    old, new = (_Numbered(one, np.array([number[name] for name in one.names])) for one in (before, after))
    collectives, receives = _times(old, np.minimum)
    collectives_now, receives_now = _times(new, np.maximum)
    found: set[int] = set()
    for group in _grown_groups(collectives, collectives_now, members, least_s):
        found.update(members[group])
    longer, growth = _growth(receives, receives_now)
    longer = longer[growth >= least_s]
    slack_s = 2 * MAX_DRIFT * elapsed_s
    late, later = _growth(_latencies(old, longer), _latencies(new, longer))
    late, later = late[later + slack_s >= least_s], later[later + slack_s >= least_s]
    worst = late[np.argsort(-later, kind="stable")][:MOST_PATHS]
    found.update(np.concatenate(_ends(worst)).tolist())
    around = {nodes.get(rank, "") for rank in found}
    if len(around) <= MOST_NODES:
        found.update(rank for rank, node in nodes.items() if node in around)
    return sorted(found)


def _majority(table: IterationTable, *, newest: bool) -> IterationTable:
    """Just over half of the steps, the newest or the oldest; the whole table if any rank lacks a step."""
    steps, ranks = distinct(table.column("step")), distinct(table.column("rank"))
    if len(table) != len(steps) * len(ranks):
        return table
    few = len(steps) // 2 + 1
    first, last = (steps[-few], steps[-1]) if newest else (steps[0], steps[few - 1])
    step = table.column("step")
    return table.where((first <= step) & (step <= last))


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A table whose groups have numbers that are the same in all tables."""

    table: IterationTable
    groups: Ints  # number of a group by the place of its name in the table's names

    def __getitem__(self, rows: slice) -> _Numbered:
        return _Numbered(self.table[rows], self.groups)

    def streams(self, ops: Callable[[Rows], NDArray[np.bool_]]) -> tuple[Ints, Rows, Ints]:
        """The streams that ``ops`` chooses, as (keys, streams, places of their rows).

        A key is the path (group, operation, peer, rank) as one number.
        """
        place, streams = self.table.flat()
        chosen = np.flatnonzero(ops(streams))
        streams, place = streams.take(chosen), place[chosen]
        keys = self.groups[streams["group"]] << _OP_BITS
        keys += streams["op"] & (1 << _OP_BITS) - 1
        keys <<= _PEER_BITS
        keys += streams["peer"]
        keys += 1
        keys <<= _RANK_BITS
        keys += self.table.column("rank")[place]
        return keys, streams, place


def _times(numbered: _Numbered, by: np.ufunc) -> tuple[_Times, _Times]:
    """The times of ranks in their collectives, and in their receives. ``by`` chooses among the iterations."""
    keys, seconds = [np.zeros(0, np.int64)], [np.zeros(0)]
    for begin in range(0, len(numbered.table), _AT_ONCE):
        which, streams, _ = numbered[begin : begin + _AT_ONCE].streams(
            lambda streams: (streams["peer"] < 0) | (streams["op"] == int(Op.RECV))
        )
        which, kept_s = _reduced(which, streams["busy_s"].astype(np.float64), by)
        keys.append(which)
        seconds.append(kept_s)
    which, kept_s = _reduced(np.concatenate(keys), np.concatenate(seconds), by)
    received = _ends(which)[0] >= 0
    return (which[~received], kept_s[~received]), (which[received], kept_s[received])


def _ends(keys: Ints) -> tuple[Ints, Ints]:
    """The sources and the targets of receives."""
    return (keys >> _RANK_BITS & (1 << _PEER_BITS) - 1) - 1, keys & (1 << _RANK_BITS) - 1


def _span_s(before: IterationTable, after: IterationTable) -> float:
    """Time from the first operation of the healthy steps to the last of the slow ones, on one rank's clock."""
    one = [int(after.column("rank")[0])]

    def starts(table: IterationTable) -> Floats:
        rows = table.of_ranks(one)
        place, streams = rows.flat()
        return rows.column("start_s")[place] + streams["start_s"]

    return max(float(starts(after).max(initial=-np.inf) - starts(before).min(initial=np.inf)), 0.0)


def _growth(then: _Times, now: _Times) -> _Times:
    """The keys that both have, and for each the greatest value now less the least before."""
    old, least = _reduced(*then, np.minimum)
    new, most = _reduced(*now, np.maximum)
    if np.array_equal(old, new):
        return old, most - least
    both, before, after = np.intersect1d(old, new, assume_unique=True, return_indices=True)
    return both, most[after] - least[before]


def _reduced(keys: Ints, values: Floats, by: np.ufunc) -> _Times:
    order = np.argsort(keys, kind="stable")  # four times as fast as the default: there are many sorted runs
    keys, values = keys[order], values[order]
    first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))) if len(keys) else order
    return keys[first], by.reduceat(values, first) if len(keys) else values


def _grown_groups(
    then: _Times, now: _Times, members: Mapping[int, tuple[int, ...]], least_s: float
) -> list[int]:
    """Groups with a collective that takes every member longer by at least ``least_s``."""
    keys, growth = _growth(then, now)
    every = keys >> _RANK_BITS + _PEER_BITS
    paths, told = np.unique(every, return_counts=True)
    _, least = _reduced(every, growth, np.minimum)
    groups: list[int] = (paths >> _OP_BITS).tolist()
    sizes = np.array([len(members.get(group, ())) for group in groups], dtype=np.int64)
    grown = np.flatnonzero((least >= least_s) & (sizes >= 2) & (told >= sizes))
    return [groups[place] for place in grown[np.argsort(-least[grown], kind="stable")][:MOST_PATHS].tolist()]


def _latencies(numbered: _Numbered, wanted: Ints) -> _Times:
    """The wanted receives, and the seconds per iteration from their sends' start to their own end."""
    table = numbered.table.of_ranks(np.concatenate(_ends(wanted)).tolist())
    keys, streams, place = _Numbered(table, numbered.groups).streams(
        lambda streams: (streams["op"] == int(Op.SEND)) | (streams["op"] == int(Op.RECV))
    )
    sends, begin_s = streams["op"] == int(Op.SEND), table.column("start_s")[place]
    peer, rank = _ends(keys)
    source, target = np.where(sends, rank, peer), np.where(sends, peer, rank)
    message = (keys >> _RANK_BITS + _PEER_BITS + _OP_BITS << _RANK_BITS + _PEER_BITS) + (source << _RANK_BITS)
    message = (message + target) * 64 + table.column("step")[place] % 64
    sent, received = np.flatnonzero(sends), np.flatnonzero(~sends & np.isin(keys, wanted))
    if len(sent) == 0:
        return wanted[:0], np.zeros(0)
    sent = sent[np.argsort(message[sent], kind="stable")]
    at = np.minimum(np.searchsorted(message[sent], message[received]), len(sent) - 1)
    matched = message[sent[at]] == message[received]
    received, sent = received[matched], sent[at[matched]]
    ended_s = begin_s[received] + streams["end_s"][received]
    started_s = begin_s[sent] + streams["start_s"][sent]
    return keys[received], (ended_s - started_s) * streams["count"][received]
