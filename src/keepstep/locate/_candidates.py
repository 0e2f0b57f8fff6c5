"""Of a large job's transfers those that may have become slow: only of these is every operation looked at one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    numbers = {name: number for number, name in enumerate(dict.fromkeys((*before.names, *after.names)))}
    then, now = (list(_steps(table, numbers)) for table in (before, after))
    members = {numbers[name]: info.members for name, info in groups.items() if name in numbers}
    found: set[int] = set()
    for group in _grown_groups(then, now, members, least_s):
        found.update(members[group])
    elapsed_s = _span_s(before, after)  # clocks of nodes are not compared
    for source, target in _grown_messages(then, now, least_s, 2 * MAX_DRIFT * elapsed_s):
        found.update((source, target))
    around = {nodes.get(rank, "") for rank in found}
    if len(around) <= MOST_NODES:
        found.update(rank for rank, node in nodes.items() if node in around)
    return sorted(found)


@dataclass(frozen=True, slots=True)
class _Sends:
    """One step's sends: from whom to whom (`_pair`), and when they began, by the sender's clock."""

    pairs: Ints
    start_s: Floats


@dataclass(frozen=True, slots=True)
class _Paths:
    """One step's collectives or receives. ``keys``: the path (group, operation, peer, rank) as one number."""

    keys: Ints
    busy_s: Floats
    pairs: Ints  # of receives: from whom to whom
    end_s: Floats  # by the rank's clock
    count: Ints


@dataclass(frozen=True, slots=True)
class _Step:
    collectives: _Paths
    receives: _Paths
    sends: _Sends


def _steps(table: IterationTable, numbers: Mapping[str, int]) -> Iterator[_Step]:
    """Step by step, so that only one of them is held as a whole. ``numbers``: of the groups."""
    steps = table.column("step")
    number = np.fromiter(map(numbers.__getitem__, table.names), np.int64)
    for step in np.unique(steps).tolist():
        rows = table.where(steps == step)
        place, streams = rows.flat()
        rank, start_s = rows.column("rank").astype(np.int64), rows.column("start_s")
        which = (streams["peer"] < 0, streams["op"] == int(Op.RECV), streams["op"] == int(Op.SEND))
        collectives, receives, sends = (
            (streams.take(chosen), place[chosen]) for chosen in map(np.flatnonzero, which)
        )
        yield _Step(
            _paths(*collectives, rank, start_s, number),
            _paths(*receives, rank, start_s, number),
            _Sends(
                _pair(number[sends[0]["group"]], rank[sends[1]], sends[0]["peer"]),
                start_s[sends[1]] + sends[0]["start_s"],
            ),
        )


def _paths(streams: Rows, place: Ints, ranks: Ints, start_s: Floats, number: Ints) -> _Paths:
    group, rank, peer = number[streams["group"]], ranks[place], streams["peer"].astype(np.int64)
    path = (group << 5) + (streams["op"] & 31)
    return _Paths(
        (((path << 19) + peer + 1) << 18) + rank,
        streams["busy_s"].astype(np.float64),
        _pair(group, peer, rank),
        start_s[place] + streams["end_s"],
        streams["count"].astype(np.int64),
    )


def _pair(group: Ints, source: Ints, target: Ints) -> Ints:
    return (group << 37) + (source.astype(np.int64) << 18) + target


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


def _over_steps(steps: Iterable[tuple[Ints, Floats]], by: np.ufunc) -> tuple[Ints, Floats]:
    """(keys, values) of all steps, each key once; the same ranks mostly tell the same of every step."""
    keys, values = np.zeros(0, np.int64), np.zeros(0)
    for new_keys, new_values in steps:
        if np.array_equal(keys, new_keys):
            values = by(values, new_values)
        else:
            keys, values = np.concatenate((keys, new_keys)), np.concatenate((values, new_values))
    return _reduced(keys, values, by)


def _reduced(keys: Ints, values: Floats, by: np.ufunc) -> tuple[Ints, Floats]:
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))) if len(keys) else order
    return keys[first], by.reduceat(values, first) if len(keys) else values


def _grown_groups(
    then: Sequence[_Step], now: Sequence[_Step], members: Mapping[int, tuple[int, ...]], least_s: float
) -> list[int]:
    """Groups with a collective that takes every member longer."""

    def busy(steps: Sequence[_Step]) -> Iterator[tuple[Ints, Floats]]:
        return ((step.collectives.keys, step.collectives.busy_s) for step in steps)

    keys, growth = _growth(_over_steps(busy(then), np.minimum), _over_steps(busy(now), np.maximum))
    paths, told = np.unique(keys >> (18 + 19), return_counts=True)
    _, least = _reduced(keys >> (18 + 19), growth, np.minimum)
    sizes = np.array([len(members.get(group, ())) for group in (paths >> 5).tolist()], dtype=np.int64)
    grown = np.flatnonzero((least >= least_s) & (sizes >= 2) & (told >= sizes))
    worst = grown[np.argsort(-least[grown], kind="stable")][:MOST_PATHS]
    return (paths[worst] >> 5).tolist()


def _grown_messages(
    then: Sequence[_Step], now: Sequence[_Step], least_s: float, slack_s: float
) -> list[tuple[int, int]]:
    """(source, target) of the messages that are received for longer and come later after they were sent."""

    def receiving(steps: Sequence[_Step]) -> Iterator[tuple[Ints, Floats]]:
        return ((step.receives.keys, step.receives.busy_s) for step in steps)

    keys, growth = _growth(_over_steps(receiving(then), np.minimum), _over_steps(receiving(now), np.maximum))
    longer = keys[growth >= least_s]
    if len(longer) == 0:
        return []
    first, last = (
        _over_steps(_latencies(then, longer), np.minimum),
        _over_steps(_latencies(now, longer), np.maximum),
    )
    late, later = _growth(first, last)
    places = np.flatnonzero(later + slack_s >= least_s)
    worst = late[places[np.argsort(-later[places], kind="stable")][:MOST_PATHS]]
    sources, targets = (worst >> 18 & (1 << 19) - 1) - 1, worst & (1 << 18) - 1
    return list(zip(sources.tolist(), targets.tolist(), strict=True))


def _latencies(steps: Sequence[_Step], wanted: Ints) -> Iterator[tuple[Ints, Floats]]:
    """Step by step of the wanted receives (key, seconds per iteration from the sends' start to the receives' end)."""
    old: _Step | None = None
    chosen, sent = wanted[:0], wanted[:0]
    for step in steps:
        receives, sends = step.receives, step.sends
        if old is None or not (
            np.array_equal(old.receives.pairs, receives.pairs)
            and np.array_equal(old.sends.pairs, sends.pairs)
        ):
            chosen, sent = _matched(step, wanted)
        old = step
        latency_s = receives.end_s[chosen] - sends.start_s[sent]
        yield receives.keys[chosen], latency_s * receives.count[chosen]


def _matched(step: _Step, wanted: Ints) -> tuple[Ints, Ints]:
    """Places of the wanted receives, as far as it was told who sent, and of their sends."""
    chosen = np.flatnonzero(np.isin(step.receives.keys, wanted))
    received, pairs = step.receives.pairs[chosen], step.sends.pairs
    order = np.argsort(pairs, kind="stable")
    if len(order) == 0:
        return chosen[:0], order
    place = order[np.minimum(np.searchsorted(pairs[order], received), len(order) - 1)]
    matched = pairs[place] == received
    return chosen[matched], place[matched]
