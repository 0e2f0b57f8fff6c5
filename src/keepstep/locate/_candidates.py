"""Of a large job's transfers those that may have become slow: only of these is every operation looked at one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.events import Op
from keepstep.core.iteration_table import IterationTable, distinct
from keepstep.core.summary import GroupInfo
from keepstep.locate.clocks import MAX_DRIFT

MOST_PATHS = 256  # of each kind, those that may have grown most
MOST_NODES = 16  # around them, all of whose ranks are looked at, too: a fast path clears a pair
_AT_ONCE = 32_768  # rows: what is unfolded of them stays in the caches

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Rows = NDArray[Any]  # structured


def ranks_to_look_at(
    before: IterationTable,
    after: IterationTable,
    groups: Mapping[str, GroupInfo],
    nodes: Mapping[int, str],
    least_s: float,
) -> list[int]:
    """Ranks of the collectives and messages that may take ``least_s`` longer per iteration than before.

    What is compared is the worst iteration now with the best one before, of more than half of each: nothing that
    medians would show is missed.
    """
    elapsed_s = _span_s(before, after)  # clocks of nodes are not compared
    before, after = _majority(before, newest=True), _majority(after, newest=False)
    numbers = {name: number for number, name in enumerate(dict.fromkeys((*before.names, *after.names)))}
    then, now = _streams(before, numbers, np.minimum), _streams(after, numbers, np.maximum)
    members = {numbers[name]: info.members for name, info in groups.items() if name in numbers}
    found: set[int] = set()
    for group in _grown_groups(then, now, members, least_s):
        found.update(members[group])
    for source, target in _grown_messages(then, now, least_s, 2 * MAX_DRIFT * elapsed_s):
        found.update((source, target))
    around = {nodes.get(rank, "") for rank in found}
    if len(around) <= MOST_NODES:
        found.update(rank for rank, node in nodes.items() if node in around)
    return sorted(found)


def _majority(table: IterationTable, *, newest: bool) -> IterationTable:
    """The newest, or oldest, half of the steps and one more; all where not all ranks tell of all steps."""
    steps, ranks = distinct(table.column("step")), distinct(table.column("rank"))
    if len(table) != len(steps) * len(ranks):
        return table
    few = len(steps) // 2 + 1
    first, last = (steps[-few], steps[-1]) if newest else (steps[0], steps[few - 1])
    step = table.column("step")
    return table.where((first <= step) & (step <= last))


@dataclass(frozen=True, slots=True)
class _Streams:
    """The operations of all iterations as columns; times in seconds, ``start_s`` and ``end_s`` by each rank's clock.

    A key is the path (group, operation, peer, rank) as one number, a pair that of (group, source, target, step).
    """

    collectives: Ints  # keys
    in_collectives_s: Floats  # of each key the least or the greatest
    receives: Ints
    in_receives_s: Floats
    received: Ints  # pairs, of every receive
    received_by: Ints  # keys
    count: Ints
    end_s: Floats
    sent: Ints  # pairs, of every send
    start_s: Floats


def _streams(table: IterationTable, numbers: Mapping[str, int], by: np.ufunc) -> _Streams:
    """``numbers``: of the groups. ``by``: which of a key's times is kept."""
    number = np.fromiter(map(numbers.__getitem__, table.names), np.int64)
    parts = (
        _unfolded(table[begin : begin + _AT_ONCE], number, by)
        for begin in range(0, max(len(table), 1), _AT_ONCE)
    )
    return _Streams(*map(np.concatenate, zip(*parts, strict=True)))


def _unfolded(table: IterationTable, number: Ints, by: np.ufunc) -> tuple[NDArray[Any], ...]:
    """The columns of some rows."""
    place, streams = table.flat()
    ranks, steps = (table.column(name).astype(np.int64) for name in ("rank", "step"))
    begin_s = table.column("start_s")

    def only(which: NDArray[np.bool_]) -> tuple[Rows, Ints, Ints, Ints, Ints]:
        chosen = np.flatnonzero(which)
        rows, at = streams.take(chosen), place[chosen]
        return rows, at, number[rows["group"]], ranks[at], rows["peer"].astype(np.int64)

    def keys(rows: Rows, group: Ints, rank: Ints, peer: Ints) -> Ints:
        return (((((group << 5) + (rows["op"] & 31)) << 19) + peer + 1) << 18) + rank

    def pairs(at: Ints, group: Ints, source: Ints, target: Ints) -> Ints:
        return ((group << 37) + (source << 18) + target) * 64 + steps[at] % 64

    rows, _, group, rank, peer = only(streams["peer"] < 0)
    collectives = _reduced(keys(rows, group, rank, peer), rows["busy_s"].astype(np.float64), by)
    rows, at, group, rank, peer = only(streams["op"] == int(Op.RECV))
    received_by = keys(rows, group, rank, peer)
    receives = _reduced(received_by, rows["busy_s"].astype(np.float64), by)
    end_s, count = begin_s[at] + rows["end_s"], rows["count"].astype(np.int64)
    received = pairs(at, group, peer, rank), received_by, count, end_s
    rows, at, group, rank, peer = only(streams["op"] == int(Op.SEND))
    sent = pairs(at, group, rank, peer), begin_s[at] + rows["start_s"]
    return *collectives, *receives, *received, *sent


def _span_s(before: IterationTable, after: IterationTable) -> float:
    """From the first operation of the healthy steps to the last of the slow ones, by one rank's clock."""
    one = [int(after.column("rank")[0])]

    def starts(table: IterationTable) -> Floats:
        rows = table.of_ranks(one)
        place, streams = rows.flat()
        return rows.column("start_s")[place] + streams["start_s"]

    return max(float(starts(after).max(initial=-np.inf) - starts(before).min(initial=np.inf)), 0.0)


def _growth(then: tuple[Ints, Floats], now: tuple[Ints, Floats]) -> tuple[Ints, Floats]:
    """(keys, the greatest value now less the least before) of the keys that both have."""
    old, least = _reduced(*then, np.minimum)
    new, most = _reduced(*now, np.maximum)
    if np.array_equal(old, new):
        return old, most - least
    both, before, after = np.intersect1d(old, new, assume_unique=True, return_indices=True)
    return both, most[after] - least[before]


def _reduced(keys: Ints, values: Floats, by: np.ufunc) -> tuple[Ints, Floats]:
    order = np.argsort(keys)
    keys, values = keys[order], values[order]
    first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))) if len(keys) else order
    return keys[first], by.reduceat(values, first) if len(keys) else values


def _grown_groups(
    then: _Streams, now: _Streams, members: Mapping[int, tuple[int, ...]], least_s: float
) -> list[int]:
    """Groups with a collective that takes every member longer."""

    keys, growth = _growth((then.collectives, then.in_collectives_s), (now.collectives, now.in_collectives_s))
    paths, told = np.unique(keys >> (18 + 19), return_counts=True)
    _, least = _reduced(keys >> (18 + 19), growth, np.minimum)
    sizes = np.array([len(members.get(group, ())) for group in (paths >> 5).tolist()], dtype=np.int64)
    grown = np.flatnonzero((least >= least_s) & (sizes >= 2) & (told >= sizes))
    worst = grown[np.argsort(-least[grown], kind="stable")][:MOST_PATHS]
    return (paths[worst] >> 5).tolist()


def _grown_messages(then: _Streams, now: _Streams, least_s: float, slack_s: float) -> list[tuple[int, int]]:
    """(source, target) of the messages that are received for longer and come later after they were sent."""

    keys, growth = _growth((then.receives, then.in_receives_s), (now.receives, now.in_receives_s))
    longer = keys[growth >= least_s]
    if len(longer) == 0:
        return []
    late, later = _growth(_latencies(then, longer), _latencies(now, longer))
    places = np.flatnonzero(later + slack_s >= least_s)
    worst = late[places[np.argsort(-later[places], kind="stable")][:MOST_PATHS]]
    sources, targets = (worst >> 18 & (1 << 19) - 1) - 1, worst & (1 << 18) - 1
    return list(zip(sources.tolist(), targets.tolist(), strict=True))


def _latencies(streams: _Streams, wanted: Ints) -> tuple[Ints, Floats]:
    """Of the wanted receives (key, seconds per iteration from the sends' start to the receives' end)."""
    chosen = np.flatnonzero(np.isin(streams.received_by, wanted))
    if len(streams.sent) == 0:
        return wanted[:0], np.zeros(0)
    order = np.argsort(streams.sent, kind="stable")
    sent, received = streams.sent[order], streams.received[chosen]
    at = np.minimum(np.searchsorted(sent, received), len(sent) - 1)
    matched = sent[at] == received
    chosen, place = chosen[matched], order[at[matched]]
    latency_s = streams.end_s[chosen] - streams.start_s[place]
    return streams.received_by[chosen], latency_s * streams.count[chosen]
