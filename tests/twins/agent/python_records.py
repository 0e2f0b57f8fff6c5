"""Twin of `keepstep.agent.ranks.records`, whole columns at a time with numpy."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.agent.ranks.intervals import Union, clipped
from keepstep.ring import RECORD

Rows = NDArray[Any]

PHASE, BACKWARD, OPTIMIZER, DATA, GC = 3, 2, 3, 4, 7
ASYNC, END_BY_WAIT, FAILED, SYNC_KNOWN = 1, 2, 4, 8
_PHASES = (GC, OPTIMIZER, DATA, BACKWARD)
_MOST = 1 << 17
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9))
_FIELDS = ["op", "seq", "ticket", "start_ns", "end_ns", "thread", "peer", "wait_ns", "bytes"]


def of_kind(rows: Rows, kind: int) -> list[tuple[int, ...]]:
    return rows[rows["kind"] == kind][_FIELDS].tolist()


def outline(rows: Rows) -> tuple[int, int, int, list[tuple[int, ...]]]:
    failed = (rows["flags"] & FAILED) != 0
    group, end_ns = rows["group"].max(initial=-1), rows["end_ns"][~failed].max(initial=0)
    return int(group), int(end_ns), int(failed.sum()), of_kind(rows, PHASE)


def repeats(rows: Rows) -> NDArray[np.bool_]:
    return (rows["kind"] != PHASE) | (rows["op"] == BACKWARD)


def symbols(
    rows: Rows, first_ticket: int = 0, end_ticket: int = 1 << 63, since_ns: int = -(1 << 63)
) -> tuple[bytes, bytes, bool]:
    low, high = np.searchsorted(rows["ticket"], np.array([first_ticket, end_ticket], np.uint64))
    rows = rows[low:high]
    rows = rows[repeats(rows) & (rows["start_ns"] >= since_ns)]
    place = (rows["op"].astype(np.uint64) << np.uint64(8)) | rows["kind"]
    place |= rows["group"].astype(np.uint64) << np.uint64(16)
    peer = rows["peer"].astype(np.int64).astype(np.uint64)
    numbers = (place * _MIX[0]) ^ (rows["bytes"] * _MIX[1]) ^ (peer * _MIX[2])
    return numbers.tobytes(), rows["start_ns"].tobytes(), bool((rows["kind"] == PHASE).any())


def waits(operations: Rows, open_ns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    starts, seen, flags = operations["start_ns"], operations["wait_ns"] > 0, operations["flags"]
    ends = np.where(operations["end_ns"] == 0, open_ns, operations["end_ns"])
    known = (flags & (ASYNC | SYNC_KNOWN)) == (ASYNC | SYNC_KNOWN)
    groups = operations["group"]
    shows = ((flags & END_BY_WAIT) != 0) | (known & np.isin(groups, groups[known & seen]))
    begin = np.where(seen, operations["wait_ns"], starts)
    return np.where(~seen & shows, ends, begin), ends


def own_times(
    rows: Rows, start_ns: int, end_ns: int, pause_starts: Any, pause_ends: Any
) -> tuple[int, int, int, int, int]:
    phases = rows[rows["kind"] == PHASE]
    waiting = Union(*clipped(*waits(rows[rows["kind"] != PHASE], end_ns), start_ns, end_ns))
    taken = waiting.joined(Union(pause_starts, pause_ends))
    found = [taken.total_ns]
    for code in _PHASES:
        ours = phases[phases["op"] == code]
        ends = np.where(ours["end_ns"] == 0, end_ns, ours["end_ns"])
        span = Union(*clipped(ours["start_ns"], ends, start_ns, end_ns))
        found.append(span.less(taken))
        taken = taken.joined(span)
    waited, gc, optimizer, data, backward = found
    return waited, gc, optimizer, data, backward


def streams(
    rows: Rows,
    start_ns: int,
    end_ns: int,
    pause_starts: Any,
    pause_ends: Any,
    groups: Container[int] | None = None,
    blocked_throughout: bool = False,
) -> list[tuple[int, ...]]:
    pauses = Union(pause_starts, pause_ends)
    operations = rows[rows["kind"] != PHASE]
    if blocked_throughout:
        begin = operations["start_ns"]
        until = np.where(operations["end_ns"] == 0, end_ns, operations["end_ns"])
    else:
        begin, until = waits(operations, end_ns)
    if groups is not None:
        theirs = np.array([group in groups for group in operations["group"].tolist()], np.bool_)
        operations, begin, until = operations[theirs], begin[theirs], until[theirs]
    begin = _surely_blocked(operations, begin, until)
    fresh = operations["start_ns"] >= start_ns
    operations, begin, until = operations[fresh], begin[fresh], until[fresh]
    if not len(operations):
        return []
    key = operations["group"].astype(np.int64) << 40
    key |= operations["op"].astype(np.int64) << 32
    key |= operations["peer"].astype(np.int64) & 0xFFFFFFFF
    order = np.argsort(key, kind="stable")
    operations, key, begin, until = operations[order], key[order], begin[order], until[order]
    first = np.concatenate(([0], np.flatnonzero(key[1:] != key[:-1]) + 1))
    starts = operations["start_ns"]
    ends = np.where(operations["end_ns"] == 0, end_ns, operations["end_ns"])
    origin_ns = start_ns + pauses.total_ns
    parts = (
        np.ones(len(key), np.int64),
        starts + (pauses.total_ns - pauses.until(starts)) - origin_ns,
        ends + (pauses.total_ns - pauses.until(ends)) - origin_ns,
        ends - starts,
        np.maximum(until - begin, 0),
        operations["bytes"].astype(np.int64),
    )
    sums = np.add.reduceat(np.stack(parts), first, axis=1).T.tolist()
    shortest = np.minimum.reduceat(ends - starts, first).tolist()
    heads = operations[first][["group", "op", "peer", "seq"]].tolist()
    return [(*head, *sums[place], shortest[place]) for place, head in enumerate(heads)]


def _surely_blocked(operations: Rows, begin: Any, until: Any) -> Any:
    guessed = ((operations["flags"] & ASYNC) != 0) & (begin == operations["start_ns"]) & (until > begin)
    sure, threads = np.array(begin), operations["thread"]
    for thread in set(threads[guessed].tolist()):
        here = threads == thread
        begun = np.sort(operations["start_ns"][here])
        mine = guessed & here
        last = begun[np.maximum(np.searchsorted(begun, until[mine], "left") - 1, 0)]
        sure[mine] = np.maximum(begin[mine], np.minimum(last, until[mine]))
    return sure


class Pending:
    """Keeps all batches, and puts them together when it is asked."""

    def __init__(self) -> None:
        self._rows = np.zeros(0, RECORD)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, started: Rows, finished: Rows) -> bool:
        rows = np.concatenate((self._rows, started))
        rows = rows[np.unique(rows["ticket"], return_index=True)[1]]
        for one in finished:
            rows[rows["ticket"] == one["ticket"]] = one
        self._rows = rows[len(rows) // 2 :] if len(rows) > _MOST else rows
        return len(rows) <= _MOST

    def rows(self) -> Rows:
        return self._rows

    def begun_before(self, time_ns: int) -> Rows:
        return self._rows[self._rows["start_ns"] < time_ns]

    def repeating_from(self, ticket: int) -> Rows:
        return self._rows[repeats(self._rows) & (self._rows["ticket"] >= np.uint64(ticket))]

    def phases_since(self, time_ns: int) -> list[int]:
        rows = self._rows
        return rows["op"][(rows["kind"] == PHASE) & (rows["start_ns"] >= time_ns)].tolist()

    def drop_before(self, time_ns: int) -> None:
        ends = self._rows["end_ns"]
        self._rows = self._rows[(self._rows["start_ns"] >= time_ns) | (ends == 0) | (ends > time_ns)]
