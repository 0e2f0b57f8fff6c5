"""The event ring's writer in plain Python: the twin that ``keepstep.ring._native`` is tested against.

The same format (``native/ring_format.hpp``) and the same names, slower by far. Threads of the writing process wait for
each other here. `python_reader` is the other side.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, final

from tests.twins.ring.python_format import (
    ARENA_BYTES,
    ARENA_USED,
    BASE,
    BLOCK,
    CLAIM,
    CLOSED,
    COMMUNICATOR,
    DROPPED,
    ENTERED,
    EPOCH,
    FAILED,
    FIRST_STEP,
    FREED,
    GOLDEN,
    GROUPS,
    HALF,
    INCARNATION,
    LAPS,
    LATE,
    MASK,
    MONOTONIC,
    MOST_GROUPS,
    MOST_TEXT,
    NEXT,
    OFFSET,
    OVERFLOWED,
    P2P,
    PHASE,
    PID,
    PROBES,
    RANK_WORLD,
    REALTIME,
    RECEIVE,
    SEND,
    SITES,
    STREAMS,
    WRITERS,
    RingFile,
    claim_lives,
    fnv1a,
    own_claim,
    record_check,
)

from keepstep.core.errors import RingError

_LIMITS = (
    (0, 0xFF),
    (0, 0xFF),
    (-1 << 15, 0x7FFF),
    (-1 << 31, 0x7FFFFFFF),
    (0, MASK >> 1),
    (0, 0xFFFF),
    (0, HALF),
)  # of the numbers of a record

_NAMES = ("kind", "op", "group", "peer", "nbytes", "flags", "site")
_DEFAULTS = (0, 0, -1, -1, 0, 0, 0)

_one_at_a_time = threading.Lock()
os.register_at_fork(after_in_child=_one_at_a_time._at_fork_reinit)  # type: ignore[attr-defined]


@final
class Operation:
    """See ``_native``."""

    __slots__ = ("_writer", "index", "is_over", "key", "seq", "start_ns", "stream")

    def __init__(self, writer: RingWriter) -> None:
        self._writer, self.index, self.stream, self.start_ns = writer, -1, -1, 0
        self.is_over = False
        self.seq = self.key = 0

    @property
    def ended(self) -> bool:
        """See ``_native``."""
        return self.is_over

    def __call__(self, *_: object) -> None:
        self._writer.finish(self, 0)

    def fail(self, *_: object) -> None:
        """See ``_native``."""
        self._writer.finish(self, FAILED)

    def waiting(self, *_: object) -> None:
        """See ``_native``."""
        self._writer.note_waiting(self)


class RingWriter:
    """See ``_native``."""

    def __init__(
        self,
        where: str | os.PathLike[str] | int,
        *,
        rank: int,
        world_size: int,
        incarnation: int = 0,
        join: bool = False,
    ) -> None:
        self._has_claimed = False
        file = RingFile(where, os.O_RDWR)
        try:
            with file.errors():
                if not file.mappable:
                    raise RingError(
                        "not a live ring: only one made by create() can be written (this is a plain file)"
                    )
                self._layout = file.layout
                self._memory = mmap.mmap(file.descriptor, file.layout.total_bytes)
                self._words = memoryview(self._memory).cast("Q")
                self._pid = os.getpid()
                self._ids: dict[int, dict[bytes, int]] = {}
                self._phases = [0] * 256
                self._groups: dict[bytes, int] = {}
                # Groups that this writer has entered, by number: content, its place in the arena, the room there.
                self._entered: dict[int, tuple[bytes, int, int]] = {}
                self._retired: list[int] = []
                self._next_place = 0
                with _one_at_a_time:
                    if not (join and self._joined()):
                        self._claim(rank, world_size, incarnation)
                self._has_claimed = True
        finally:
            file.close()

    def __del__(self) -> None:
        if not self._has_claimed or os.getpid() != self._pid:
            return
        words = self._words
        words[CLOSED] = 1
        words[WRITERS] -= 1
        if words[WRITERS] & 0xFF == 0:
            words[CLAIM] = 0

    def _joined(self) -> bool:
        if self._words[CLAIM] != own_claim() or not self._words[WRITERS] & 0xFF:
            return False
        if self._words[CLOSED]:
            raise RingError("this process has closed it")
        if self._words[WRITERS] & 0xFF == 0xFF:
            raise RingError("this process has too many writers of it")
        self._words[WRITERS] += 1
        return True

    def _claim(self, rank: int, world_size: int, incarnation: int) -> None:
        words, mine = self._words, own_claim()
        if words[CLAIM] and claim_lives(words[CLAIM]):
            raise RingError(f"claimed by process {words[CLAIM] & HALF}, which still runs")
        words[CLAIM] = mine
        used, epoch = words[EPOCH] != 0, words[EPOCH] | 1
        words[EPOCH] = epoch
        if used:
            self._wipe()
            incarnation = max(incarnation, words[INCARNATION] + 1)
        words[BASE] = words[NEXT]
        words[RANK_WORLD] = rank & HALF | (world_size & HALF) << 32
        words[PID], words[INCARNATION] = self._pid, incarnation
        words[MONOTONIC], words[REALTIME] = time.monotonic_ns(), time.time_ns()
        words[CLOSED] = words[FIRST_STEP] = 0
        words[EPOCH] = epoch + 1
        words[WRITERS] = (mine * GOLDEN & MASK) >> 8 << 8 | 1

    def _wipe(self) -> None:
        layout = self._layout
        begin, end = layout.streams * 8, layout.arena * 8
        self._memory[begin:end] = bytes(end - begin)
        for slot in range(layout.slots, layout.slots + layout.records * 8, 8):
            self._words[slot] = 0
        self._words[ARENA_USED] = 0

    @property
    def writable(self) -> bool:
        """See ``_native``."""
        return os.getpid() == self._pid and not self._words[CLOSED]

    @property
    def dropped(self) -> int:
        """See ``_native``."""
        return self._words[DROPPED]

    @property
    def incarnation(self) -> int:
        """See ``_native``."""
        return self._words[INCARNATION]

    def close(self) -> None:
        """See ``_native``."""
        if self.writable:
            self._words[CLOSED] = 1

    def begins_at(self, step: int) -> None:
        """See ``_native``."""
        if self.writable:
            self._words[FIRST_STEP] = step

    def group(self, name: str, members: Sequence[int], backend: str, desc: str) -> int:
        """See ``_native``."""
        blob = b"".join(map(_text, (name, backend, desc))) + struct.pack(
            f"<{len(runs := _runs(members))}i", *runs
        )
        with _one_at_a_time:
            return self._enter_group(blob) if self.writable else -1

    def retire(self, group: int) -> None:
        """See ``_native``."""
        with _one_at_a_time:
            if group in self._entered and group not in self._retired:
                self._groups.pop(self._entered[group][0], None)
                self._retired.append(group)

    def _enter_group(self, blob: bytes) -> int:
        words, table = self._words, self._layout.groups
        if blob in self._groups:
            return self._groups[blob]
        while self._next_place < GROUPS:
            number = self._next_place
            entry = words[table + number]
            if entry == 0:
                entry = self._put(blob)
                if entry == 0:
                    break
                words[table + number] = entry
                self._note(number, blob, entry, _room(blob))
                self._next_place += 1
                return number
            number += ((entry & LAPS) >> 52) * GROUPS
            self._groups[self._blob_at(entry)] = number
            self._next_place += 1
            if blob in self._groups:
                return number
        return self._enter_again(blob)

    def _enter_again(self, blob: bytes) -> int:
        usable = [number for number in self._retired if number + GROUPS < MOST_GROUPS]
        roomy = [number for number in usable if self._entered[number][2] >= _room(blob)]
        if usable:
            old = (roomy or usable)[0]
            _, at, room = self._entered[old]
            if not roomy:
                entry, room = self._put(blob), _room(blob)
                at = (entry & ~ENTERED) >> 32
            if roomy or entry:
                place = self._layout.groups + old % GROUPS
                self._words[place] = 0
                self._free_streams(old)
                entry = self._write(blob, at)
                del self._entered[old]
                self._retired.remove(old)
                self._note(old + GROUPS, blob, entry, room)
                self._words[place] = entry | (old // GROUPS + 1) << 52
                return old + GROUPS
        self._words[OVERFLOWED] += 1
        return -1

    def _note(self, number: int, blob: bytes, entry: int, room: int) -> None:
        self._entered[number] = (blob, (entry & ~ENTERED) >> 32, room)
        self._groups[blob] = number

    def _free_streams(self, group: int) -> None:
        for stream in range(self._layout.streams, self._layout.groups, 8):
            key = self._words[stream]
            if key >> 63 and key >> 32 & 0xFFFF == group:
                for word in range(1, 6):
                    self._words[stream + word] = 0
                self._words[stream] = FREED

    def site(self, text: str) -> int:
        """See ``_native``."""
        return self._enter(self._layout.sites, 1, SITES, _text(text), 0)

    def start(self, *positional: Any, **named: Any) -> Operation:
        """See ``_native``: kind, op, group, peer, nbytes, flags, site."""
        operation = Operation(self)
        if not self.writable:
            return operation
        given = (*positional, *_DEFAULTS[len(positional) :])
        if named:
            known = dict(zip(_NAMES, given, strict=False)) | named
            given = tuple(known.values()) if not named.keys() & set(_NAMES[: len(positional)]) else ()
        with _one_at_a_time:
            if len(given) != len(_LIMITS) or not all(
                isinstance(value, int) and low <= value <= high
                for value, (low, high) in zip(given, _LIMITS, strict=True)
            ):
                self._words[DROPPED] += 1
            else:
                self._publish(operation, *given)
        return operation

    def _publish(
        self,
        operation: Operation,
        kind: int,
        op: int,
        group: int,
        peer: int,
        nbytes: int,
        flags: int,
        site: int,
    ) -> None:
        words, now = self._words, time.monotonic_ns()
        operation.start_ns = now
        operation.seq = self._next_seq(operation, kind, op, group, peer, now)
        index = words[NEXT]
        words[NEXT] = index + 1
        slot = self._slot(index)
        if words[slot] & 1 or words[slot] > 2 * index + 1:
            words[DROPPED] += 1
            return
        words[slot] = 2 * index + 1
        tag = self._tag(index)
        seq_peer = operation.seq | (peer & HALF) << 32
        thread_site = threading.get_native_id() & HALF | site << 32
        meta = group & 0xFFFF | kind << 16 | op << 24 | flags << 32
        meta |= record_check(index, now, nbytes, seq_peer, thread_site, meta) << 48
        for offset, value in enumerate((now, tag, tag, nbytes, seq_peer, thread_site, meta), 1):
            words[slot + offset] = value
        words[slot] = 2 * index + 2
        operation.index = index

    def _slot(self, index: int) -> int:
        return self._layout.slots + (index & (self._layout.records - 1)) * 8

    def _tag(self, index: int) -> int:
        return index // self._layout.records << 49 & MASK

    def _next_seq(self, operation: Operation, kind: int, op: int, group: int, peer: int, now: int) -> int:
        if kind == PHASE:
            self._phases[op] = self._phases[op] + 1 & HALF
            return self._phases[op]
        if group < 0 or kind == COMMUNICATOR:
            return 0
        stream = operation.stream = self._find_stream(kind, op, group, peer)
        if stream < 0:
            return 0
        operation.key = self._words[stream]
        self._words[stream + 1] += 1
        self._words[stream + 3] = now
        self._words[stream + 5] = op | kind << 32
        return self._words[stream + 1] & HALF

    def _find_stream(self, kind: int, op: int, group: int, peer: int) -> int:
        p2p = kind == P2P
        direction = {SEND: 1, RECEIVE: 2}.get(op, 3) if p2p else 0
        key = 1 << 63 | direction << 48 | group << 32 | (peer & HALF if p2p else HALF)
        place = (key * GOLDEN & MASK) >> 32
        chain = [self._layout.streams + (place + probe) % STREAMS * 8 for probe in range(PROBES)]
        for stream in chain:
            if self._words[stream] == key:
                return stream
            if self._words[stream] == 0:
                break
        for _ in range(2):
            for stream in chain:
                if self._words[stream] in (0, FREED):
                    self._words[stream] = key
                    return stream
            for number in self._retired:
                self._free_streams(number)
        self._words[OVERFLOWED] += 1
        return -1

    def finish(self, operation: Operation, failed: int) -> None:
        """Its end; ``failed``: 0, or FAILED."""
        if not self.writable:
            return
        with _one_at_a_time:
            if operation.is_over:
                return
            operation.is_over = True
            words, now, index = self._words, time.monotonic_ns(), operation.index
            if index >= 0:
                slot, tag = self._slot(index), self._tag(index)
                if words[slot] == 2 * index + 2 and words[slot + 2] == tag:
                    words[slot + 2] = tag | _after(now, operation.start_ns) | failed
                    block = self._layout.blocks + (index & (self._layout.records - 1)) // BLOCK
                    words[block] = words[block] + 1 & MASK
                else:
                    words[LATE] += 1
            if operation.stream >= 0 and words[operation.stream] == operation.key:
                words[operation.stream + 4] = now
                words[operation.stream + 2] += 1

    def note_waiting(self, operation: Operation) -> None:
        """From now on somebody waits for it."""
        index = operation.index
        if index < 0 or not self.writable:
            return
        with _one_at_a_time:
            slot, tag = self._slot(index), self._tag(index)
            if self._words[slot] == 2 * index + 2 and self._words[slot + 3] == tag:
                self._words[slot + 3] = tag | _after(time.monotonic_ns(), operation.start_ns)

    def _enter(self, table: int, first: int, slots: int, blob: bytes, none: int) -> int:
        if not self.writable:
            return none
        with _one_at_a_time:
            ids = self._ids.setdefault(table, {})
            while blob not in ids:
                number = first + len(ids)
                if number >= slots:
                    self._words[OVERFLOWED] += 1
                    return none
                place = self._words[table + number]
                if place == 0:
                    place = self._put(blob)
                    if place == 0:
                        self._words[OVERFLOWED] += 1
                        return none
                    self._words[table + number] = place
                    ids[blob] = number
                else:  # another writer of this process has entered one
                    ids[self._blob_at(place)] = number
            return ids[blob]

    def _blob_at(self, entry: int) -> bytes:
        at, size = self._layout.arena * 8 + ((entry & ~ENTERED & ~LAPS) >> 32) + 4, entry & HALF
        return self._memory[at : at + size]

    def _put(self, blob: bytes) -> int:
        at, nbytes = self._words[ARENA_USED], _room(blob)
        if at + nbytes > ARENA_BYTES:
            return 0
        self._words[ARENA_USED] = at + nbytes
        return self._write(blob, at)

    def _write(self, blob: bytes, at: int) -> int:
        nbytes = _room(blob)
        begin = self._layout.arena * 8 + at
        content = struct.pack("<I", fnv1a(blob)) + blob
        self._memory[begin : begin + nbytes] = content.ljust(nbytes, b"\0")
        return len(blob) | at << 32 | ENTERED


def _room(blob: bytes) -> int:
    return (4 + len(blob) + 7) // 8 * 8


def _after(now: int, start: int) -> int:
    """Time after the start, shifted by one so that 0 is free to mean "not yet"."""
    return min(max(now - start, 0) + 1, OFFSET)


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) > MOST_TEXT:
        encoded = encoded[:MOST_TEXT].decode("utf-8", "ignore").encode()
    return struct.pack("<I", len(encoded)) + encoded + bytes(-len(encoded) % 4)


def _runs(members: Sequence[int]) -> list[int]:
    """Members as first, stride, count of each run."""
    runs: list[int] = []
    at = 0
    while at < len(members):
        stride = members[at + 1] - members[at] if at + 1 < len(members) else 1
        end = at + 1
        while end < len(members) and members[end] - members[end - 1] == stride:
            end += 1
        runs += (members[at], stride, end - at)
        at = end
    return runs
