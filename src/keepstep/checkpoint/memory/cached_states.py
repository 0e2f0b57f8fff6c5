"""The cache as the agent sees it: states of the node's ranks are found, pinned by a lock, and read in place."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager

from keepstep.checkpoint import native
from keepstep.checkpoint.header import StateHeader
from keepstep.checkpoint.memory.cache_server import GiveUp, Open, Reserve, ask
from keepstep.checkpoint.memory.incoming import Incoming
from keepstep.checkpoint.memory.slot import SLOTS_PER_RANK, Board, Slot, map_slots
from keepstep.checkpoint.memory.slots import (
    Key,
    Record,
    free_slots,
    read_header,
    read_record,
    sealed_header,
    slot_bytes,
)
from keepstep.checkpoint.storage.manifest import key_text
from keepstep.core.errors import CheckpointError


class CachedStates:
    """The slots of a node's ranks, and of the backups that are read or filled here, mapped once for a process.

    A worker does not overwrite a pinned state, so a rank with one needs a slot more than the two that take turns.
    """

    def __init__(self, address: str, ranks: Collection[int]) -> None:
        self._address, self._ranks = address, tuple(ranks)
        self._board: Board | None = None
        self._slots: dict[int, list[Slot]] = {}  # by owner, which is a rank or the backup of one
        self._locked: dict[tuple[int, int], Key] = {}  # by owner and index of the slot
        self._reading: Counter[Slot] = Counter()
        self._pinned: frozenset[Key] = frozenset()
        self._filling: set[int] = set()  # ranks whose slots are being filled
        self._guard = threading.RLock()  # several threads of the agent use this object

    @property
    def board(self) -> Board:
        """The node's board. Raises CheckpointError when the cache does not answer."""
        with self._guard:
            if self._board is None:
                self._open(self._ranks[0])
            assert self._board
            return self._board

    def held(self, owner: int) -> frozenset[Key]:
        """The keys that an owner has sealed. Raises CheckpointError when the cache does not answer."""
        with self._guard:
            return self.board.held(owner)

    def sealed(self) -> list[tuple[Key, int]]:
        """(key, rank) of each state that a rank of the node has sealed."""
        return [(key, rank) for rank in self._ranks for key in self.held(rank)]

    def wished(self) -> dict[Key, set[int]]:
        """For each step that is to be brought to storage, the ranks that have sealed it."""
        found: dict[Key, set[int]] = {}
        with self._guard:
            for rank in self._ranks:
                for key in self._marked(rank, Slot.wanted):
                    found.setdefault(key, set()).add(rank)
        return found

    def alike(self) -> tuple[int, frozenset[Key]] | None:
        """A rank of this node, and the keys that it has in common with all ranks of the job; None without any."""
        with self._guard:
            for rank in self._ranks:
                if keys := self._marked(rank, Slot.alike):
                    return rank, keys
        return None

    def _marked(self, rank: int, mark: Callable[[Slot], Key | None]) -> frozenset[Key]:
        """The keys of a rank's sealed slots for which ``mark`` gives the key."""
        held = self.held(rank)
        if not held <= {slot.key() for slot in self._slots.get(rank, ())}:
            self._open(rank)  # a slot that grew was replaced by another
        return frozenset(filter(None, map(mark, self._slots.get(rank, ())))) & held

    def release(self, key: Key) -> None:
        """Let the slots of a step be overwritten, because it is on storage."""
        with self._guard:
            for slot in (slot for slots in self._slots.values() for slot in slots):
                if slot.wanted() == key:
                    slot.want(None)

    def drop(self, key: Key, rank: int) -> bool:
        """Forget a state that is damaged. Returns False when it is not there, or somebody reads it now."""
        with self._guard:
            for index, slot in enumerate(self._slots.get(rank, ())):
                if slot.key() != key or self._reading[slot] or not slot.lock():
                    continue
                self.board.put(rank, index, None)
                slot.clear()
                slot.unlock()
                self._locked.pop((rank, index), None)
                return True
        return False

    @contextmanager
    def filling(
        self, owner: int, slots: int, record: Record, needed: Collection[Key | None] | None = None
    ) -> Generator[Incoming]:
        """Opens a slot for a state of an owner that comes from elsewhere; one at a time for each owner.

        Args:
            owner: a rank, or the backup of one.
            slots: how many slots the owner is to have. When all of them hold something, a rank gets one more.
            record: record of the state.
            needed: for a backup: the keys that must not be lost; the oldest of the others is overwritten.

        Raises:
            CheckpointError: another state of this owner is being filled, or there is no memory for it.
        """
        with self._guard:
            if owner in self._filling:
                raise CheckpointError("another state of this rank is being brought")
            self._filling.add(owner)
        try:
            with ExitStack() as stack:
                with self._guard:
                    index = self._make_way(owner, slots, slot_bytes(record, spare=needed is None), needed)
                    # Mapped again for a lock of its own: readers in this process lock another map of it.
                    slot = Slot(os.dup(self._slots[owner][index].fileno()), apart=True)
                    stack.callback(slot.close)
                    incoming = stack.enter_context(Incoming(slot, self.board, owner, index, record))
                yield incoming
        finally:
            with self._guard:
                self._filling.discard(owner)

    def _make_way(self, owner: int, slots: int, nbytes: int, needed: Collection[Key | None] | None) -> int:
        """The index of a slot of ``nbytes`` that may be overwritten."""
        self._open(owner)
        there = self._slots[owner]
        free: list[int] = []
        for index in free_slots([slot.key() for slot in there], needed):
            if not self._reading[there[index]] and there[index].lock():
                there[index].unlock()
                self._locked.pop((owner, index), None)  # the lock on the slot's previous state
                free.append(index)
        if not free and needed is not None and len(there) >= slots:
            raise CheckpointError(f"all {slots} slots of the backup are needed or being read")
        fitting = [i for i in free if there[i].nbytes >= nbytes and there[i].record() is None]
        index = [*fitting, *free, len(there)][0]
        if not free or there[index].nbytes < nbytes:
            if free:
                self.board.put(owner, index, None)
            keep = tuple(i for i in range(len(there)) if i != index)
            self._open(owner, Reserve(owner, nbytes, max(slots, len(keep) + 1), keep))
        return index

    def pin(self, keys: Collection[Key]) -> None:
        """Keep the slots of all ranks that hold one of ``keys`` from being overwritten, and no other slots."""
        with self._guard:
            for (rank, index), key in list(self._locked.items()):
                slot = self._slots[rank][index]
                if key not in keys and not self._reading[slot]:
                    slot.unlock()
                    del self._locked[rank, index]
            self._pinned = frozenset(keys)
            for rank in self._ranks:
                for key in self.held(rank) & self._pinned:
                    self._lock(rank, key)

    @contextmanager
    def reading(self, key: Key, rank: int) -> Generator[tuple[Slot, Record]]:
        """Opens a state, pinned meanwhile: slot and record. CheckpointError: it is not there any more."""
        with self._guard:
            index = self._lock(rank, key)
            record = self._slots[rank][index].record() if index is not None else None
            if index is None or record is None or record.key != key:
                raise CheckpointError(f"{key_text(key)} of rank {rank} is not in the cache any more")
            slot = self._slots[rank][index]
            self._reading[slot] += 1
        try:
            yield slot, record
        finally:
            with self._guard:
                self._reading[slot] -= 1
                still_read = self._reading[slot]
                if not still_read:
                    del self._reading[slot]
                if slot in self._slots.get(rank, ()):
                    self.pin(self._pinned)
                elif not still_read:
                    slot.close()  # the slot was replaced while it was read

    @contextmanager
    def source(self, key: Key, rank: int) -> Generator[tuple[StateHeader, memoryview]]:
        """Opens a state, pinned meanwhile: header and bytes. CheckpointError: not there, header damaged."""
        with self.reading(key, rank) as (slot, record), memoryview(slot.memory) as view:
            header = read_header(view, record)
            with view[native.DATA_OFFSET : native.DATA_OFFSET + header.data_bytes] as data:
                yield header, data

    def glance(self, key: Key, rank: int) -> tuple[bytes, bytes] | None:
        """A state's header and its table of checksums, as they are in the slot; None when it is not there, or damaged.

        Nothing is locked, so no worker finds its slot taken because of it.
        """
        with self._guard, self._unlocked(key, rank) as found:
            return sealed_header(*found) if found else None

    def peek(self, key: Key, rank: int, pieces: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """Some bytes of a state, as (offset in its data, how many); None when it is not there. Nothing is locked."""
        with self._guard, self._unlocked(key, rank) as found:
            if not found:
                return None
            begin = native.DATA_OFFSET
            data = [bytes(found[0][begin + at : begin + at + nbytes]) for at, nbytes in pieces]
            record = read_record(found[0])
            return data if record and record.key == key else None

    @contextmanager
    def _unlocked(self, key: Key, rank: int) -> Generator[tuple[memoryview, Record] | None]:
        if key in self.held(rank):
            if all(slot.key() != key for slot in self._slots.get(rank, ())):
                self._open(rank)  # a slot that grew was replaced by another
            for slot in self._slots[rank]:
                record = slot.record()
                if record is not None and record.key == key:
                    with memoryview(slot.memory) as view:
                        yield view, record
                    return
        yield None

    def give_up(self, owner: int) -> None:
        """Give the slots of a backup back to the cache."""
        with self._guard:
            for index in range(SLOTS_PER_RANK):
                self.board.put(owner, index, None)
            self._close(owner)
            ask(self._address, GiveUp(owner)).close()

    def close(self) -> None:
        """Unmap everything."""
        with self._guard:
            for owner in list(self._slots):
                self._close(owner)
            if self._board and not self._filling:
                self._board.close()
                self._board = None

    def _lock(self, rank: int, key: Key) -> int | None:
        """Keep the snapshot in its slot, whose index is returned; None if it is gone or cannot be kept."""
        for fresh in (False, True):
            if fresh:
                self._open(rank)  # a slot that grew was replaced by another
            for index, slot in enumerate(self._slots.get(rank, ())):
                if slot.key() != key:
                    continue
                # A slot that waits for storage is not overwritten, and its worker may lock it until its next step.
                if (rank, index) in self._locked or slot.wanted() == key or slot.lock(shared=True):
                    if slot.key() == key:
                        self._locked[rank, index] = key
                        return index
                    slot.unlock()
        return None

    def _open(self, owner: int, request: Reserve | None = None) -> None:
        old = self._slots.get(owner, [])
        with closing(ask(self._address, request or Open(owner))) as answer:
            if self._board is None:
                self._board = Board(os.dup(answer.board))
            slots = map_slots(answer.slots, old, apart=True)
        for index, slot in enumerate(old):
            if slot not in slots:
                self._let_go(owner, index)
        self._slots[owner] = slots

    def _let_go(self, rank: int, index: int) -> None:
        """Forget a slot that the cache replaced; if it is being read, the reader closes it."""
        self._locked.pop((rank, index), None)
        slot = self._slots[rank][index]
        if not self._reading[slot]:
            slot.close()

    def _close(self, owner: int) -> None:
        for index in range(len(self._slots.get(owner, ()))):
            self._let_go(owner, index)
        self._slots.pop(owner, None)
