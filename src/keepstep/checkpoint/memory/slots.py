"""The format of a slot of the cache, and the rules for which slot the next snapshot may take.

A slot holds one snapshot: a page that begins with the commit record, the storages' bytes, the header, and a table of
the storages' checksums. The record is cleared before anything else changes and written when every byte is there, so a
slot whose writer died holds nothing. ``native/snapshot.hpp`` writes the records of what workers save; `write_record`
those of snapshots that come from another node or from storage.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from keepstep.checkpoint import native
from keepstep.checkpoint.header import MOST_HEADER_BYTES, StateHeader, decode_header, with_checksums
from keepstep.core.errors import CheckpointError
from keepstep.core.ranges import fold_ranks

SPARE_HEADER_BYTES = 1 << 16  # for later snapshots whose plain values are a little longer
_RECORD = struct.Struct("<8Q")
_STEP_BITS = 47
LAST_STEP = (1 << _STEP_BITS) - 2  # the largest step that a packed key can hold
LAST_INCARNATION = (1 << 15) - 1
_MOST_TOLD = 6


class SnapshotDamaged(CheckpointError):
    """The bytes in a slot are not those that were sealed there."""


class Key(NamedTuple):
    """Names a snapshot. Keys sort by age: any step of a later incarnation is newer than all of an earlier one."""

    incarnation: int
    step: int

    @property
    def fits(self) -> bool:
        """Whether the key can be packed."""
        return 0 <= self.incarnation <= LAST_INCARNATION and 0 <= self.step <= LAST_STEP

    def pack(self) -> int:
        """The key as a number from 1 to 2**63 - 1, in the order of keys. Raises CheckpointError if it does not fit."""
        if not self.fits:
            raise CheckpointError(
                f"step {self.step} of incarnation {self.incarnation} is too large to be kept"
            )
        return self.incarnation << _STEP_BITS | self.step + 1

    def follows(self, other: Key | None) -> bool:
        """Whether it is of the same incarnation as ``other``, and not older."""
        return other is not None and self.incarnation == other.incarnation and self >= other

    @classmethod
    def unpack(cls, number: int) -> Key | None:
        """The key that `pack` turned into ``number``; None for 0."""
        return cls(number >> _STEP_BITS, (number & ((1 << _STEP_BITS) - 1)) - 1) if number else None


class Record(NamedTuple):
    """The commit record of a slot. Sizes in bytes."""

    step: int
    incarnation: int
    data_bytes: int
    header_bytes: int
    storages: int
    header_checksum: int

    @property
    def key(self) -> Key:
        return Key(self.incarnation, self.step)

    @property
    def header_at(self) -> int:
        """Offset of the header in the slot."""
        return native.slot_bytes(self.data_bytes, 0, 0)

    @property
    def table_at(self) -> int:
        """Offset of the table of checksums in the slot."""
        return native.slot_bytes(self.data_bytes, self.header_bytes, 0)


def slot_bytes(record: Record, *, spare: bool = False) -> int:
    """Bytes of a slot for the snapshot that a record describes; with ``spare`` its header may grow a little."""
    more = max(SPARE_HEADER_BYTES, record.header_bytes // 4) if spare else 0
    return native.slot_bytes(record.data_bytes, record.header_bytes + more, record.storages)


def read_record(slot: memoryview) -> Record | None:
    """The commit record of a slot; None when the slot is not sealed, or the record does not fit into it."""
    if len(slot) < native.DATA_OFFSET:
        return None
    raw = bytes(slot[: _RECORD.size])
    magic, *fields, own = _RECORD.unpack(raw)
    if magic != native.MAGIC or own != native.checksum(raw[:-8]):
        return None
    record = Record(*fields)
    if record.header_bytes > MOST_HEADER_BYTES or max(record.data_bytes, record.storages) > len(slot):
        return None
    return record if slot_bytes(record) <= len(slot) else None


def write_record(slot: memoryview, record: Record) -> None:
    """Seal a slot in which every other byte is there. The magic number is written last and makes the record valid."""
    raw = _RECORD.pack(native.MAGIC, *record, 0)[:-8]
    raw += native.checksum(raw).to_bytes(8, "little")
    slot[8 : len(raw)] = raw[8:]
    slot[:8] = raw[:8]


def read_header(slot: memoryview, record: Record) -> StateHeader:
    """The header in a slot, with the checksums of its storages.

    Raises:
        SnapshotDamaged: the header is not the one that was sealed.
        CheckpointError: the header does not belong to this record.
    """
    if (found := sealed_header(slot, record)) is None:
        raise SnapshotDamaged("the header is damaged")
    text, table = found
    header = with_checksums(decode_header(text), tuple(array("Q", table)))
    if (header.step, header.incarnation, header.data_bytes) != record[:3]:
        raise CheckpointError("the header is of another snapshot")
    return header


def sealed_header(slot: memoryview, record: Record) -> tuple[bytes, bytes] | None:
    """The header in a slot and the table of its storages' checksums; None when they are not those that were sealed."""
    text = bytes(slot[record.header_at : record.header_at + record.header_bytes])
    table = bytes(slot[record.table_at : record.table_at + 8 * record.storages])
    sound = native.checksum(table, native.checksum(text)) == record.header_checksum
    return (text, table) if sound else None


def damaged_storages(
    memory: memoryview, header: StateHeader, threads: int = 1, *, begin: int = native.DATA_OFFSET
) -> list[int]:
    """The storages whose bytes do not have their checksums. The state's data begins at ``begin`` of ``memory``."""
    plan = array("Q")
    for entry in header.storages:
        plan.extend((begin + entry.offset, entry.nbytes))
    sums = native.checksums(memory, plan, threads)
    return [
        i
        for i, (entry, found) in enumerate(zip(header.storages, sums, strict=True))
        if entry.checksum != found
    ]


def unspoilt(keys: Iterable[Key], doubted: Key | None) -> frozenset[Key]:
    """The keys without those that follow ``doubted``, the first snapshot in which replicas differ that must not."""
    return frozenset(key for key in keys if not key.follows(doubted))


def newest_common(held: Iterable[AbstractSet[Key]]) -> Key | None:
    """The newest key that is in every set; None when there is no such key."""
    sets = list(held)
    return max(set[Key]().union(*sets[:1]).intersection(*sets[1:]), default=None)


def next_slot(
    keys: Sequence[Key | None], complete: Key | None, busy: AbstractSet[int] = frozenset()
) -> int | None:
    """The slot that the next snapshot may overwrite; None while there is none.

    Empty slots come first, then the one with the oldest key below ``complete``: a snapshot that is or may become the
    newest that all ranks hold is never given up.

    Args:
        keys: the key of the snapshot in each slot.
        complete: the newest key that every rank of the job holds.
        busy: slots that must not be overwritten now.
    """
    free = [index for index in range(len(keys)) if index not in busy]
    for index in free:
        if keys[index] is None:
            return index
    below = [
        (key, index)
        for index, key in enumerate(keys)
        if index in free and key is not None and complete is not None and key < complete
    ]
    return min(below)[1] if below else None


def kept_slots(
    keys: Sequence[Key | None],
    backed_up: Key | None,
    first: Key | None,
    waiting: AbstractSet[int] = frozenset(),
    doubted: Key | None = None,
) -> set[int]:
    """The slots not to be overwritten: those ``waiting`` for storage, the `newest_sound`, and those that backups need.

    Backups need the snapshot that is backed up now, and the oldest one from ``first`` on. What is kept leaves two more
    slots for the worker to take turns in; of several that would leave fewer, the sound one is kept first, then the one
    that is backed up.
    """
    kept = set(waiting)
    later = min(
        ((key, index) for index, key in enumerate(keys) if key and first and key >= first), default=None
    )
    backed = {index for index, key in enumerate(keys) if key and key == backed_up}
    sound = newest_sound(keys, doubted)
    for needed in ({sound} if sound is not None else set[int](), backed, {later[1]} if later else set[int]()):
        if len(keys) >= len(kept | needed) + 2:
            kept |= needed
    return kept


def newest_sound(keys: Sequence[Key | None], doubted: Key | None) -> int | None:
    """The slot with the newest snapshot before ``doubted``, which is of the same incarnation; None without either.

    Replicas are known to differ in the doubted one and those that follow it.
    """
    older = [
        (key, index)
        for index, key in enumerate(keys)
        if key and doubted and key < doubted and key.incarnation == doubted.incarnation
    ]
    return max(older)[1] if older else None


def free_slots(keys: Sequence[Key | None], needed: Collection[Key | None] | None = None) -> list[int]:
    """The slots that a snapshot from elsewhere may overwrite: empty ones, then the others, oldest first.

    Slots whose key is in ``needed`` are left out; None means that every key is needed.
    """
    empty = [index for index, key in enumerate(keys) if key is None]
    old = [] if needed is None else [(key, i) for i, key in enumerate(keys) if key and key not in needed]
    return empty + [index for _, index in sorted(old)]


def agree(
    offers: Mapping[int, AbstractSet[Key]],
    doubted: Key | None = None,
    unreadable: AbstractSet[int] = frozenset(),
) -> Key | None:
    """The snapshot that all ranks resume from: the newest that each of them offers; None when no rank offers any.

    One that follows ``doubted`` is the last resort. ``unreadable``: ranks that had more, which could not be read.

    Raises:
        CheckpointError: no snapshot is offered by all ranks; the message says which rank has what.
    """
    best = newest_common(unspoilt(keys, doubted) for keys in offers.values()) or newest_common(
        offers.values()
    )
    if best is not None or not any(offers.values()):
        return best
    by_offer: dict[tuple[tuple[Key, ...], bool], list[int]] = {}
    for rank, keys in sorted(offers.items()):
        by_offer.setdefault((tuple(sorted(keys)), not keys and rank in unreadable), []).append(rank)
    # Those that lack most come first: they are what keeps the job from a restore.
    least_first = sorted(by_offer.items(), key=lambda one: len(one[0][0]))
    told = [
        f"ranks {fold_ranks(ranks)}: "
        + (
            ", ".join(f"step {k.step} of incarnation {k.incarnation}" for k in keys)
            or f"nothing ({'damaged, or not to be read' if was_there else 'never saved, or lost'})"
        )
        for (keys, was_there), ranks in least_first[:_MOST_TOLD]
    ]
    raise CheckpointError("no snapshot is whole on every rank (" + "; ".join(told) + ")")
