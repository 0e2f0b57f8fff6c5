"""The event ring's reader in plain Python, with numpy: see `python_writer`. Trusts no word of the ring."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.twins.ring.python_format import (
    ARENA_BYTES,
    BASE,
    CLAIM,
    CLOSED,
    DROPPED,
    EPOCH,
    FAILED,
    FIRST_STEP,
    FLAG_FAILED,
    GOLDEN,
    GROUPS,
    HALF,
    INCARNATION,
    LAPS,
    LATE,
    MASK,
    MIX,
    MONOTONIC,
    MOST_MEMBERS,
    MOST_TEXT,
    MOST_TICKET,
    NEXT,
    OFFSET,
    OVERFLOWED,
    PID,
    RANK_WORLD,
    REALTIME,
    SITES,
    STREAMS,
    TAG,
    RingFile,
    checked_layout,
    claim_lives,
    fnv1a,
)

from keepstep.core.errors import RingError
from keepstep.ring.reader import RECORD, STREAM

Words = npt.NDArray[np.uint64]


class Reader:
    """See ``_native``."""

    def __init__(self, where: str | os.PathLike[str] | int) -> None:
        file = RingFile(where, os.O_RDONLY)
        try:
            with file.errors():
                self._layout, self._live = file.layout, file.mappable
                if self._live:
                    memory: Any = mmap.mmap(file.descriptor, file.layout.total_bytes, prot=mmap.PROT_READ)
                else:
                    memory = _whole(file)
        finally:
            file.close()
        self._words = _words_of(memory, file.layout.total_bytes)
        self._slots = self._words[self._layout.slots :].reshape(-1, 8)
        self._epoch = self._word(EPOCH)
        self._cursor = max(self._base(), self._oldest(self._written()))
        self._pending: list[int] = []  # handed out as started, end not seen
        self._gaps: list[int] = []  # taken but not published when this reader came by
        self._guard = threading.Lock()

    def _word(self, place: int) -> int:
        return int(self._words[place])

    def _written(self) -> int:
        return min(self._word(NEXT), MOST_TICKET)

    def _base(self) -> int:
        return min(self._word(BASE), MOST_TICKET)

    def _oldest(self, after: int) -> int:
        return max(0, after - self._layout.records)

    def header(self) -> tuple[int, int, int, int, int, int, int, bool, int, int, int, int, int]:
        """See ``_native``."""
        for _ in range(100):
            epoch = self._word(EPOCH)
            rank_world = self._word(RANK_WORLD)
            found = (
                -1 if epoch == 0 else _signed(rank_world & HALF),
                _signed(rank_world >> 32),
                *(self._word(place) for place in (PID, INCARNATION, MONOTONIC, REALTIME)),
                self._layout.records,
                self._word(CLOSED) != 0,
                self._word(DROPPED),
                self._written(),
                *(self._word(place) for place in (LATE, OVERFLOWED, FIRST_STEP)),
            )
            if epoch & 1 == 0 and self._word(EPOCH) == epoch:
                break
        return found  # type: ignore[return-value]

    def writer_lives(self) -> bool:
        """See ``_native``."""
        return self._live and claim_lives(self._word(CLAIM))

    def poll(
        self, apart: int = 0, kept: int = 0
    ) -> tuple[bytearray | None, bytearray | None, int, int, bytearray | None]:
        """See ``_native``."""
        *parts, lost, unfinished = self._poll()
        started, finished = (np.frombuffer(b"".join(part), RECORD) for part in parts)
        own = finished["flags"] & apart == 0
        told = (
            (started, started["flags"] & apart == 0),
            (finished, own),
            (finished, ~own & (finished["flags"] & kept != 0)),
        )
        # As plain bytes, since a copy by fields leaves what lies between them as it was.
        begun, ended, others = (
            bytearray(rows.view(f"V{RECORD.itemsize}")[which].tobytes()) or None for rows, which in told
        )
        return begun, ended, lost, unfinished, others

    def _poll(self) -> tuple[list[bytes], list[bytes], int, int]:
        with self._guard:
            lost = unfinished = 0
            epoch = self._word(EPOCH)
            if epoch & 1:
                return [], [], 0, 0
            if (
                epoch != self._epoch
            ):  # a new process took the ring: what was not read of the old one's is gone
                lost += len(self._gaps) + max(0, self._base() - self._cursor)
                unfinished += len(self._pending)
                self._gaps, self._pending = [], []
                self._cursor, self._epoch = max(self._cursor, self._base()), epoch
            after = self._written()
            finished, self._pending, gone = self._revisited(self._pending)
            unfinished += gone
            started: list[bytes] = []
            gaps, self._gaps = self._gaps, []
            lost += self._take(gaps, after, started, finished)
            oldest = self._oldest(after)
            if oldest > self._cursor:
                lost += oldest - self._cursor
                self._cursor = oldest
            lost += self._take(range(self._cursor, after), after, started, finished)
            self._cursor = max(self._cursor, after)
            return started, finished, lost, unfinished

    def _revisited(self, pending: list[int]) -> tuple[list[bytes], list[int], int]:
        rows, _ = self._read(pending)
        there = {int(ticket): row for ticket, row in zip(rows["ticket"].tolist(), rows, strict=True)}
        ended = [index for index in pending if index in there and there[index]["end_ns"]]
        still = [index for index in pending if index in there and not there[index]["end_ns"]]
        return [there[index].tobytes() for index in ended], still, len(pending) - len(there)

    def _take(self, indices: Sequence[int], after: int, started: list[bytes], finished: list[bytes]) -> int:
        """Hand out what is there of these; how many are lost. What is not published yet is kept as a gap."""
        rows, not_yet = self._read(indices)
        if len(rows):
            started.append(rows.tobytes())
            ended = rows["end_ns"] != 0
            finished.append(_packed(rows, ended))
            self._pending += rows["ticket"][~ended].tolist()
        nobody_writes = not self.writer_lives() if not_yet and isinstance(indices, list) else not self._live
        kept = [index for index in not_yet if not nobody_writes and index + 2 * self._layout.records > after]
        self._gaps += kept
        return len(indices) - len(rows) - len(kept)

    def _read(self, indices: Sequence[int]) -> tuple[npt.NDArray[np.void], list[int]]:
        """The records that are there, whole and undamaged, and the tickets that are not published yet."""
        index = np.fromiter(indices, np.uint64, len(indices))
        place = index & np.uint64(self._layout.records - 1)
        words = self._slots[place]  # a copy; the ticket is looked at again after it
        again = self._slots[place, 0]
        published = 2 * index + np.uint64(2)
        ticket, start, end, wait, nbytes, seq_peer, thread_site, meta = words.T
        not_yet = index[ticket < published].tolist()
        tag = index // np.uint64(self._layout.records) << np.uint64(49)
        well = (ticket == published) & (again == published)
        well &= meta >> np.uint64(48) == _checks(index, start, nbytes, seq_peer, thread_site, meta)
        well &= (end & np.uint64(TAG) == tag) & (wait & np.uint64(TAG) == tag)
        rows = np.zeros(int(well.sum()), RECORD)
        half, offset = np.uint64(HALF), np.uint64(OFFSET)

        def at(word: Words) -> Words:
            after = word & offset
            return np.where(after == 0, np.uint64(0), start + after - np.uint64(1))

        fields: dict[str, Callable[[], Words]] = {
            "ticket": lambda: index,
            "start_ns": lambda: start,
            "end_ns": lambda: at(end),
            "wait_ns": lambda: at(wait),
            "bytes": lambda: nbytes,
            "seq": lambda: seq_peer & half,
            "peer": lambda: seq_peer >> np.uint64(32),
            "thread": lambda: thread_site & half,
            "site": lambda: thread_site >> np.uint64(32),
            "group": lambda: meta & np.uint64(0xFFFF),
            "kind": lambda: meta >> np.uint64(16) & np.uint64(0xFF),
            "op": lambda: meta >> np.uint64(24) & np.uint64(0xFF),
            "flags": lambda: (
                meta >> np.uint64(32) & np.uint64(0xFFFF)
                | np.where(end & np.uint64(FAILED), np.uint64(FLAG_FAILED), np.uint64(0))
            ),
        }
        for name, values in fields.items():
            rows[name] = values()[well].astype(RECORD[name])
        return rows, not_yet

    def snapshot(self, only_in_flight: bool) -> bytearray:
        """See ``_native``."""
        after = self._written()
        rows, _ = self._read(range(max(self._base(), self._oldest(after)), after))
        return bytearray(_packed(rows, (rows["end_ns"] == 0) | (not only_in_flight)))

    def streams(self) -> bytearray:
        """See ``_native``."""
        begin = self._layout.streams
        table = self._words[begin : begin + STREAMS * 8].reshape(-1, 8).copy()
        table = table[(table[:, 0] >> np.uint64(63) == 1) & (table[:, 1] != 0)]
        key, started, completed, last_start, last_end, last_op = table.T[:6]
        rows = np.zeros(len(table), STREAM)
        for name, values in (
            ("started", started),
            ("completed", np.minimum(completed, started)),
            ("last_start_ns", last_start),
            ("last_end_ns", last_end),
            ("peer", key & np.uint64(HALF)),
            ("group", key >> np.uint64(32) & np.uint64(0xFFFF)),
            ("kind", last_op >> np.uint64(32) & np.uint64(0xFF)),
            ("op", last_op & np.uint64(0xFF)),
        ):
            rows[name] = values.astype(STREAM[name])
        return bytearray(np.sort(rows, order=["group", "kind", "peer", "op"]).tobytes())

    def groups(self) -> list[tuple[str, tuple[int, ...], str, str] | None]:
        """See ``_native``."""
        found: dict[int, tuple[str, tuple[int, ...], str, str]] = {}
        room = MOST_MEMBERS
        for place in range(GROUPS):
            entry = self._word(self._layout.groups + place)
            if entry == 0:
                continue
            number = ((entry & LAPS) >> 52) * GROUPS + place
            group = _group_of(self._blob(entry & ~LAPS), room)
            found[number] = group or (f"damaged group {number}", (), "", "")
            room -= len(found[number][1])
        return [found.get(number) for number in range(max(found, default=-1) + 1)]

    def sites(self) -> list[str]:
        """See ``_native``."""
        found = [""]
        for number in range(1, SITES):
            place = self._word(self._layout.sites + number)
            if place == 0:
                break
            text = _taken(self._blob(place), 0)
            found.append(text[0].decode("utf-8", "replace") if text else "")
        return found

    def _blob(self, place: int) -> bytes:
        """Empty where it is damaged."""
        size, at = place & HALF, (place & MASK >> 1) >> 32
        if at % 8 or at + (4 + size + 7) // 8 * 8 > ARENA_BYTES:
            return b""
        begin = self._layout.arena + at // 8
        content = self._words[begin : begin + (4 + size + 7) // 8].tobytes()
        blob = content[4 : 4 + size]
        return blob if struct.unpack("<I", content[:4])[0] == fnv1a(blob) else b""

    def content(self) -> bytearray:
        """See ``_native``."""
        words = self._words.copy()
        slots = words[self._layout.slots :].reshape(-1, 8)
        torn = (slots[:, 0] != self._slots[:, 0]) | (slots[:, 0] & np.uint64(1) != 0)
        slots[torn] = 0
        return bytearray(words.tobytes())


def _words_of(memory: Any, nbytes: int) -> Any:
    return np.frombuffer(memory, np.uint64, nbytes // 8)


def _packed(rows: Any, which: Any) -> bytes:
    return rows.view(f"V{rows.itemsize}")[which].tobytes()  # numpy would leave out what lies between fields


def _whole(file: RingFile) -> bytes:
    parts: list[bytes] = []
    done = 0
    while done < file.layout.total_bytes:
        part = os.pread(file.descriptor, file.layout.total_bytes - done, done)
        if not part:
            raise RingError(f"truncated ring: {done} of {file.layout.total_bytes} bytes")
        parts.append(part)
        done += len(part)
    whole = b"".join(parts)
    if checked_layout(whole[:40], file.layout.total_bytes).records != file.layout.records:
        raise RingError("torn ring: it changed while it was read")
    return whole


def _checks(
    index: Words, start: Words, nbytes: Words, seq_peer: Words, thread_site: Words, meta: Words
) -> Words:
    """``record_check`` of many."""
    k = np.uint64(GOLDEN)
    h = (index + np.uint64(1)) * k
    meta = meta & np.uint64(MASK >> 16)
    for value, by in ((start, 29), (nbytes, 7), (seq_peer, 41), (thread_site, 53), (meta, 17)):
        turned = value * k
        h = h ^ (turned << np.uint64(by) | turned >> np.uint64(64 - by))
    return h * np.uint64(MIX) >> np.uint64(48)


def _signed(half: int) -> int:
    return half - (1 << 32) if half >> 31 else half


def _taken(blob: bytes, at: int) -> tuple[bytes, int] | None:
    """A text at ``at``, and where it ends; None: there is none."""
    if len(blob) - at < 4:
        return None
    size = int.from_bytes(blob[at : at + 4], "little")
    end = at + 4 + (size + 3) // 4 * 4
    return (blob[at + 4 : at + 4 + size], end) if size <= MOST_TEXT and end <= len(blob) else None


def _group_of(blob: bytes, room: int) -> tuple[str, tuple[int, ...], str, str] | None:
    texts: list[str] = []
    at = 0
    for _ in range(3):
        found = _taken(blob, at)
        if found is None:
            return None
        texts.append(found[0].decode("utf-8", "replace"))
        at = found[1]
    if (len(blob) - at) % 12:
        return None
    members: list[int] = []
    for first, stride, count in struct.iter_unpack("<3i", blob[at:]):
        last = first + stride * (count - 1)
        if not 1 <= count <= room - len(members) or not -1 << 31 <= last < 1 << 31:
            return None
        members += range(first, last + (1 if stride >= 0 else -1), stride) if stride else [first] * count
    return texts[0], tuple(members), texts[1], texts[2]
