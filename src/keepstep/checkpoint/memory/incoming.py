"""A slot filled from elsewhere, from a neighbour or from storage: it counts only once every byte of it was verified."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
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
    """What will stand in the slot ``index`` of an owner of the cache, as ``record`` says; a context.

    The slot is locked and says nothing until `seal`; a process that dies in between leaves it so.
    """

    def __init__(self, slot: Slot, board: Board, owner: int, index: int, record: Record) -> None:
        """Takes the slot and forgets what it held. Raises `CheckpointError`: it is taken, or too small."""
        self.record = record
        self.alike = False
        """All ranks of the job have sealed the very same."""
        self._slot, self._board, self._owner, self._index = slot, board, owner, index
        needed = slot_bytes(record)
        if needed > slot.nbytes:
            raise CheckpointError(f"a slot of {slot.nbytes} bytes for a snapshot of {needed}")
        if not slot.lock():
            raise CheckpointError(f"the slot {index} for it is being read or written")
        board.put(owner, index, None)
        slot.clear()
        self.body = memoryview(slot.memory)[native.DATA_OFFSET : needed]
        """Storages, header and table of checksums, to be written here as they stand in any slot."""

    def seal(self, *, threads: int = 1) -> StateHeader:
        """Verify every byte and have the slot count. Raises `CheckpointError`: not what was announced, or damaged."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.body.release()
        self._slot.unlock()


Room = Callable[[Record], Incoming]
"""Gives the slot for a snapshot that was found. Raises `CheckpointError`: there is no memory for it."""


class StateSource(Protocol):
    """Where the state of a rank can be had from when its node's cache lacks it.

    Calls block, so not from an event loop, but not for ever: a source that hangs is out of reach.
    """

    @property
    def where(self) -> str:
        """As people read it: "the other nodes", "storage /ckpt"."""
        ...

    def keys(self, rank: int) -> frozenset[Key]:
        """What is there for a rank, as far as can be told without reading it all.

        Raises:
            CheckpointError: it is out of reach.
        """
        ...

    def bring(self, key: Key, rank: int, room: Room) -> str:
        """Have a rank's snapshot sealed in the slot that ``room`` gives; where it came from, e.g. a node.

        Raises:
            CheckpointError: it is not there, not whole, or of another rank; says which file or node.
        """
        ...
