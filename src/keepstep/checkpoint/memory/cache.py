"""The node's cache: memory for snapshots that outlives workers and agent, because the launcher keeps it.

Each slot is a memfd whose size is sealed (`slot`); workers get descriptors over a Unix socket (`cache_server`).
The kernel frees the memory when the last process that holds a descriptor is gone, so nothing has to be cleaned up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from keepstep.checkpoint.matching import same_moment
from keepstep.checkpoint.memory.slot import (
    BACKING_SLOTS,
    BOARD_BYTES,
    MOST_RANKS,
    SLOTS_PER_BACKUP,
    SLOTS_PER_RANK,
    Board,
    Slot,
    backup_of,
    mapped,
    sealed_memfd,
    size_of,
)
from keepstep.checkpoint.memory.slots import Key, kept_slots, read_header, read_record
from keepstep.core.errors import CheckpointError
from keepstep.core.node_memory import available_bytes, total_bytes

_MOST_LEFT = SLOTS_PER_BACKUP + BACKING_SLOTS
"""Slots that are kept of a rank that plays elsewhere now: the newest, and those that backups need."""

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Backing:
    """The slots that backups between nodes add to a node's cache.

    Attributes:
        ranks: ranks that this node plays.
        copies: nodes that back up each rank; 0 without backups.
    """

    ranks: int = 1
    copies: int = 0

    def fit(self, nbytes: int, slots: int, limit_bytes: int) -> bool:
        """Whether the limit allows these slots beside ``slots`` slots of ``nbytes`` for each of the node's ranks."""
        per_rank = slots + BACKING_SLOTS + SLOTS_PER_BACKUP * self.copies
        return self.copies > 0 and self.ranks * per_rank * nbytes <= limit_bytes


def default_limit_bytes() -> int:
    """Half of the memory of this machine, or of the tightest control group around this process."""
    return total_bytes() // 2


def gib(nbytes: int) -> str:
    """A number of bytes in GiB, or in MiB where that says more, for messages."""
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 27 else f"{nbytes / (1 << 20):.2f} MiB"


class Cache:
    """The slots of all ranks of a node, which together may take ``limit_bytes``."""

    def __init__(self, limit_bytes: int, backing: Backing | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.board = sealed_memfd("keepstep-board", BOARD_BYTES)
        self._table = Board(os.dup(self.board))
        self._backing = backing or Backing()
        self._slots: dict[int, list[int]] = {}
        self._backed: set[int] = set()

    @property
    def used_bytes(self) -> int:
        """Size of all slots, including pages that the kernel has not provided yet."""
        return sum(size_of(descriptor) for slots in self._slots.values() for descriptor in slots)

    def newest(self, rank: int) -> Key | None:
        """The newest snapshot that a rank has sealed."""
        return max(self._table.held(rank), default=None)

    def slots(self, rank: int) -> list[int]:
        """The file descriptors of a rank's slots."""
        return self._slots.get(rank, [])

    def backed(self, rank: int) -> bool:
        """Whether a rank has the extra slots that backups need."""
        return rank in self._backed

    def reserve(self, rank: int, nbytes: int, slots: int, keep: Collection[int] = ()) -> None:
        """Give a rank at least ``slots`` slots of ``nbytes``, replacing smaller ones, which lose what they held.

        Slots in ``keep`` are not replaced. A rank without slots gets those that backups need as well, if they fit.

        Raises:
            CheckpointError: the node's limit or memory does not allow it; nothing was changed.
        """
        if not self.slots(rank) and rank < MOST_RANKS and self._backing.fit(nbytes, slots, self.limit_bytes):
            try:
                self._reserve(rank, nbytes, slots + BACKING_SLOTS, keep)
                self._backed.add(rank)
                return
            except CheckpointError:
                pass  # too little memory for backups of this rank
        self._reserve(rank, nbytes, slots, keep)

    def _reserve(self, rank: int, nbytes: int, slots: int, keep: Collection[int]) -> None:
        old = self.slots(rank)
        count = max(slots, len(old))
        size = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        new = [i for i in range(count) if i >= len(old) or (i not in keep and size_of(old[i]) < size)]
        growth = size * len(new) - sum(size_of(old[i]) for i in new if i < len(old))
        self._check_room(rank, size, count, growth)
        made: list[int] = []
        try:
            made.extend(sealed_memfd(f"keepstep-rank-{rank}", size) for _ in new)
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

    def want_newest(self, count: int = 1) -> None:
        """Have so many of the newest snapshots brought to storage that all ranks here have sealed at one moment."""
        moments: list[dict[Key, int]] = []
        for rank in (rank for rank in self._slots if rank < MOST_RANKS):
            moments.append({})
            for descriptor in self.slots(rank):
                with (
                    mapped(descriptor) as slot,
                    contextlib.suppress(CheckpointError),
                    memoryview(slot.memory) as view,
                ):
                    if record := read_record(view):
                        moments[-1][record.key] = read_header(view, record).moment
        together = set[Key]().union(*moments[:1]).intersection(*moments[1:])
        newest = sorted(key for key in together if same_moment(own[key] for own in moments))[-count:]
        for rank in (rank for rank in self._slots if rank < MOST_RANKS):
            for descriptor in self.slots(rank):
                with mapped(descriptor) as slot:
                    if (key := slot.key()) in newest:
                        slot.want(key)

    def wanted(self) -> list[Key]:
        """The keys that all ranks which run here have sealed and that wait for storage, oldest first."""
        held = [self._marked(rank, Slot.wanted) for rank in self._slots if rank < MOST_RANKS]
        return sorted(frozenset[Key].intersection(*held)) if held else []

    def alike(self, rank: int) -> frozenset[Key]:
        """The keys of a rank's snapshots that are the same on all ranks of the job."""
        return self._marked(rank, Slot.alike)

    def _marked(self, rank: int, mark: Callable[[Slot], Key | None]) -> frozenset[Key]:
        found: set[Key] = set()
        for descriptor in self.slots(rank):
            with mapped(descriptor) as slot:
                found.update(filter(None, [mark(slot)]))
        return frozenset(found)

    def renumber(self, ranks: Mapping[int, int]) -> None:
        """Give each rank of this node, by its old number, its new one, because the job has another size now.

        Only snapshots that are the same on all ranks of the job are kept: no other is the state of a new rank, and
        backups are of ranks with their old numbers.
        """
        same = frozenset(key for rank in ranks for key in self.alike(rank))
        board, old = self._table, self._slots
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
                with mapped(descriptor) as slot:
                    key = slot.key()
                    if key and key in same:
                        slot.say_alike(key)
                        slot.want(None)
                        board.put(rank, index, key)
                    else:
                        slot.clear()

    def lacks(self, ranks: Iterable[int]) -> int:
        """Bytes that this node lacks to keep what these ranks `leave` while as many other ranks take their place."""
        left = 0
        for rank in ranks:
            sizes = sorted(size_of(descriptor) for descriptor in self.slots(rank))
            before = sum(size_of(descriptor) for descriptor in self.slots(backup_of(rank)))
            left += sum(sizes[-_MOST_LEFT:]) - before
        return max(self.used_bytes + left - self.limit_bytes, left - available_bytes(), 0)

    def leave(self, ranks: Iterable[int]) -> None:
        """Turn the newest snapshots of these ranks into backups, because they play on another node from now on.

        A snapshot that is backed up, or about to be, is kept as well: the job goes on with it if a node is lost before
        all ranks have the newest.
        """
        board = self._table
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
                continue  # the rank sealed nothing here, so the backups of it that are here stay
            left = [(held[index], slots[index]) for index in sorted(kept)]
            backups = self._slots.pop(backup_of(rank), [])  # backups from an earlier incarnation
            for index, descriptor in enumerate(backups):
                if (key := board.at(backup_of(rank), index)) == backed_up and key and key not in held:
                    left.append((key, descriptor))
                else:
                    os.close(descriptor)
            self._slots[backup_of(rank)] = [descriptor for _, descriptor in left]
            for place in range(SLOTS_PER_RANK):
                board.put(backup_of(rank), place, left[place][0] if place < len(left) else None)

    def give_up(self, rank: int) -> None:
        """Close a rank's slots; the memory stays while another process maps it."""
        for descriptor in self._slots.pop(rank, []):
            os.close(descriptor)

    def close(self) -> None:
        """Close all descriptors."""
        self._table.close()
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
