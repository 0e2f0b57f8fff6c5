"""Reads a link table: live, while its process writes it, or after its death, or from a saved copy.

The reader checks all that it reads: impossible rows are left out and counted.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import stat
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import RingError
from keepstep.core.link_counters import (
    COMPLETION,
    FOREIGN,
    LINK,
    WINDOW,
    CalledOperation,
    Communicator,
    LinkLosses,
    LinkSnapshot,
)
from keepstep.ring.link_table import (
    COMM_WORDS,
    COMMS,
    FEWEST,
    HEADER_WORDS,
    LINK_WORDS,
    MAGIC,
    MOST,
    VERSION,
    header_check,
    mix,
    total_bytes,
)

MOST_UNDER_WAY = 1 << 15  # steps of all operations that the plugin follows at once

Words = NDArray[np.uint64]
Rows = NDArray[Any]  # structured
Places = NDArray[np.int64]

_LATE_NS = 1_000_000_000  # a time further in the future is impossible
_KINDS = {1: "collective", 2: "p2p", 3: "copy-engine"}
_OPEN = 2
# Places of words: in the header, in a communicator, in a link.
_EPOCH, _ABI, _PID, _LOST = 9, 10, 11, 16
_STATE, _CHECK, _ID, _NAME, _OPENED, _LAST = 0, 1, 2, 5, 13, 24
_WINDOW = 16
_COUNTERS = {
    # Reading the counters in this order, none can be greater than the next one.
    "finished": 5, "completed": 4, "posted": 3, "ready": 2, "started": 1,
    "bytes": 6, "busy_ns": 7, "since_ns": 8, "posted_ns": 9, "completed_ns": 10, "moved_ns": 11, "abandoned": 12,
    "net_posted": 13, "net_completed": 14, "net_bytes": 15,
}  # fmt: skip
_UNITS = (1 << 48) - 1


class LinkReader:
    """Reads one table, live, after its writer's death, or from a saved copy (a plain file, read once)."""

    def __init__(self, where: str | int) -> None:
        """``where``: path or descriptor. Raises RingError for anything but a link table of this version."""
        try:
            descriptor = (
                os.dup(where)
                if isinstance(where, int)
                else os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            )
            try:
                memory = self._memory(descriptor)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise RingError(f"{where}: the link table cannot be read: {error}") from error
        words: Words = np.frombuffer(memory, np.uint64)
        links = int(words[2])
        if (
            int(words[0]) != MAGIC
            or int(words[1]) != VERSION
            or not FEWEST <= links <= MOST
            or 8 * len(words) != total_bytes(links)
            or int(words[4]) != header_check(links)
        ):
            raise RingError(f"{where}: is no link table of this version of keepstep")
        first = 8 * HEADER_WORDS
        self._header: Words = words[:HEADER_WORDS]
        self._comms: Words = np.ndarray((COMMS, COMM_WORDS), np.uint64, memory, first)
        self._links: Words = np.ndarray((links, LINK_WORDS), np.uint64, memory, first + self._comms.nbytes)

    @staticmethod
    def _memory(descriptor: int) -> mmap.mmap | bytes:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or not total_bytes(FEWEST) <= state.st_size <= total_bytes(MOST):
            raise ValueError("it has another size")
        if state.st_size % 8:
            raise ValueError("it is cut")
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if sealed:
            return mmap.mmap(descriptor, state.st_size, prot=mmap.PROT_READ)
        content = os.pread(descriptor, state.st_size, 0)  # a mapped file could be cut while it is read
        if len(content) != state.st_size:
            raise ValueError("it is cut")
        return content

    def snapshot(self, now_ns: int | None = None) -> LinkSnapshot:
        """The contents now. ``now_ns``: time on CLOCK_MONOTONIC; for a saved copy, when it was saved."""
        epoch = int(self._header[_EPOCH])
        states = _field(self._comms[:, _STATE], 0, 3)
        communicators = tuple(c for i in np.flatnonzero(states >= _OPEN) if (c := self._comm(int(i))))
        places = np.flatnonzero(_field(self._links[:, 0], 0, 1))
        keys: Words = self._links[places, 0]
        rows: Rows = np.zeros(len(places), LINK)
        for name, word in _COUNTERS.items():
            rows[name] = self._links[places, word]
        taken_ns = time.monotonic_ns() if now_ns is None else now_ns
        windows = self._windows(places, rows["completed"], taken_ns)
        rows["busy_ns"] <<= 8
        for name, shift, mask in (
            ("send", 1, 1),
            ("channel", 2, 255),
            ("comm", 10, 255),
            ("peer", 34, 0xFFFFFF),
        ):
            rows[name] = _field(keys, shift, mask)
        right = _sound(rows, taken_ns) & np.equal(self._links[places, 0], keys)
        generations = np.full(256, -1)
        for communicator in communicators:
            if communicator.is_open:
                generations[communicator.index] = communicator.generation & 0xFFFF
        generations[FOREIGN] = 0
        ours = generations[_field(keys, 10, 255)] == _field(keys, 18, 0xFFFF)
        if (
            int(self._header[_EPOCH]) != epoch or epoch & 1
        ):  # the table was wiped for another process meanwhile
            communicators, ours = (), np.zeros(len(places), np.bool_)
        return LinkSnapshot(
            taken_ns=taken_ns,
            pid=int(self._header[_PID]),
            abi=int(self._header[_ABI]),
            communicators=communicators,
            links=rows[right & ours],
            windows=windows[right & ours],
            losses=LinkLosses(*(int(word) for word in self._header[_LOST : _LOST + 6])),
            unsound=int(np.count_nonzero(ours & ~right)),
        )

    def _windows(self, places: Places, completed: Words, now_ns: int) -> Rows:
        tickets = _field(completed, 0, _UNITS)[:, None] - WINDOW + np.arange(WINDOW)
        index = _WINDOW + 2 * (tickets % WINDOW)
        times: Words = self._links[places[:, None], index]
        amounts: Words = self._links[places[:, None], index + 1]
        laps = tickets // WINDOW
        age = ((now_ns >> 8) - _field(times, 0, _UNITS)) & _UNITS
        good = (tickets >= 0) & np.not_equal(times, 0) & (age <= now_ns >> 8)
        good &= (_field(times, 48, 0xFFFF) == laps & 0xFFFF) & (_field(amounts, 56, 0xFF) == laps & 0xFF)
        found: Rows = np.zeros(tickets.shape, COMPLETION)
        found["time_ns"] = np.where(good, ((now_ns >> 8) - age) << 8, 0)
        found["bytes"] = np.where(good, _field(amounts, 0, 0xFFFFFFFF), 0)
        found["busy_ns"] = np.where(good, np.minimum(_field(amounts, 32, 0xFFFFFF) << 8, 0xFFFFFFFF), 0)
        return found

    def _comm(self, index: int) -> Communicator | None:
        """One communicator; None when it changed while it was read."""
        row = self._comms[index].copy()
        words = [int(word) for word in row]
        state = words[_STATE]
        if state != int(self._comms[index, _STATE]):
            return None
        generation = state >> 2
        identity = (0, "", -1, 0, 0)
        if words[_CHECK] == _checked(generation, words[_ID:_OPENED]):
            rank, size, nodes = words[3] & 0xFFFFFFFF, words[3] >> 32, words[4] & 0xFFFFFFFF
            identity = (words[_ID], _text(words[_NAME:_OPENED]), rank, size, nodes)
        return Communicator(
            *(index, generation, state & 3 == _OPEN),
            *identity,
            *words[_OPENED : _OPENED + 7],
            last=_last(generation, words[_LAST : _LAST + 13]),
        )


def _field(words: Words, shift: int, mask: int) -> Places:
    """The bits of each word that are left after a shift and a mask."""
    return ((words >> np.uint64(shift)) & np.uint64(mask)).astype(np.int64)


def _sound(rows: Rows, now_ns: int) -> NDArray[np.bool_]:
    """Mask of the links whose counters and times are possible."""
    sound = np.less_equal(rows["started"], _UNITS)
    sound &= np.less_equal(rows["started"] - rows["finished"], MOST_UNDER_WAY)
    for lower, upper in itertools.pairwise(("finished", "completed", "posted", "ready", "started")):
        sound &= np.less_equal(rows[lower], rows[upper])
    for name in ("since_ns", "posted_ns", "completed_ns", "moved_ns"):
        sound &= np.greater_equal(rows[name], 0) & np.less_equal(rows[name], now_ns + _LATE_NS)
    return sound


def _checked(generation: int, words: list[int]) -> int:
    """The checksum of a communicator's words, as the plugin writes it."""
    h = mix(MAGIC, generation)
    for word in words:
        h = mix(h, word)
    return h | 1


def _text(words: list[int]) -> str:
    """Words as text, up to the first zero byte."""
    raw = b"".join(word.to_bytes(8, "little") for word in words).split(b"\0", 1)[0]
    return "".join(chr(byte) if 32 <= byte <= 126 else "?" for byte in raw)


def _last(generation: int, words: list[int]) -> CalledOperation | None:
    """The last operation of a communicator; None when there is none, or it was being written."""
    if words[0] & 1 or words[1] != _checked(generation, words[2:]):
        return None
    seq, count, started_ns, how = words[9:13]
    kind = _KINDS.get(how >> 16 & 0xFF)
    if kind is None:
        return None
    function, datatype, algorithm, protocol = (_text(words[a:b]) for a, b in ((2, 4), (4, 6), (6, 8), (8, 9)))
    other = how >> 32
    return CalledOperation(
        *(kind, function, datatype, algorithm, protocol, seq, count, how & 0xFF, how >> 8 & 0xFF),
        other=other - (1 << 32) if other >= 1 << 31 else other,
        started_ns=started_ns,
    )
