"""A slot that is filled from another node or from storage: it counts only once every byte of it was verified."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from keepstep.checkpoint import native
from keepstep.checkpoint.header import StateHeader
from keepstep.checkpoint.memory.slot import Board, Slot
from keepstep.checkpoint.memory.slots import (
    Key,
    Record,
    damaged_storages,
    read_header,
    slot_bytes,
    write_record,
)
from keepstep.core.errors import CheckpointError


class Incoming:
    """A snapshot on its way into the slot ``index`` of an owner of the cache; a context manager.

    The slot is locked and holds nothing until `seal`, also when the process dies before.
    """

    def __init__(self, slot: Slot, board: Board, owner: int, index: int, record: Record) -> None:
        """Locks and clears the slot. Raises CheckpointError when it is locked already, or too small."""
        self.record = record
        self.alike = False
        """Whether all ranks of the job have saved the same bytes under this key."""
        self._slot, self._board, self._owner, self._index = slot, board, owner, index
        needed = slot_bytes(record)
        if needed > slot.nbytes:
            raise CheckpointError(f"a slot of {slot.nbytes} bytes for a snapshot of {needed}")
        if not slot.lock():
            raise CheckpointError(f"the slot {index} for it is being read or written")
        board.put(owner, index, None)
        slot.clear()
        self.body = memoryview(slot.memory)[native.DATA_OFFSET : needed]
        """The part of the slot for storages, header and table of checksums, to be written before `seal`."""

    def seal(self, *, threads: int = 1) -> StateHeader:
        """Write the commit record, unless a byte is damaged or not what was announced (CheckpointError)."""
        with memoryview(self._slot.memory) as view:
            header = read_header(view, self.record)
            damaged = damaged_storages(view, header, threads)
            if damaged:
                raise CheckpointError(f"{len(damaged)} of {self.record.storages} storages came damaged")
            if self.alike:
                self._slot.say_alike(self.record.key)
            write_record(view, self.record)
        self._board.put(self._owner, self._index, self.record.key)
        return header

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *_: object) -> None:
        self.body.release()
        self._slot.unlock()


Room = Callable[[Record], AbstractContextManager[Incoming]]
"""Gives a slot for a snapshot with this record. Raises CheckpointError when there is no memory for it."""


class StateSource(Protocol):
    """A place from which a rank's state can be brought when its node's cache lacks it.

    Calls block, so they are not for an event loop, but not for ever: a source that hangs is out of reach.
    """

    where: str
    """The name of the source for messages: "the other nodes", "storage /ckpt"."""

    def keys(self, rank: int) -> frozenset[Key]:
        """What the source has of a rank, unread. Raises CheckpointError when the source is out of reach."""
        ...

    def bring(self, key: Key, rank: int, room: Room) -> str:
        """Bring a rank's snapshot into the slot that ``room`` gives, and seal it. Returns where it came from.

        Raises:
            CheckpointError: it is not there, not whole, or of another rank; the message names the file or node.
        """
        ...
