"""The node's cache: memory for snapshots that outlives workers and agent, because the launcher keeps it.

Each slot is a memfd whose size is sealed; workers get descriptors over a Unix socket, from a peer of their own user
only. When the last process that holds one is gone, so is the memory: nothing of the node is left taken. The board says
what every rank of the node holds: a row of `SLOTS_PER_RANK` words (`Key.pack`) by rank, set when a slot is sealed and
cleared before it is overwritten.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from keepstep.checkpoint import native
from keepstep.checkpoint.header import MOST_BYTES
from keepstep.checkpoint.memory.slots import Key, Record, kept_slots, read_record
from keepstep.core.errors import CheckpointError
from keepstep.core.node_memory import available_bytes, total_bytes

ADDRESS = "KEEPSTEP_CACHE"  # environment of the workers: name of the socket
NO_CACHE = "KEEPSTEP_NO_CACHE"  # the same where none could be made: why
SLOTS_PER_RANK = 8
MOST_RANKS = 1 << 20
MOST_OWNERS = 2 * MOST_RANKS  # a rank that runs here, or the backup of one that runs elsewhere
BACKING_SLOTS = (
    2  # more, of each rank, where nodes back each other up: what is backed up, and what is to be next
)
SLOTS_PER_BACKUP = 2  # in another node's cache; they take turns
_MOST_LEFT = (
    SLOTS_PER_BACKUP + BACKING_SLOTS
)  # of a rank that plays elsewhere: the newest, and what backups need
_KEEP = MOST_OWNERS * SLOTS_PER_RANK  # first of the board's last words
_BOARD_BYTES = (_KEEP + SLOTS_PER_RANK) * 8
_MOST_MESSAGE_BYTES = 4096
_MOST_CONNECTIONS = 4096
_PATIENCE_S = 30.0
_PAGE_BYTES = 4096
_WISH_OFFSET = 64  # behind the commit record
_ALIKE_OFFSET = 72
_POPULATED_AT_ONCE = 64 << 20

_Owner = Annotated[int, msgspec.Meta(ge=0, lt=MOST_OWNERS)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=SLOTS_PER_RANK)]


class Open(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The slots of a rank as they are."""

    rank: _Owner


class Reserve(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Give the rank ``slots`` slots of at least ``nbytes`` each; those in ``keep`` stay as they are, whatever size."""

    rank: _Owner
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MOST_BYTES)]
    slots: Annotated[int, msgspec.Meta(ge=1, le=SLOTS_PER_RANK)]
    keep: Annotated[tuple[_Index, ...], msgspec.Meta(max_length=SLOTS_PER_RANK)] = ()


class GiveUp(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Take back the slots of a rank of another node; nobody reads or writes them."""

    rank: Annotated[int, msgspec.Meta(ge=MOST_RANKS, lt=MOST_OWNERS)]


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Comes with the descriptors of the board and of the rank's slots, in this order. Bytes, of the whole node.

    ``backed``: the rank has the slots more that backups take.
    """

    used_bytes: int
    limit_bytes: int
    backed: bool = False


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Nothing was changed; the reason is for the job's operator."""

    reason: str


_requests = msgspec.json.Decoder(Open | Reserve | GiveUp)
_answers = msgspec.json.Decoder(Granted | Refused)


def backup_of(rank: int) -> int:
    """The owner, in the cache of another node, of the backup of a rank's snapshots."""
    return MOST_RANKS + rank


@dataclass(frozen=True, slots=True)
class Backing:
    """What backups between nodes add to a node's cache. ``copies``: nodes that back up each rank, 0 without backups."""

    ranks: int = 1  # of this node
    copies: int = 0

    def fit(self, nbytes: int, slots: int, limit_bytes: int) -> bool:
        """Whether the node has room for them when each of its ranks has ``slots`` slots of ``nbytes`` of its own."""
        per_rank = slots + BACKING_SLOTS + SLOTS_PER_BACKUP * self.copies
        return self.copies > 0 and self.ranks * per_rank * nbytes <= limit_bytes


class Cache:
    """The slots of all ranks of a node, by rank. ``limit_bytes``: most that all slots together may take."""

    def __init__(self, limit_bytes: int, backing: Backing | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.board = _memfd("keepstep-board", _BOARD_BYTES)
        self._backing = backing or Backing()
        self._slots: dict[int, list[int]] = {}
        self._backed: set[int] = set()

    @property
    def used_bytes(self) -> int:
        """Size of all slots, whether their pages are there yet or not."""
        return sum(_size(descriptor) for slots in self._slots.values() for descriptor in slots)

    def slots(self, rank: int) -> list[int]:
        """The descriptors of a rank's slots."""
        return self._slots.get(rank, [])

    def backed(self, rank: int) -> bool:
        """Whether a rank was given the slots more that backups take."""
        return rank in self._backed

    def reserve(self, rank: int, nbytes: int, slots: int, keep: Collection[int] = ()) -> None:
        """Make the rank's slots so large; a slot that is replaced loses what it held.

        Raises:
            CheckpointError: the node's limit or memory does not allow it; nothing was changed.
        """
        if not self.slots(rank) and rank < MOST_RANKS and self._backing.fit(nbytes, slots, self.limit_bytes):
            try:
                self._reserve(rank, nbytes, slots + BACKING_SLOTS, keep)
                self._backed.add(rank)
                return
            except CheckpointError:
                pass  # not backed up, then
        self._reserve(rank, nbytes, slots, keep)

    def _reserve(self, rank: int, nbytes: int, slots: int, keep: Collection[int]) -> None:
        old = self.slots(rank)
        count = max(slots, len(old))
        size = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        new = [i for i in range(count) if i >= len(old) or (i not in keep and _size(old[i]) < size)]
        growth = size * len(new) - sum(_size(old[i]) for i in new if i < len(old))
        self._check_room(rank, size, count, growth)
        made: list[int] = []
        try:
            made.extend(_memfd(f"keepstep-rank-{rank}", size) for _ in new)
        except OSError as error:
            for descriptor in made:
                os.close(descriptor)
            raise CheckpointError(f"no memory file can be made: {error.strerror}") from None
        kept = self._slots.setdefault(rank, [])
        for index, descriptor in zip(new, made, strict=True):
            if index < len(kept):
                os.close(kept[index])
                kept[index] = descriptor
            else:
                kept.append(descriptor)

    def wanted(self) -> list[Key]:
        """The keys that all ranks which run here have sealed and that wait for storage, oldest first."""
        held = [
            {key for key in map(_wanted, slots) if key}
            for owner, slots in self._slots.items()
            if owner < MOST_RANKS
        ]
        return sorted(set[Key].intersection(*held)) if held else []

    def alike(self, rank: int) -> frozenset[Key]:
        """What a rank holds that is the same on all ranks of the job."""
        return frozenset(key for key in map(_alike, self.slots(rank)) if key)

    def renumber(self, ranks: Mapping[int, int]) -> None:
        """The job has another size: give each rank of this node, by its old number, its new one.

        Kept is what is the same on all ranks of the job; nothing else is any rank's state now, and backups are of ranks
        of the old numbers.
        """
        same = frozenset(key for rank in ranks for key in self.alike(rank))
        board, old = Board(os.dup(self.board)), self._slots
        board.keep(None, None)
        for owner, slots in old.items():
            for index, descriptor in enumerate(slots):
                board.put(owner, index, None)
                if owner not in ranks:
                    os.close(descriptor)
        self._slots = {ranks[owner]: slots for owner, slots in old.items() if owner in ranks}
        self._backed = {ranks[owner] for owner in self._backed if owner in ranks}
        for rank, slots in self._slots.items():
            for index, descriptor in enumerate(slots):
                with _mapped(descriptor) as slot:
                    record = slot.record()
                    if record is not None and record.key in same:
                        slot.say_alike(record.key)
                        slot.want(None)
                        board.put(rank, index, record.key)
                    else:
                        slot.clear()
        board.close()

    def lacks(self, ranks: Iterable[int]) -> int:
        """Bytes that are missing here to keep what these ranks `leave`, and have as many other ranks in their place."""
        left = 0
        for rank in ranks:
            sizes = sorted(_size(descriptor) for descriptor in self.slots(rank))
            before = sum(_size(descriptor) for descriptor in self.slots(backup_of(rank)))
            left += sum(sizes[-_MOST_LEFT:]) - before
        return max(self.used_bytes + left - self.limit_bytes, left - available_bytes(), 0)

    def leave(self, ranks: Iterable[int]) -> None:
        """These ranks play elsewhere from now on: of what they have sealed here the newest are backups.

        What is backed up, too, or about to be: the job goes on with it when a node is lost before all have the newest.
        """
        board = Board(os.dup(self.board))
        backed_up, first = board.kept()
        for rank in ranks:
            held = [board.at(rank, index) for index in range(len(self.slots(rank)))]
            newest = sorted(key for key in held if key)[-SLOTS_PER_BACKUP:]
            kept = kept_slots(held, backed_up, first) | {i for i, key in enumerate(held) if key in newest}
            slots = self._slots.pop(rank, [])
            self._backed.discard(rank)
            for index, descriptor in enumerate(slots):
                board.put(rank, index, None)
                if index not in kept:
                    os.close(descriptor)
            if not kept:
                continue  # it has not restored here yet: what there is of it stays
            left = [(held[index], slots[index]) for index in sorted(kept)]
            for index, descriptor in enumerate(self._slots.pop(backup_of(rank), [])):  # of an earlier time
                if (key := board.at(backup_of(rank), index)) == backed_up and key and key not in held:
                    left.append((key, descriptor))
                else:
                    os.close(descriptor)
            self._slots[backup_of(rank)] = [descriptor for _, descriptor in left]
            for place in range(SLOTS_PER_RANK):
                board.put(backup_of(rank), place, left[place][0] if place < len(left) else None)
        board.close()

    def give_up(self, rank: int) -> None:
        """Have no slots for a rank any more; what a process still maps stays until it lets go of it."""
        for descriptor in self._slots.pop(rank, []):
            os.close(descriptor)

    def close(self) -> None:
        """Let go of everything."""
        for descriptor in (self.board, *(d for slots in self._slots.values() for d in slots)):
            os.close(descriptor)
        self._slots = {}

    def _check_room(self, rank: int, size: int, slots: int, growth: int) -> None:
        used = self.used_bytes
        whose = f"rank {rank}" if rank < MOST_RANKS else f"the backup of rank {rank - MOST_RANKS}"
        asked = f"{whose} asks for {slots} slots of {gib(size)} for its snapshots"
        if used + growth > self.limit_bytes:
            raise CheckpointError(
                f"{asked}: with the {gib(used)} that are taken, {gib(used + growth)} of this node, "
                f"whose limit is {gib(self.limit_bytes)}; raise KEEPSTEP_CHECKPOINT_BYTES or save a smaller state"
            )
        there = sum(os.fstat(d).st_blocks * 512 for slots_ in self._slots.values() for d in slots_)
        missing = max(0, used - there) + growth
        available = available_bytes()
        if missing > available:
            raise CheckpointError(
                f"{asked}: {gib(missing)} more of this node, of whose memory {gib(available)} are free"
            )


class CacheServer:
    """Hands out a cache's descriptors; lives on the launcher's event loop."""

    def __init__(self, cache: Cache) -> None:
        self.address = f"keepstep-cache-{secrets.token_hex(16)}"
        self._cache = cache
        self._connections: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(128)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stop serving; the cache is the owner's to close."""
        for connection in (*self._connections, self._listener):
            self._loop.remove_reader(connection)
            connection.close()
        self._connections.clear()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._connections) >= _MOST_CONNECTIONS or peer_uid(connection) != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        self._loop.add_reader(connection, self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_MOST_MESSAGE_BYTES)
            if data:
                answer, descriptors = self._answer(data)
                socket.send_fds(connection, [msgspec.json.encode(answer)], descriptors)
                return
        except OSError:
            pass
        self._loop.remove_reader(connection)
        self._connections.discard(connection)
        connection.close()

    def _answer(self, data: bytes) -> tuple[Granted | Refused, list[int]]:
        try:
            request = _requests.decode(data)
            if isinstance(request, Reserve):
                self._cache.reserve(request.rank, request.nbytes, request.slots, request.keep)
            elif isinstance(request, GiveUp):
                self._cache.give_up(request.rank)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return Refused(f"not a request to the cache: {error}"), []
        except CheckpointError as error:
            return Refused(str(error)), []
        granted = Granted(self._cache.used_bytes, self._cache.limit_bytes, self._cache.backed(request.rank))
        return granted, [self._cache.board, *self._cache.slots(request.rank)]


class Answer(NamedTuple):
    """What a client got: descriptors, which it closes, and the node's figures."""

    board: int
    slots: list[int]
    used_bytes: int
    limit_bytes: int
    backed: bool

    def close(self) -> None:
        """Close all of it."""
        for descriptor in (self.board, *self.slots):
            os.close(descriptor)


def ask(address: str, request: Open | Reserve | GiveUp) -> Answer:
    """Ask the cache at ``address`` (the value of `ADDRESS`).

    Raises:
        CheckpointError: it refused, is not there, or is not of this user.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            connection.connect(f"\0{address}")
            if peer_uid(connection) != os.getuid():
                raise CheckpointError(f"the cache {address} belongs to another user")
            connection.send(msgspec.json.encode(request))
            data, descriptors, _, _ = socket.recv_fds(connection, _MOST_MESSAGE_BYTES, 1 + SLOTS_PER_RANK)
        except OSError as error:
            raise CheckpointError(
                f"the cache of this node does not answer ({error}): is `keepstep run` still there?"
            ) from None
    try:
        answer = _answers.decode(data)
        if isinstance(answer, Refused):
            raise CheckpointError(answer.reason)
        if not descriptors:
            raise CheckpointError("the cache of this node sent no descriptors")
    except (CheckpointError, msgspec.MsgspecError) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise CheckpointError(str(error)) from None
    return Answer(descriptors[0], list(descriptors[1:]), answer.used_bytes, answer.limit_bytes, answer.backed)


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
        self.nbytes = _size(descriptor)
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
            self.memory = mmap.mmap(descriptor, _BOARD_BYTES)
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


def default_limit_bytes() -> int:
    """Half of the memory that this machine has, or the tightest control group around this process."""
    return total_bytes() // 2


def _memfd(name: str, nbytes: int) -> int:
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
def _mapped(descriptor: int) -> Generator[Slot]:
    slot = Slot(os.dup(descriptor))
    try:
        yield slot
    finally:
        slot.close()


def _wanted(descriptor: int) -> Key | None:
    with _mapped(descriptor) as slot:
        return slot.wanted()


def _alike(descriptor: int) -> Key | None:
    with _mapped(descriptor) as slot:
        return slot.alike()


def _size(descriptor: int) -> int:
    return os.fstat(descriptor).st_size


def peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", raw)[1]


def gib(nbytes: int) -> str:
    """Bytes as people read them."""
    return f"{nbytes / (1 << 30):.2f} GiB"
