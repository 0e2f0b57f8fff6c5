"""The native seam, typed.

``rows`` are records of the ring (`keepstep.ring.RECORD`) in order of tickets: an array, or its bytes. Times are in ns;
pauses are packed int64, sorted and disjoint. A table that is no whole number of rows raises ValueError.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, final

from numpy.typing import NDArray

Packed = NDArray[Any] | bytes | bytearray | memoryview
Told = tuple[int, int, int, int, int, int, int, int, int]
StreamSums = tuple[int, int, int, int, int, int, int, int, int, int, int]

def of_kind(rows: Packed, kind: int) -> list[Told]:
    """Operation, seq, ticket, start, end, thread, peer, start of the wait, and bytes of each record of this kind."""

def outline(rows: Packed) -> tuple[int, int, int, list[Told]]:
    """The largest group, the latest end of those that did not fail, how many failed, and the phases, as `of_kind`."""

def symbols(
    rows: Packed, first_ticket: int = 0, end_ticket: int = ..., since_ns: int = ...
) -> tuple[bytes, bytes, bool]:
    """The sequence that repeats in each iteration: communication and backward passes.

    One uint64 for each, equal for equal kind, operation, group, peer and bytes; their starts (int64); and whether there
    is a backward pass among them. Only tickets before ``end_ticket``, and starts from ``since_ns`` on.
    """

def waits(operations: Packed, open_ns: int) -> tuple[bytearray, bytearray]:
    """From when to when the rank waits in each operation (int64). ``open_ns`` replaces ends that are not known."""

def own_times(
    rows: Packed, start_ns: int, end_ns: int, pause_starts: Packed, pause_ends: Packed
) -> tuple[int, int, int, int, int]:
    """How long the rank waited or paused, and else was in garbage collection, optimizer, data and backward phases."""

def streams(
    rows: Packed,
    start_ns: int,
    end_ns: int,
    pause_starts: Packed,
    pause_ends: Packed,
    groups: Container[int] | None = None,
    blocked_throughout: bool = False,
) -> list[StreamSums]:
    """Sums of the operations that began in an iteration, by group, operation and peer.

    Group, operation, peer, first seq, count, starts and ends (as if all pauses had come before the iteration, from its
    start less pauses on), lengths, times blocked, bytes, and the shortest length. ``groups``: only these.
    ``blocked_throughout``: the rank was blocked from start to end of each, whatever was recorded.
    """

@final
class Pending:
    """The records of one rank that are not cut into iterations yet, in order of tickets."""

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def add(self, started: Packed, finished: Packed) -> bool:
        """Take a batch; False: the oldest half of all was dropped, because nothing was cut for too long."""

    def rows(self) -> bytearray: ...
    def begun_before(self, time_ns: int) -> bytearray: ...
    def repeating_from(self, ticket: int) -> bytearray:
        """The records with a place in the sequence that repeats (`symbols`), from this ticket on."""

    def phases_since(self, time_ns: int) -> list[int]:
        """The codes of phases that began at ``time_ns`` or later."""

    def drop_before(self, time_ns: int) -> None:
        """Drop records that ended before ``time_ns``."""
