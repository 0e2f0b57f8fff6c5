"""A slot of the node's cache, and the board that shows which snapshots every rank of the node holds.

The board has a row of `SLOTS_PER_RANK` words (`Key.pack`) for each rank. A word is set when its slot is sealed and
cleared before the slot is overwritten.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Generator, Iterable, Sequence

from keepstep.checkpoint import native
from keepstep.checkpoint.memory.slots import Key, Record, read_record
from keepstep.core.errors import CheckpointError

SLOTS_PER_RANK = 8
MOST_RANKS = 1 << 20
MOST_OWNERS = 2 * MOST_RANKS  # an owner is a rank that runs here, or the backup of one that runs elsewhere
SLOTS_PER_BACKUP = 2  # slots of a backup in another node's cache, which take turns
BACKING_SLOTS = 2
"""Extra slots of each rank where nodes back each other up: for the snapshot backed up now, and for the next one."""

_KEEP = MOST_OWNERS * SLOTS_PER_RANK  # index of the board's word that `Board.keep` writes first
BOARD_BYTES = (_KEEP + SLOTS_PER_RANK) * 8
_WISH_OFFSET = 64  # place in a slot, behind the commit record, of the key that is to be brought to storage
_ALIKE_OFFSET = 72  # place in a slot of the key that all ranks have saved alike
_POPULATED_AT_ONCE = 64 << 20


def backup_of(rank: int) -> int:
    """The number under which another node's cache holds the backup of a rank's snapshots."""
    return MOST_RANKS + rank


class Slot:
    """A slot, mapped into memory. Owns its descriptor, which is closed also when it cannot be mapped.

    A lock belongs to the process: a process should map a slot only once, because closing any of its maps ends the lock.
    With ``apart`` the lock belongs to this map alone, for processes in which several parts read slots; such a lock
    survives its process if that has forked.
    """

    def __init__(self, descriptor: int, *, apart: bool = False) -> None:
        """Raises CheckpointError when the file's size is not sealed: it could shrink while somebody reads it."""
        self._descriptor, self._apart = descriptor, apart
        try:
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise CheckpointError("a slot of the cache whose size is not sealed")
            if apart:  # such a lock belongs to the open file, so it must be one that no other process shares
                self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
                os.close(descriptor)
            self.nbytes = size_of(self._descriptor)
            self.memory = mmap.mmap(self._descriptor, self.nbytes)
        except BaseException:
            os.close(self._descriptor)
            raise

    def record(self) -> Record | None:
        """The commit record; None while the slot is not sealed."""
        with memoryview(self.memory) as view:
            return read_record(view)

    def key(self) -> Key | None:
        """The key of the snapshot in the slot; None while it is not sealed."""
        record = self.record()
        return record.key if record else None

    def clear(self) -> None:
        """Make the slot say that it holds nothing."""
        native.clear(self.memory)

    def wanted(self) -> Key | None:
        """The slot's key, if it is to be brought to storage; nobody overwrites such a slot."""
        return self._marked(_WISH_OFFSET)

    def want(self, key: Key | None) -> None:
        """Mark the key that is to be brought to storage from here, None: no key.

        The mark may be set before the slot is filled: it counts only while the slot holds that key, sealed.
        """
        self._mark(_WISH_OFFSET, key)

    def alike(self) -> Key | None:
        """The slot's key, if all ranks of the job are known to have saved the same bytes under it."""
        return self._marked(_ALIKE_OFFSET)

    def say_alike(self, key: Key) -> None:
        """Mark that all ranks have saved the same bytes under this key; it counts only while the slot holds the key."""
        self._mark(_ALIKE_OFFSET, key)

    def _marked(self, offset: int) -> Key | None:
        key = self.key()
        with memoryview(self.memory)[offset : offset + 8].cast("Q") as word:
            return key if key and word[0] == key.pack() else None

    def _mark(self, offset: int, key: Key | None) -> None:
        with memoryview(self.memory)[offset : offset + 8].cast("Q") as word:
            word[0] = key.pack() if key else 0

    def populate(self, stopped: threading.Event) -> None:
        """Have the kernel provide all pages of the slot now; ends early once ``stopped`` is set."""
        for begin in range(0, self.nbytes, _POPULATED_AT_ONCE):
            if stopped.is_set():
                return
            native.populate(self.memory, begin, min(_POPULATED_AT_ONCE, self.nbytes - begin))

    def lock(self, *, shared: bool = False) -> bool:
        """Lock the slot for writing, or ``shared`` for reading, until `unlock` or the process ends.

        Returns False when another process, or another map, holds a lock that excludes this one.
        """
        try:
            if self._apart:
                self._lock_file(fcntl.F_RDLCK if shared else fcntl.F_WRLCK)
            else:
                fcntl.lockf(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
        except OSError:
            return False

    def unlock(self) -> None:
        """Give the lock back."""
        if self._apart:
            self._lock_file(fcntl.F_UNLCK)
        else:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def fileno(self) -> int:
        """The slot's descriptor."""
        return self._descriptor

    def _lock_file(self, kind: int) -> None:
        # The fields of struct flock: type, whence, start, length (0: the whole file), pid (must be 0)
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))

    def close(self) -> None:
        """Unmap the slot, unless a view of ``memory`` is still in use, and close its descriptor."""
        with contextlib.suppress(BufferError):
            self.memory.close()
        os.close(self._descriptor)


class Board:
    """The table of what each rank of the node holds, mapped into memory."""

    def __init__(self, descriptor: int) -> None:
        """Maps the board and closes the descriptor."""
        try:
            self.memory = mmap.mmap(descriptor, BOARD_BYTES)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the board of the cache cannot be mapped: {error}") from None
        finally:
            os.close(descriptor)
        self._words = memoryview(self.memory).cast("Q")

    def index(self, rank: int, slot: int) -> int:
        """Index of the word that belongs to a slot."""
        return rank * SLOTS_PER_RANK + slot

    def held(self, rank: int) -> frozenset[Key]:
        """The keys of all snapshots that a rank holds now."""
        words = self._words[self.index(rank, 0) : self.index(rank, SLOTS_PER_RANK)]
        return frozenset(key for key in map(Key.unpack, words) if key is not None)

    def at(self, rank: int, slot: int) -> Key | None:
        """The key of the snapshot in a slot; None when there is none."""
        return Key.unpack(self._words[self.index(rank, slot)])

    def put(self, rank: int, slot: int, key: Key | None) -> None:
        """Set the key of the snapshot in a slot."""
        self._words[self.index(rank, slot)] = key.pack() if key else 0

    def keep(self, backed_up: Key | None, first: Key | None) -> None:
        """Have the node's workers keep the snapshot ``backed_up`` and, of those from ``first`` on, the oldest."""
        # `kept` reads the words in reverse order, so a key that moves from the second to the first is never missed.
        self._words[_KEEP] = backed_up.pack() if backed_up else 0
        self._words[_KEEP + 1] = first.pack() if first else 0

    def kept(self) -> tuple[Key | None, Key | None]:
        """The arguments of the last `keep`, even when the process that called it is gone."""
        first = Key.unpack(self._words[_KEEP + 1])
        return Key.unpack(self._words[_KEEP]), first

    def doubt(self, key: Key | None) -> None:
        """Mark the first snapshot in which replicas differ that must not: it and later ones are to be avoided."""
        self._words[_KEEP + 2] = key.pack() if key else 0

    def doubted(self) -> Key | None:
        """The key of the last `doubt`."""
        return Key.unpack(self._words[_KEEP + 2])

    def order(self, key: Key | None) -> None:
        """Have the first snapshot from ``key`` on brought to storage, which an operator wants; None: no one."""
        self._words[_KEEP + 3] = key.pack() if key else 0

    def ordered(self) -> Key | None:
        """The key of the last `order`."""
        return Key.unpack(self._words[_KEEP + 3])

    def close(self) -> None:
        """Unmap the board."""
        self._words.release()
        with contextlib.suppress(BufferError):
            self.memory.close()


def backups_on(board: int) -> list[int]:
    """Ranks of other nodes that may have a backup here, read from the board behind a descriptor.

    Only parts of the file that have pages are read, because nearly all of the board is a hole.
    """
    ranks: list[int] = []
    at, end = MOST_RANKS * SLOTS_PER_RANK * 8, _KEEP * 8
    while at < end:
        try:
            at = os.lseek(board, at, os.SEEK_DATA)
        except OSError:  # the rest of the file is a hole
            return ranks
        stop = min(os.lseek(board, at, os.SEEK_HOLE), end)
        words = memoryview(os.pread(board, stop - at, at)).cast("Q") if stop > at else memoryview(b"")
        owner = at // 8 // SLOTS_PER_RANK
        ranks += [
            owner + i // SLOTS_PER_RANK - MOST_RANKS
            for i in range(0, len(words), SLOTS_PER_RANK)
            if any(words[i : i + SLOTS_PER_RANK])
        ]
        at = max(stop, at + 1)
    return ranks


def sealed_memfd(name: str, nbytes: int) -> int:
    """The descriptor of a new memory file whose size nobody can change. Raises OSError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def mapped(descriptor: int) -> Generator[Slot]:
    """Map the slot behind a descriptor for a while; the descriptor stays open."""
    slot = Slot(os.dup(descriptor))
    try:
        yield slot
    finally:
        slot.close()


def map_slots(descriptors: Iterable[int], old: Sequence[Slot] = (), *, apart: bool = False) -> list[Slot]:
    """The slots behind descriptors, which stay open; one of ``old`` that is there again stays as it is."""
    slots: list[Slot] = []
    with contextlib.ExitStack() as fresh:
        for index, descriptor in enumerate(descriptors):
            if index < len(old) and os.path.sameopenfile(old[index].fileno(), descriptor):
                slots.append(old[index])
            else:
                slots.append(Slot(os.dup(descriptor), apart=apart))
                fresh.callback(slots[-1].close)
        fresh.pop_all()
    return slots


def size_of(descriptor: int) -> int:
    """Size in bytes of the file behind a descriptor."""
    return os.fstat(descriptor).st_size
