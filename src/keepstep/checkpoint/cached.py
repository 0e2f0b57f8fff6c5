"""The sealed states of a node's ranks, for who brings them elsewhere: found, pinned by a lock, read in place."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection, Generator
from contextlib import ExitStack, contextmanager
from functools import partial

from keepstep.checkpoint import _native as native  # pyright: ignore[reportMissingModuleSource]
from keepstep.checkpoint.cache import SPARE_HEADER_BYTES, Answer, Board, Open, Reserve, Slot, ask
from keepstep.checkpoint.header import StateHeader
from keepstep.checkpoint.incoming import Incoming, Room
from keepstep.checkpoint.manifest import key_text
from keepstep.checkpoint.persist import Persister
from keepstep.checkpoint.slots import Key, Record, read_header
from keepstep.core.errors import CheckpointError


class CachedStates:
    """The slots of a node's ranks, mapped for reading; several of a process do not disturb each other.

    A pinned state is not overwritten by its worker: a rank with a pinned slot needs one slot more than the two that
    take turns.
    """

    def __init__(self, address: str, ranks: Collection[int]) -> None:
        self._address = address
        self._slots: dict[int, list[Slot]] = {rank: [] for rank in ranks}
        self._locked: dict[tuple[int, int], Key] = {}  # by rank and slot
        self._boards: dict[int, Board] = {}
        self._reading: Counter[Slot] = Counter()
        self._pinned: frozenset[Key] = frozenset()
        self._filling: set[int] = (
            set()
        )  # ranks: to open their slots anew would end the lock on what is filled
        self._told: set[tuple[Key, int]] = set()
        self._guard = threading.RLock()  # the persister's thread reads while the agent's looks around

    def held(self, rank: int) -> frozenset[Key]:
        """What the rank has sealed. Raises CheckpointError: the cache does not answer."""
        with self._guard:
            if rank not in self._boards:
                self._open(rank)
            return self._boards[rank].held(rank)

    def changes(self) -> tuple[list[tuple[Key, int]], list[tuple[Key, int]]]:
        """(key, rank) of what was sealed, and of what was overwritten, since the last call."""
        now = {(key, rank) for rank in self._slots for key in self.held(rank)}
        sealed, gone = sorted(now - self._told), sorted(self._told - now)
        self._told = now
        return sealed, gone

    def wished(self) -> dict[Key, set[int]]:
        """What is to be brought to storage, as the slots say: by key, the ranks that have it sealed."""
        found: dict[Key, set[int]] = {}
        with self._guard:
            for rank in self._slots:
                held = self.held(rank)
                records = [slot.record() for slot in self._slots[rank]]
                if not held <= {record.key for record in records if record} and rank not in self._filling:
                    self._open(rank)  # slots that grew are others
                for key in (slot.wanted() for slot in self._slots[rank]):
                    if key is not None and key in held:
                        found.setdefault(key, set()).add(rank)
        return found

    def release(self, key: Key) -> None:
        """It is on storage: its slots may be overwritten."""
        with self._guard:
            for slot in (slot for slots in self._slots.values() for slot in slots):
                if slot.wanted() == key:
                    slot.want(None)

    def drop(self, key: Key, rank: int) -> bool:
        """Forget a state that is damaged; False: it is not there, or somebody reads it now."""
        with self._guard:
            for index, slot in enumerate(self._slots[rank]):
                record = slot.record()
                if record is None or record.key != key or self._reading[slot] or not slot.lock():
                    continue
                self._boards[rank].put(rank, index, None)
                slot.clear()
                slot.unlock()
                self._locked.pop((rank, index), None)
                return True
        return False

    @contextmanager
    def filling(self, rank: int, slots: int) -> Generator[Room]:
        """What gives the room for a state of the rank that comes from elsewhere; one at a time.

        It is an empty slot that is large enough. Without one the rank gets it, of ``slots`` in all or, when they all
        hold something, of one more. Raises CheckpointError: another is being filled.
        """
        with self._guard:
            if rank in self._filling:
                raise CheckpointError(f"another state of rank {rank} is being brought")
            self._open(rank)
            self._filling.add(rank)
        try:
            yield partial(self._room, rank, slots)
        finally:
            with self._guard:
                self._filling.discard(rank)

    def _room(self, rank: int, slots: int, record: Record) -> Incoming:
        spare = max(SPARE_HEADER_BYTES, record.header_bytes // 4)
        nbytes = native.slot_bytes(record.data_bytes, record.header_bytes + spare, record.storages)
        with self._guard:
            empty: list[int] = []
            for index, slot in enumerate(self._slots[rank]):
                if slot.record() is None and slot.lock():
                    slot.unlock()
                    empty.append(index)
            if not any(self._slots[rank][index].nbytes >= nbytes for index in empty):
                keep = tuple(i for i in range(len(self._slots[rank])) if i not in empty)
                answer = ask(self._address, Reserve(rank, nbytes, max(slots, len(keep) + 1), keep))
                Board(answer.board).close()
                for descriptor in answer.slots:
                    os.close(descriptor)
                self._open(rank)
            for index, slot in enumerate(self._slots[rank]):
                if slot.record() is None and slot.nbytes >= nbytes and slot.lock():
                    return Incoming(slot, self._boards[rank], rank, index, record)
        raise CheckpointError(f"rank {rank} has no free slot")

    def pin(self, keys: Collection[Key]) -> None:
        """Keep these, and no others, from being overwritten: every rank's slot that holds one of them now."""
        with self._guard:
            for (rank, index), key in list(self._locked.items()):
                slot = self._slots[rank][index]
                if key not in keys and not self._reading[slot]:
                    slot.unlock()
                    del self._locked[rank, index]
            self._pinned = frozenset(keys)
            for rank in self._slots:
                for key in self.held(rank) & self._pinned:
                    self._lock(rank, key)

    @contextmanager
    def reading(self, key: Key, rank: int) -> Generator[tuple[Slot, Record]]:
        """The slot of a state and its record, pinned while the context is open.

        Raises:
            CheckpointError: the cache does not hold it any more.
        """
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
                    slot.close()  # its place has another by now

    @contextmanager
    def source(self, key: Key, rank: int) -> Generator[tuple[StateHeader, memoryview]]:
        """Header and bytes of a state, pinned while the context is open.

        Raises:
            CheckpointError: the cache does not hold it any more, or its header is damaged.
        """
        with self.reading(key, rank) as (slot, record), memoryview(slot.memory) as view:
            header = read_header(view, record)
            with view[native.DATA_OFFSET : native.DATA_OFFSET + header.data_bytes] as data:
                yield header, data

    def forget(self, rank: int) -> None:
        """Let go of a rank's slots."""
        with self._guard:
            if rank in self._slots:
                self._close(rank)
                del self._slots[rank]

    def close(self) -> None:
        """Let go of everything."""
        with self._guard:
            for rank in self._slots:
                self._close(rank)

    def _lock(self, rank: int, key: Key) -> int | None:
        """The slot that holds the key, locked; None without one."""
        for fresh in (False, True):
            if fresh:
                if rank in self._filling:
                    return None
                self._open(rank)  # slots that grew are others
            for index, slot in enumerate(self._slots.get(rank, ())):
                record = slot.record()
                if record is None or record.key != key:
                    continue
                # What waits for storage nobody overwrites; its worker may hold the lock until its next step.
                if (rank, index) in self._locked or slot.wanted() == key or slot.lock(shared=True):
                    record = slot.record()
                    if record and record.key == key:
                        self._locked[rank, index] = key
                        return index
                    slot.unlock()
        return None

    def _open(self, rank: int) -> None:
        answer = ask(self._address, Open(rank))
        board, fresh = _mapped(answer)
        if rank in self._boards:
            self._boards.pop(rank).close()
        self._boards[rank] = board
        old, slots = self._slots.setdefault(rank, []), list[Slot]()
        for index, slot in enumerate(fresh):
            if index < len(old) and os.path.sameopenfile(old[index].fileno(), slot.fileno()):
                slot.close()
                slots.append(old[index])
                continue
            slots.append(slot)
            if index < len(old):
                self._let_go(rank, index)
        for index in range(len(slots), len(old)):
            self._let_go(rank, index)
        self._slots[rank] = slots

    def _let_go(self, rank: int, index: int) -> None:
        """Of a slot that is another one now; who reads it still closes it."""
        self._locked.pop((rank, index), None)
        slot = self._slots[rank][index]
        if not self._reading[slot]:
            slot.close()

    def _close(self, rank: int) -> None:
        for index in range(len(self._slots[rank])):
            self._let_go(rank, index)
        self._slots[rank] = []
        if rank in self._boards:
            self._boards.pop(rank).close()


def _mapped(answer: Answer) -> tuple[Board, list[Slot]]:
    """All of an answer, or nothing: when memory or files run short, what was opened is closed."""
    left = [answer.board, *answer.slots]
    with ExitStack() as stack:
        try:
            board = Board(left.pop(0))
            stack.callback(board.close)
            slots: list[Slot] = []
            while left:
                slots.append(Slot(left[0], apart=True))
                stack.callback(slots[-1].close)
                del left[0]
        except BaseException:
            for descriptor in left:
                os.close(descriptor)
            raise
        stack.pop_all()
    return board, slots


def follow(states: CachedStates, persister: Persister) -> None:
    """Tell the persister what was sealed and overwritten since the last call, and pin what it needs."""
    sealed, gone = states.changes()
    for key, rank in sealed:
        persister.sealed(key, rank)
    for key, rank in gone:
        persister.evicted(key, rank)
    states.pin(persister.pinned)
