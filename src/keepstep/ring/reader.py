"""Reads a ring: live, while its process writes it, or after its death, or from a saved copy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from keepstep.core.own_folders import write_whole
from keepstep.core.summary import GroupInfo
from keepstep.ring.native import Reader

RECORD = np.dtype([
    ("ticket", "u8"), ("start_ns", "i8"), ("end_ns", "i8"), ("wait_ns", "i8"), ("bytes", "u8"),
    ("seq", "u4"), ("peer", "i4"), ("thread", "u4"), ("site", "u4"),
    ("group", "i2"), ("kind", "u1"), ("op", "u1"), ("flags", "u2"),
], align=True)  # fmt: skip
"""One operation or phase. ``end_ns`` 0: in flight; ``wait_ns`` 0: no wait seen; times on the node's CLOCK_MONOTONIC."""

STREAM = np.dtype([
    ("started", "u8"), ("completed", "u8"), ("last_start_ns", "i8"), ("last_end_ns", "i8"),
    ("peer", "i4"), ("group", "i2"), ("kind", "u1"), ("op", "u1"),
], align=True)  # fmt: skip
"""One (group, peer, direction): operations started (= last ``seq``) and completed; ``op`` of the last one started."""

RETIRED = GroupInfo("?", (), "", "")
"""Stands for a process group that is gone, and whose place in the ring's table another one has."""

Rows = npt.NDArray[np.void]

_NO_RECORDS: Rows = np.empty(0, RECORD)


class RingHeader(NamedTuple):
    """Who writes the ring, and how much. An unclaimed ring has rank -1 and pid 0."""

    rank: int
    world_size: int
    pid: int
    incarnation: int
    monotonic_ns: int  # CLOCK_MONOTONIC when the ring was claimed
    realtime_ns: int  # CLOCK_REALTIME, read together with it
    records: int  # number of slots for records
    closed: bool  # whether the writer ended orderly
    dropped: int  # records that found no slot
    written: int  # tickets given out so far, those of dropped records included
    late: int = 0  # operations that ended when their record was already overwritten
    overflowed: int = 0  # groups, sites and streams that found no room in their tables
    first_step: int = 0  # step number of this claim's first iteration in the training

    def unix_s(self, monotonic_s: float) -> float:
        """Unix time of a moment on CLOCK_MONOTONIC, by the clock as it was set when the ring was claimed."""
        return self.realtime_ns * 1e-9 + (monotonic_s - self.monotonic_ns * 1e-9)


class Batch(NamedTuple):
    """The records that came since the last poll. One that began and ended in between is in both arrays."""

    started: Rows  # RECORD, shape (n,)
    finished: Rows  # RECORD, shape (m,); ``end_ns`` is set
    lost: int  # records that this reader never got: overwritten, dropped, or left half written
    unfinished: int = 0  # records once in ``started`` that were overwritten before their end was seen


class RingReader:
    """Reads one ring from a path or descriptor. Any number of readers may read the same ring, each at its own pace.

    Raises RingError (what is wrong, and where) when it is no ring, cut short, torn or of another version. Reading
    begins with the oldest record still there.
    """

    def __init__(self, where: str | os.PathLike[str] | int) -> None:
        self._native = Reader(where)

    @property
    def header(self) -> RingHeader:
        """The header as it is now."""
        return RingHeader._make(self._native.header())

    def writer_lives(self) -> bool:
        """Whether the process that claimed the ring still runs; False for a saved copy."""
        return self._native.writer_lives()

    def poll(self) -> Batch:
        """The records that are new since the last call.

        Each record comes once in ``started`` and, when it has ended, once in ``finished``. Costs time in proportion to
        what is new. Records come in ticket order, except those that a slow thread was still writing at the last poll.
        """
        return self.poll_apart(0, 0)[0]

    def poll_apart(self, apart: int, kept: int) -> tuple[Batch, Rows]:
        """As `poll`, without the records that have one of the flags of ``apart``.

        Also returns those of them that have ended with a flag of ``kept`` (RECORD).
        """
        started, finished, lost, unfinished, others = self._native.poll(apart, kept)
        return Batch(_records(started), _records(finished), lost, unfinished), _records(others)

    def snapshot(self) -> Rows:
        """All valid records now, in ticket order (RECORD)."""
        return _records(self._native.snapshot(False))

    def in_flight(self) -> Rows:
        """The records of ``snapshot`` that have no end (RECORD)."""
        return _records(self._native.snapshot(True))

    def streams(self) -> Rows:
        """One row per (group, peer, direction) that was used (STREAM)."""
        return np.frombuffer(self._native.streams(), STREAM)

    def groups(self) -> list[GroupInfo]:
        """The process groups; the index is the ``group`` of a record. Of some retired ones only `RETIRED` is left."""
        return [RETIRED if group is None else GroupInfo(*group) for group in self._native.groups()]

    def sites(self) -> list[str]:
        """The call sites; the index is the ``site`` of a record, 0 is the unknown one."""
        return self._native.sites()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ring as it is now to a file that RingReader opens; the file appears whole or not at all."""
        write_whole(Path(path), self._native.content())


def _records(packed: bytearray | None) -> np.ndarray[Any, np.dtype[np.void]]:
    return np.frombuffer(packed, RECORD) if packed else _NO_RECORDS
