"""A slot of the node's cache, and the board that says what every rank of the node holds.

The board is a row of `SLOTS_PER_RANK` words (`Key.pack`) by rank, set when a slot is sealed and cleared before it is
overwritten.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Collection, Generator

from keepstep.checkpoint import native
from keepstep.checkpoint.memory.slots import Key, Record, read_record
from keepstep.core.errors import CheckpointError

SLOTS_PER_RANK = 8
MOST_RANKS = 1 << 20
MOST_OWNERS = 2 * MOST_RANKS  # a rank that runs here, or the backup of one that runs elsewhere
SLOTS_PER_BACKUP = 2  # in another node's cache; they take turns
BACKING_SLOTS = 2
"""More, of each rank, where nodes back each other up: what is backed up, and what is to be next."""

_KEEP = MOST_OWNERS * SLOTS_PER_RANK  # first of the board's last words
BOARD_BYTES = (_KEEP + SLOTS_PER_RANK) * 8
_WISH_OFFSET = 64  # behind the commit record
_ALIKE_OFFSET = 72
_POPULATED_AT_ONCE = 64 << 20


def backup_of(rank: int) -> int:
    """The owner, in the cache of another node, of the backup of a rank's snapshots."""
    return MOST_RANKS + rank


class Slot:
    """A slot, mapped. Owns its descriptor.

    A lock is the process's: one process should map a slot once, closing any map ends its locks. ``apart`` the lock is
    this map's own, for processes in which several parts read slots; it would outlive a process in its forked children.
    """

    def __init__(self, descriptor: int, *, apart: bool = False) -> None:
        """Raises `CheckpointError` when the size of the file is not sealed: it could vanish under a reader."""
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise CheckpointError("a slot of the cache whose size is not sealed")
        if apart:  # locks belong to the open file: one that no other process shares
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            os.close(descriptor)
            descriptor = own
        self._descriptor, self._apart = descriptor, apart
        self.nbytes = size_of(descriptor)
        self.memory = mmap.mmap(descriptor, self.nbytes)

    def record(self) -> Record | None:
        """The commit record; None while the slot is not sealed."""
        with memoryview(self.memory) as view:
            return read_record(view)

    def clear(self) -> None:
        """Forget what it holds."""
        native.clear(self.memory)

    def wanted(self) -> Key | None:
        """The key it holds, when that is to be brought to storage: then nobody overwrites it."""
        record = self.record()
        with memoryview(self.memory)[_WISH_OFFSET : _WISH_OFFSET + 8].cast("Q") as word:
            return record.key if record is not None and word[0] == record.key.pack() else None

    def want(self, key: Key | None) -> None:
        """Say which key is to be brought to storage from here, None: none.

        Said before the slot is filled, it counts from the moment at which that very key is sealed, and not before.
        """
        with memoryview(self.memory)[_WISH_OFFSET : _WISH_OFFSET + 8].cast("Q") as word:
            word[0] = key.pack() if key else 0

    def alike(self) -> Key | None:
        """The key it holds, when all ranks of the job are known to have saved the very same then."""
        record = self.record()
        with memoryview(self.memory)[_ALIKE_OFFSET : _ALIKE_OFFSET + 8].cast("Q") as word:
            return record.key if record is not None and word[0] == record.key.pack() else None

    def say_alike(self, key: Key) -> None:
        """All ranks have saved the very same under this key; it counts while that is here."""
        with memoryview(self.memory)[_ALIKE_OFFSET : _ALIKE_OFFSET + 8].cast("Q") as word:
            word[0] = key.pack()

    def populate(self, until: Collection[object] = ()) -> None:
        """Have the kernel give it all its pages now; stops early when something is in ``until``."""
        for begin in range(0, self.nbytes, _POPULATED_AT_ONCE):
            if until:
                return
            native.populate(self.memory, begin, min(_POPULATED_AT_ONCE, self.nbytes - begin))

    def lock(self, *, shared: bool = False) -> bool:
        """Take it for writing, or ``shared`` for reading, until `unlock` or the end of this process; False: taken."""
        try:
            if self._apart:
                self._lock_file(fcntl.F_RDLCK if shared else fcntl.F_WRLCK)
            else:
                fcntl.lockf(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
        except OSError:
            return False

    def unlock(self) -> None:
        """Let others have it."""
        if self._apart:
            self._lock_file(fcntl.F_UNLCK)
        else:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def fileno(self) -> int:
        """Its descriptor, to send from."""
        return self._descriptor

    def _lock_file(self, kind: int) -> None:
        # struct flock: type, whence, start, length (0: all), process (0: of the open file)
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))

    def close(self) -> None:
        """Unmap it. A view of ``memory`` that is still in use keeps it mapped."""
        with contextlib.suppress(BufferError):
            self.memory.close()
        os.close(self._descriptor)


class Board:
    """What each rank of the node holds."""

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
        """Which word stands for a slot."""
        return rank * SLOTS_PER_RANK + slot

    def held(self, rank: int) -> frozenset[Key]:
        """What the rank holds now."""
        words = self._words[self.index(rank, 0) : self.index(rank, SLOTS_PER_RANK)]
        return frozenset(key for key in map(Key.unpack, words) if key is not None)

    def at(self, rank: int, slot: int) -> Key | None:
        """What a slot holds now."""
        return Key.unpack(self._words[self.index(rank, slot)])

    def put(self, rank: int, slot: int, key: Key | None) -> None:
        """Say what a slot holds."""
        self._words[self.index(rank, slot)] = key.pack() if key else 0

    def keep(self, backed_up: Key | None, first: Key | None) -> None:
        """Have the node's workers keep the snapshot ``backed_up`` and, of those from ``first`` on, the oldest."""
        # In this order, and read in the other: what moves from the second word to the first is always in one.
        self._words[_KEEP] = backed_up.pack() if backed_up else 0
        self._words[_KEEP + 1] = first.pack() if first else 0

    def kept(self) -> tuple[Key | None, Key | None]:
        """What `keep` was told last; it outlives who told it."""
        first = Key.unpack(self._words[_KEEP + 1])
        return Key.unpack(self._words[_KEEP]), first

    def close(self) -> None:
        """Unmap it."""
        self._words.release()
        with contextlib.suppress(BufferError):
            self.memory.close()


def newest_on(board: int, rank: int) -> Key | None:
    """The newest snapshot of a rank on the board (a descriptor)."""
    row = 8 * SLOTS_PER_RANK
    words = memoryview(os.pread(board, row, rank * row)).cast("Q")
    return max((key for key in map(Key.unpack, words) if key is not None), default=None)


def backups_on(board: int) -> list[int]:
    """Ranks of other nodes of which there may be a backup: where the board (a descriptor) has pages at all."""
    ranks: list[int] = []
    at, end = MOST_RANKS * SLOTS_PER_RANK * 8, _KEEP * 8
    while at < end:
        try:
            at = os.lseek(board, at, os.SEEK_DATA)
        except OSError:  # nothing behind
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
    """A new memory file whose size nobody can change; OSError where none can be made."""
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
    """The slot behind a descriptor, which stays the caller's."""
    slot = Slot(os.dup(descriptor))
    try:
        yield slot
    finally:
        slot.close()


def wanted_key(descriptor: int) -> Key | None:
    """`Slot.wanted` of the slot behind a descriptor."""
    with mapped(descriptor) as slot:
        return slot.wanted()


def alike_key(descriptor: int) -> Key | None:
    """`Slot.alike` of the slot behind a descriptor."""
    with mapped(descriptor) as slot:
        return slot.alike()


def size_of(descriptor: int) -> int:
    """Bytes of the file behind a descriptor."""
    return os.fstat(descriptor).st_size
