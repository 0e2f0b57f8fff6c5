"""Makes the table of all ranks from the heartbeats of each node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from keepstep.view.run_snapshot import RankTable
from keepstep.wire.messages import RankBeat

_MOST_RANKS, _MOST_STEPS, _MOST_CODE = 1 << 20, 1 << 53, 1 << 15


def rank_table(nodes: Iterable[tuple[int, Sequence[RankBeat]]]) -> RankTable:
    """The heartbeats of the ranks on each node, by node rank, as one table in the order of ranks.

    Left out: ranks, steps and phases that no rank can have. Of two nodes that tell of one rank the later one counts.
    """
    beats: list[RankBeat] = []
    counts: list[int] = []
    numbers: list[int] = []
    for number, ranks in nodes:
        beats.extend(ranks)
        counts.append(len(ranks))
        numbers.append(number)
    rank = _column(beats, "rank", np.int64)
    step = _column(beats, "step", np.int64)
    phase = _column(beats, "phase", np.int64)
    node = np.repeat(np.array(numbers, np.int64), counts)
    table = RankTable(
        rank.astype(np.int32),
        node.astype(np.int32),
        step,
        phase.astype(np.int16),
        _column(beats, "iteration_s", np.float32),
        _column(beats, "self_s", np.float32),
        _column(beats, "idle_s", np.float32),
        _column(beats, "overdue_s", np.float32),
        _column(beats, "alive", np.bool_),
        _column(beats, "watched", np.bool_),
    )
    sound = (rank >= 0) & (rank < _MOST_RANKS) & (step >= -1) & (step < _MOST_STEPS)
    sound &= (phase >= -1) & (phase < _MOST_CODE) & (node >= 0) & (node < _MOST_RANKS)
    return _in_order(table if sound.all() else _picked(table, np.flatnonzero(sound)))


def joined(parts: Sequence[RankTable]) -> RankTable:
    """Tables of several nodes as one, as `rank_table` makes it of all at once."""
    if not parts:
        return rank_table(())
    names = RankTable.__slots__
    return _in_order(RankTable(*(np.concatenate([getattr(one, name) for one in parts]) for name in names)))


def _in_order(table: RankTable) -> RankTable:
    """The rows in the order of ranks; of several with one rank the last."""
    rank = table.rank
    if (rank[1:] > rank[:-1]).all():
        return table
    # `unique` finds the first of each, which is the last in the reversed order.
    _, last = np.unique(rank[::-1], return_index=True)
    return _picked(table, len(rank) - 1 - last)


def _column(beats: Sequence[RankBeat], name: str, kind: type[np.generic]) -> npt.NDArray[Any]:
    """One field of all heartbeats; a number too large for it becomes one that no rank can have."""
    try:
        with np.errstate(over="ignore"):
            return np.fromiter(map(attrgetter(name), beats), kind, len(beats))
    except OverflowError:
        values = map(attrgetter(name), beats)
        return np.array([value if -(1 << 62) < value < 1 << 62 else -2 for value in values], kind)


def _picked(table: RankTable, rows: npt.NDArray[np.intp]) -> RankTable:
    return RankTable(*(getattr(table, name)[rows] for name in RankTable.__slots__))
