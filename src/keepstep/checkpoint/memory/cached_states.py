"""The sealed states of a node's ranks, for who brings them elsewhere: found, pinned by a lock, read in place."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from keepstep.checkpoint import native
from keepstep.checkpoint.header import StateHeader
from keepstep.checkpoint.memory.cache_server import Answer, GiveUp, Open, Reserve, ask
from keepstep.checkpoint.memory.incoming import Incoming, Room
from keepstep.checkpoint.memory.slot import SLOTS_PER_RANK, Board, Slot
from keepstep.checkpoint.memory.slots import Key, Record, free_slots, read_header, slot_bytes
from keepstep.checkpoint.storage.manifest import key_text
from keepstep.checkpoint.storage.persist import Persister
from keepstep.core.errors import CheckpointError


class CachedStates:
    """The slots of a node's ranks, and of the backups that are read or filled here, mapped once for a process.

    A pinned state is not overwritten by its worker: a rank with a pinned slot needs one slot more than the two that
    take turns.
    """

    def __init__(self, address: str, ranks: Collection[int]) -> None:
        self._address, self._ranks = address, tuple(ranks)
        self._board: Board | None = None
        self._slots: dict[int, list[Slot]] = {}  # by owner: a rank, or the backup of one
        self._locked: dict[tuple[int, int], Key] = {}  # by owner and slot
        self._reading: Counter[Slot] = Counter()
        self._pinned: frozenset[Key] = frozenset()
        self._filling: set[int] = set()  # owners
        self._told: set[tuple[Key, int]] = set()
        self._guard = threading.RLock()  # of the agent's threads

    @property
    def board(self) -> Board:
        """The node's. Raises CheckpointError: the cache does not answer."""
        with self._guard:
            if self._board is None:
                self._open(self._ranks[0])
            assert self._board
            return self._board

    def held(self, owner: int) -> frozenset[Key]:
        """What an owner has sealed. Raises CheckpointError: the cache does not answer."""
        with self._guard:
            return self.board.held(owner)

    def changes(self) -> tuple[list[tuple[Key, int]], list[tuple[Key, int]]]:
        """(key, rank) of what was sealed, and of what was overwritten, since the last call."""
        now = {(key, rank) for rank in self._ranks for key in self.held(rank)}
        sealed, gone = sorted(now - self._told), sorted(self._told - now)
        self._told = now
        return sealed, gone

    def wished(self) -> dict[Key, set[int]]:
        """What is to be brought to storage, as the slots say: by key, the ranks that have it sealed."""
        found: dict[Key, set[int]] = {}
        with self._guard:
            for rank in self._ranks:
                held = self.held(rank)
                records = [slot.record() for slot in self._slots.get(rank, ())]
                if not held <= {record.key for record in records if record}:
                    self._open(rank)  # slots that grew are others
                for key in (slot.wanted() for slot in self._slots.get(rank, ())):
                    if key is not None and key in held:
                        found.setdefault(key, set()).add(rank)
        return found

    def alike(self) -> tuple[int, frozenset[Key]] | None:
        """A rank of this node, and what it holds that is the same on all ranks of the job; None: nothing is."""
        with self._guard:
            for rank in self._ranks:
                held = self.held(rank)
                if held and not held <= {
                    record.key for slot in self._slots.get(rank, ()) if (record := slot.record())
                }:
                    self._open(rank)
                keys = {key for slot in self._slots.get(rank, ()) if (key := slot.alike())} & held
                if keys:
                    return rank, frozenset(keys)
        return None

    def release(self, key: Key) -> None:
        """It is on storage: its slots may be overwritten."""
        with self._guard:
            for slot in (slot for slots in self._slots.values() for slot in slots):
                if slot.wanted() == key:
                    slot.want(None)

    def drop(self, key: Key, rank: int) -> bool:
        """Forget a state that is damaged; False: it is not there, or somebody reads it now."""
        with self._guard:
            for index, slot in enumerate(self._slots.get(rank, ())):
                record = slot.record()
                if record is None or record.key != key or self._reading[slot] or not slot.lock():
                    continue
                self.board.put(rank, index, None)
                slot.clear()
                slot.unlock()
                self._locked.pop((rank, index), None)
                return True
        return False

    @contextmanager
    def filling(
        self, owner: int, slots: int, needed: Callable[[], Collection[Key | None]] | None = None
    ) -> Generator[Room]:
        """What gives the room for a state of an owner that comes from elsewhere; one at a time for each.

        Args:
            owner: a rank, or the backup of one.
            slots: that it is to have. When all of them hold something, a rank gets one more.
            needed: of a backup: what it must not lose; the oldest of the others makes way.

        Raises:
            CheckpointError: another is being filled.
        """
        with self._guard:
            if owner in self._filling:
                raise CheckpointError("another state of this rank is being brought")
            self._filling.add(owner)
        try:
            with ExitStack() as stack:
                yield partial(self._room, owner, slots, needed, stack)
        finally:
            with self._guard:
                self._filling.discard(owner)

    def _room(
        self,
        owner: int,
        slots: int,
        needed: Callable[[], Collection[Key | None]] | None,
        stack: ExitStack,
        record: Record,
    ) -> Incoming:
        nbytes = slot_bytes(record, spare=needed is None)
        with self._guard:
            self._open(owner)
            there = self._slots[owner]
            free = list(self._free(owner, needed() if needed else None))
            if not free and needed and len(there) >= slots:
                raise CheckpointError(f"all {slots} slots of the backup are needed or being read")
            fitting = [i for i in free if there[i].nbytes >= nbytes and there[i].record() is None]
            index = [*fitting, *free, len(there)][0]
            if not free or there[index].nbytes < nbytes:
                if free:
                    self.board.put(owner, index, None)
                keep = tuple(i for i in range(len(there)) if i != index)
                self._open(owner, Reserve(owner, nbytes, max(slots, len(keep) + 1), keep))
            # A lock of its own: who reads it from here when it is sealed takes another.
            slot = Slot(os.dup(self._slots[owner][index].fileno()), apart=True)
            stack.callback(slot.close)
            return Incoming(slot, self.board, owner, index, record)

    def _free(self, owner: int, needed: Collection[Key | None] | None) -> Iterator[int]:
        """Slots that may be overwritten now, the best first."""
        slots = self._slots[owner]
        for index in free_slots(
            [record.key if (record := slot.record()) else None for slot in slots], needed
        ):
            if not self._reading[slots[index]] and slots[index].lock():
                slots[index].unlock()
                self._locked.pop((owner, index), None)  # of what it held before
                yield index

    def pin(self, keys: Collection[Key]) -> None:
        """Keep these, and no others, from being overwritten: every rank's slot that holds one of them now."""
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

    def give_up(self, owner: int) -> None:
        """Have the cache take back the slots of a backup."""
        with self._guard:
            for index in range(SLOTS_PER_RANK):
                self.board.put(owner, index, None)
            self._close(owner)
            ask(self._address, GiveUp(owner)).close()

    def close(self) -> None:
        """Let go of everything."""
        with self._guard:
            for owner in list(self._slots):
                self._close(owner)
            if self._board and not self._filling:
                self._board.close()
                self._board = None

    def _lock(self, rank: int, key: Key) -> int | None:
        """The slot that holds the key, locked; None without one."""
        for fresh in (False, True):
            if fresh:
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

    def _open(self, owner: int, request: Reserve | None = None) -> None:
        board, fresh = _mapped(ask(self._address, request or Open(owner)))
        if self._board is None:
            self._board = board
        else:
            board.close()
        old, slots = self._slots.setdefault(owner, []), list[Slot]()
        for index, slot in enumerate(fresh):
            if index < len(old) and os.path.sameopenfile(old[index].fileno(), slot.fileno()):
                slot.close()
                slots.append(old[index])
                continue
            slots.append(slot)
            if index < len(old):
                self._let_go(owner, index)
        for index in range(len(slots), len(old)):
            self._let_go(owner, index)
        self._slots[owner] = slots

    def _let_go(self, rank: int, index: int) -> None:
        """Of a slot that is another one now; who reads it still closes it."""
        self._locked.pop((rank, index), None)
        slot = self._slots[rank][index]
        if not self._reading[slot]:
            slot.close()

    def _close(self, owner: int) -> None:
        for index in range(len(self._slots.get(owner, ()))):
            self._let_go(owner, index)
        self._slots.pop(owner, None)


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
