"""The slots of one rank, as its worker sees them: what can be restored from them, and where the next snapshot goes."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from dataclasses import dataclass

from keepstep.checkpoint import native
from keepstep.checkpoint.header import StateHeader
from keepstep.checkpoint.memory.cache_server import Open, Reserve, ask, claim
from keepstep.checkpoint.memory.slot import SLOTS_PER_RANK, Board, map_slots
from keepstep.checkpoint.memory.slots import Key, kept_slots, newest_sound, next_slot, read_header
from keepstep.core.errors import CheckpointError

_DEVICE = re.compile(rb'"cuda:[0-9]+"')
_OWN_END = re.compile(rb',"first":(true|false),"moment":[0-9]+}$')


@dataclass(frozen=True, slots=True)
class Offer:
    """A sealed snapshot in the slot with index ``slot``; its header was verified, its storages were not yet."""

    slot: int
    header: StateHeader


class RankSlots:
    """A rank's slots and the node's board, mapped into memory. The rank has no slots, or at least ``count``."""

    def __init__(self, address: str, rank: int, *, count: int = 2) -> None:
        """Raises CheckpointError when the cache at ``address`` does not answer."""
        self._address, self.rank, self.count = address, rank, count
        with closing(ask(address, Open(rank))) as answer:
            self.board = Board(os.dup(answer.board))
            self.slots = map_slots(answer.slots)
        self.limit_bytes, self._backed = answer.limit_bytes, answer.backed
        self._enlarged = False  # whether a slot more was asked for, to keep a snapshot before a doubted one
        self._populating: threading.Thread | None = None
        self._stopped = threading.Event()

    def claim(self, topic: str) -> bool:
        """Whether nobody of this node has said anything about ``topic`` in this job."""
        return claim(self._address, topic)

    def held(self) -> list[Key | None]:
        """The key of the snapshot in each slot, read from its commit record."""
        return [slot.key() for slot in self.slots]

    def offers(self, world_size: int) -> tuple[dict[Key, Offer], list[str]]:
        """The snapshots that can be restored unless their storages are damaged, and a line about each other one."""
        found: dict[Key, Offer] = {}
        refused: list[str] = []
        for index, slot in enumerate(self.slots):
            record = slot.record()
            if record is None:
                continue
            try:
                with memoryview(slot.memory) as view:
                    header = read_header(view, record)
                own = (header.rank, header.world_size) == (self.rank, world_size)
                if not own and slot.alike() != record.key:
                    raise CheckpointError(f"it is of rank {header.rank} of {header.world_size}")
                found[record.key] = Offer(index, header)
            except CheckpointError as error:
                refused.append(
                    f"the snapshot of rank {self.rank} at step {record.step} is not restored: {error}"
                )
        return found, refused

    def settle(self, key: Key | None, pending: Collection[Key] = (), *, wanted: bool = False) -> None:
        """The job continues from ``key``: forget all other snapshots and update the board.

        Also kept are those of ``pending`` that wait for storage, and an older snapshot that is backed up, because
        ``key`` may be lost with a node until it is backed up itself. ``wanted``: ``key`` is to be brought to storage.
        """
        backed_up, first = self.board.kept()
        if key and not backed_up and not first and self._backed:
            self.board.keep(None, key)  # until the agent sets what is to be kept here
        older = backed_up if backed_up and key and backed_up < key else None
        for slot, held in zip(self.slots, self.held(), strict=True):
            if held is not None and held == key and wanted:
                slot.want(key)
            if held is None or (held not in (key, older) and not (held in pending and slot.wanted())):
                slot.clear()
        for index, held in enumerate(self.held()):
            self.board.put(self.rank, index, held)

    def wanted(self) -> frozenset[Key]:
        """The keys of snapshots that wait for storage."""
        return frozenset(key for key in (slot.wanted() for slot in self.slots) if key)

    def let_go(self, key: Key) -> None:
        """Mark the snapshot ``key`` as not to be brought to storage any more."""
        for slot in self.slots:
            if slot.wanted() == key:
                slot.want(None)

    def drop(self, index: int) -> None:
        """Forget the snapshot in the slot with this index."""
        self.board.put(self.rank, index, None)
        self.slots[index].clear()

    def make_way(self, key: Key, usable: Collection[int]) -> None:
        """Empty a slot for ``key``, to which the ranks go back.

        Snapshots in slots that are not ``usable`` are forgotten, and if no slot is empty then, one newer than ``key``.
        """
        for index, slot in enumerate(self.slots):
            if index not in usable and slot.record() is not None:
                self.drop(index)
        held = self.held()
        if None not in held:
            backed_up, _ = self.board.kept()
            newer = [(one != backed_up, one, index) for index, one in enumerate(held) if one and one > key]
            if newer:  # the snapshot that is backed up is forgotten only if there is no other
                self.drop(max(newer)[2])

    def reopen(self) -> None:
        """Map the slots as the cache has them now, after another process filled one."""
        self._open(Open(self.rank))

    def _open(self, request: Open | Reserve) -> None:
        self.stop_populating()
        with closing(ask(self._address, request)) as answer:
            slots = map_slots(answer.slots, self.slots)
        self.limit_bytes, self._backed = answer.limit_bytes, answer.backed
        for slot in self.slots:
            if slot not in slots:
                slot.close()
        self.slots = slots

    def digest(self, key: Key) -> int:
        """A hash of a snapshot without what its rank knows of itself, to compare ranks; 0 when it is not here."""
        for slot in self.slots:
            record = slot.record()
            if record is None or record.key != key:
                continue
            with memoryview(slot.memory) as view:
                text = bytes(view[record.header_at : record.header_at + record.header_bytes])
                table = bytes(view[record.table_at : record.table_at + 8 * record.storages])
            plain = _DEVICE.sub(b'"cuda"', text[text.index(b',"world_size":') :])
            plain = _OWN_END.sub(b"", plain)
            which = native.checksum(key.pack().to_bytes(8, "little"))
            return native.checksum(table, native.checksum(plain, which)) >> 1 or 1
        return 0

    def say_alike(self, key: Key) -> None:
        """Mark that all ranks of the job have saved the same bytes under ``key``."""
        for slot in self.slots:
            if slot.key() == key:
                slot.say_alike(key)

    def take(
        self, complete: Callable[[], Key | None], dead: Callable[[Key], bool] = lambda _: False
    ) -> int | None:
        """Lock a slot for the next snapshot and clear it on the board; None while no slot may be overwritten.

        ``complete`` gives the newest key that all ranks hold, and ``dead`` tells of a newer one that some rank never
        will; they are called only when no slot is empty.
        """
        if self.board.doubted():
            self._make_room_for_sound()
        keys = self.held()
        waiting = {index for index, slot in enumerate(self.slots) if slot.wanted()}
        busy = kept_slots(keys, *self.board.kept(), waiting, self.board.doubted())
        newest, asked = None, False
        while True:
            index = next_slot(keys, newest, busy)
            if index is None and keys and not asked:
                newest, asked = complete(), True
                gone = {key for key in keys if key and (newest is None or key > newest) and dead(key)}
                keys = [None if key in gone else key for key in keys]
                continue
            if index is None:
                return None
            if self.slots[index].lock():
                self.board.put(self.rank, index, None)
                return index
            busy.add(index)

    def _make_room_for_sound(self) -> None:
        """Get a slot more, once, if that lets the newest snapshot before the doubted one be kept."""
        keys, doubted = self.held(), self.board.doubted()
        without = kept_slots(keys, *self.board.kept())
        if self._enlarged or newest_sound(keys, doubted) is None or len(keys) >= len(without) + 3:
            return
        self._enlarged = True
        if len(self.slots) < SLOTS_PER_RANK:
            nbytes = max(slot.nbytes for slot in self.slots)
            with suppress(CheckpointError):  # Without memory for it, the snapshot is overwritten in its turn.
                self._open(Reserve(self.rank, nbytes, len(keys) + 1, tuple(range(len(keys)))))

    def make_room(self, nbytes: int, index: int | None = None) -> None:
        """Reserve slots of ``nbytes``: all of them when there are none yet, else a larger one in place of ``index``.

        The kernel provides the pages in the background, and ``limit_bytes`` is set to the node's limit for all ranks.
        Raises CheckpointError when the node's limit or memory does not allow it.
        """
        keep = tuple(i for i in range(len(self.slots)) if i != index)
        old = self.slots
        try:
            self._open(Reserve(self.rank, nbytes, max(self.count, len(old)), keep))
        except CheckpointError:
            if index is not None:  # the slot still holds what it held
                self.board.put(self.rank, index, self.slots[index].key())
                self.slots[index].unlock()
            raise
        if index is not None:
            self.slots[index].lock()
        fresh = [slot for slot in self.slots if slot not in old]
        self._stopped.clear()
        self._populating = threading.Thread(
            target=lambda: [slot.populate(self._stopped) for slot in fresh],
            name="keepstep-populate",
            daemon=True,
        )
        self._populating.start()

    def close(self) -> None:
        """Unmap everything; the cache keeps the snapshots."""
        self.stop_populating()
        self.board.close()
        for slot in self.slots:
            slot.close()

    def stop_populating(self) -> None:
        """End the thread that has the kernel provide pages; the first copy makes those that are missing."""
        if self._populating:
            self._stopped.set()
            self._populating.join()
            self._populating = None
