"""Of a large job's transfers those that may have become slow: only of these is every operation looked at one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.events import Op
from keepstep.core.iteration_table import IterationTable
from keepstep.core.summary import GroupInfo
from keepstep.locate.clocks import MAX_DRIFT

MOST_PATHS = 256  # of each kind, those that may have grown most
MOST_NODES = 16  # around them, all of whose ranks are looked at, too: a fast path clears a pair

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

    What is compared is the worst iteration now with the best one before, so nothing that medians would show is missed.
    """
    names: dict[str, int] = {}
    then, now = _Streams(before, names), _Streams(after, names)
    members = {names[name]: info.members for name, info in groups.items() if name in names}
    found: set[int] = set()
    for group in _grown_groups(then, now, members, least_s):
        found.update(members[group])
    for source, target in _grown_messages(then, now, least_s):
        found.update((source, target))
    around = {nodes.get(rank, "") for rank in found}
    if len(around) <= MOST_NODES:
        found.update(rank for rank, node in nodes.items() if node in around)
    return sorted(found)


class _Streams:
    """The streams of a table as columns; times per operation in seconds."""

    def __init__(self, table: IterationTable, names: dict[str, int]) -> None:
        place, streams = table.flat()
        numbers = np.array([names.setdefault(name, len(names)) for name in table.names], dtype=np.int64)
        self.rank: Ints = table.rows["rank"].astype(np.int64)[place]
        self.step: Ints = table.rows["step"].astype(np.int64)[place]
        self.group: Ints = numbers[streams["group"]]
        self.op: Ints = streams["op"].astype(np.int64)
        self.peer: Ints = streams["peer"].astype(np.int64)
        self.count: Ints = streams["count"].astype(np.int64)
        self.busy_s: Floats = streams["busy_s"].astype(np.float64)
        begin_s: Floats = table.rows["start_s"][place]
        self.start_s: Floats = begin_s + streams["start_s"]
        self.end_s: Floats = begin_s + streams["end_s"]

    def keys(self, which: NDArray[np.bool_]) -> Ints:
        """One number for each path as one rank has it: (group, operation, peer, rank)."""
        path = (self.group[which] << 5) + (self.op[which] & 31)
        return (((path << 19) + self.peer[which] + 1) << 18) + self.rank[which]


def _growth(then: tuple[Ints, Floats], now: tuple[Ints, Floats]) -> tuple[Ints, Floats]:
    """(keys, the greatest value now less the least before) of the keys that both have."""
    old, least = _reduced(*then, np.minimum)
    new, most = _reduced(*now, np.maximum)
    both, before, after = np.intersect1d(old, new, assume_unique=True, return_indices=True)
    return both, most[after] - least[before]


def _reduced(keys: Ints, values: Floats, by: np.ufunc) -> tuple[Ints, Floats]:
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))) if len(keys) else order
    return keys[first], by.reduceat(values, first) if len(keys) else values


def _grown_groups(
    then: _Streams, now: _Streams, members: Mapping[int, tuple[int, ...]], least_s: float
) -> list[int]:
    """Groups with a collective that takes every member longer."""

    def busy(streams: _Streams) -> tuple[Ints, Floats]:
        which = streams.peer < 0
        return streams.keys(which), streams.busy_s[which]

    keys, growth = _growth(busy(then), busy(now))
    paths, told = np.unique(keys >> (18 + 19), return_counts=True)
    _, least = _reduced(keys >> (18 + 19), growth, np.minimum)
    sizes = np.array([len(members.get(group, ())) for group in (paths >> 5).tolist()], dtype=np.int64)
    grown = np.flatnonzero((least >= least_s) & (sizes >= 2) & (told >= sizes))
    worst = grown[np.argsort(-least[grown], kind="stable")][:MOST_PATHS]
    return (paths[worst] >> 5).tolist()


def _grown_messages(then: _Streams, now: _Streams, least_s: float) -> list[tuple[int, int]]:
    """(source, target) of the messages that are received for longer and come later after they were sent."""

    def receiving(streams: _Streams) -> tuple[Ints, Floats]:
        which = streams.op == int(Op.RECV)
        return streams.keys(which), streams.busy_s[which]

    keys, growth = _growth(receiving(then), receiving(now))
    longer = keys[growth >= least_s]
    if len(longer) == 0:
        return []
    one = int(now.rank[0])  # clocks of nodes are not compared
    elapsed_s = now.start_s[now.rank == one].max() - then.start_s[then.rank == one].min(initial=np.inf)
    slack_s = 2 * MAX_DRIFT * max(float(elapsed_s), 0.0)
    late, later = _growth(_latencies(then, longer), _latencies(now, longer))
    places = np.flatnonzero(later + slack_s >= least_s)
    worst = late[places[np.argsort(-later[places], kind="stable")][:MOST_PATHS]]
    sources, targets = (worst >> 18 & (1 << 19) - 1) - 1, worst & (1 << 18) - 1
    return list(zip(sources.tolist(), targets.tolist(), strict=True))


def _latencies(streams: _Streams, wanted: Ints) -> tuple[Ints, Floats]:
    """Of the wanted receives (key, seconds per iteration from the sends' start to the receives' end)."""
    receives = streams.op == int(Op.RECV)
    keys = streams.keys(receives)
    chosen = np.flatnonzero(receives)[np.isin(keys, wanted)]
    sends = np.flatnonzero(streams.op == int(Op.SEND))

    def pairs(places: Ints, source: Ints, target: Ints) -> Ints:
        first = int(streams.step.min())
        path = (streams.group[places] << 37) + (source[places] << 18) + target[places]
        return path * 64 + (streams.step[places] - first) % 64

    sent = pairs(sends, streams.rank, streams.peer)
    order = np.argsort(sent, kind="stable")
    received = pairs(chosen, streams.peer, streams.rank)
    at = np.minimum(np.searchsorted(sent[order], received), max(len(sent) - 1, 0))
    matched = sent[order][at] == received if len(sent) else np.zeros(len(chosen), np.bool_)
    chosen, place = chosen[matched], sends[order][at[matched]] if len(sent) else chosen[:0]
    latency = (streams.end_s[chosen] - streams.start_s[place]) * streams.count[chosen]
    mask = np.zeros(len(streams.rank), np.bool_)
    mask[chosen] = True
    return streams.keys(mask), latency
