"""The copy engine in plain Python and numpy: the twin that ``keepstep.checkpoint._native`` is tested against.

The same bytes and checksums (``native/snapshot.hpp``, ``native/crc64.hpp``), ten times slower.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

MAGIC = 0x31544F4C53534B00  # "\0KSSLOT1"
DATA_OFFSET = 4096
URGENT, ON_DEVICE = 1, 2
_RECORD_BYTES = 64
_CHUNK_BYTES = 1 << 20
_POLYNOMIAL = 0x9A6C9329AC4BC9B5  # CRC-64/NVME, reflected: bit 63 stands for x^0
_ONE = 1 << 63
_MASK = (1 << 64) - 1
_LANES = 4096
_POPULATE_WRITE = 23

Words = npt.NDArray[np.uint64]


def _times_x(value: int) -> int:
    return value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)


def _tables() -> Words:
    """What each byte of a word does to the register, when eight are taken at once; shape (8, 256)."""
    first: list[int] = []
    for byte in range(256):
        for _ in range(8):
            byte = _times_x(byte)
        first.append(byte)
    rows = [first]
    for _ in range(7):
        rows.append([value >> 8 ^ first[value & 0xFF] for value in rows[-1]])
    return np.array(rows, np.uint64)


_TABLES = _tables()
_TABLE: list[int] = _TABLES[0].tolist()


def _times(a: int, b: int) -> int:
    product = 0
    for bit in range(63, -1, -1):
        if b >> bit & 1:
            product ^= a
        a = _times_x(a)
    return product


def _times_all(values: Words, by: int) -> Words:
    product = np.zeros_like(values)
    for bit in range(63, -1, -1):
        if by >> bit & 1:
            product ^= values
        values = values >> np.uint64(1) ^ (values & np.uint64(1)) * np.uint64(_POLYNOMIAL)
    return product


def _power(nbytes: int) -> int:
    """x to the number of bits: what so many more bytes do to a register."""
    shift, square = _ONE, _ONE
    for _ in range(8):
        square = _times_x(square)
    while nbytes:
        shift = _times(shift, square) if nbytes & 1 else shift
        square, nbytes = _times(square, square), nbytes >> 1
    return shift


def _register(data: memoryview) -> int:
    """The register after these bytes, from 0: long parts in lanes, side by side."""
    crc, done = 0, 0
    lane = len(data) // (8 * _LANES) * 8
    if lane:
        done = lane * _LANES
        crc = _of_lanes(data[:done], lane)
    for byte in data[done:]:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc


def _of_lanes(data: memoryview, lane_bytes: int) -> int:
    words: Any = np.frombuffer(data, "<u8")
    words = words.reshape(_LANES, lane_bytes // 8)
    crc = np.zeros(_LANES, np.uint64)
    low = np.uint64(0xFF)
    for column in np.ascontiguousarray(words.T):
        value = column ^ crc
        crc = _TABLES[7][value & low]
        for place in range(1, 8):
            crc ^= _TABLES[7 - place][value >> np.uint64(8 * place) & low]
    while len(crc) > 1:
        crc = _times_all(crc[0::2], _power(lane_bytes)) ^ crc[1::2]
        lane_bytes *= 2
    return int(crc[0])


def _bytes_of(data: Buffer) -> memoryview:
    return memoryview(data).cast("B")


def checksum(data: Buffer, before: int = 0) -> int:
    """See ``_native``."""
    view = _bytes_of(data)
    return ~(_times(~before & _MASK, _power(len(view))) ^ _register(view)) & _MASK


def combine(first: int, second: int, nbytes: int) -> int:
    """See ``_native``."""
    return _times(first, _power(nbytes)) ^ second


def _rows(plan: Buffer, fields: int) -> list[tuple[int, ...]]:
    numbers = array("Q")
    try:
        numbers.frombytes(_bytes_of(plan))
    except ValueError:
        raise ValueError("a plan of broken length") from None
    if len(numbers) % fields:
        raise ValueError("a plan of broken length")
    return list(zip(*[iter(numbers)] * fields, strict=True))


def _part(memory: memoryview, begin: int, nbytes: int, what: str = "buffer") -> memoryview:
    if begin > len(memory) or nbytes > len(memory) - begin:
        raise ValueError(f"a piece lies outside the {what}")
    return memory[begin : begin + nbytes]


def _at(address: int, nbytes: int) -> memoryview:
    return (
        memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")
    )


def _copy(target: memoryview, source: memoryview) -> int:
    """In parts, which keep other threads waiting; the checksum is of what stands in ``target`` then."""
    total = 0
    for at in range(0, len(target), _CHUNK_BYTES):
        part = target[at : at + _CHUNK_BYTES]
        part[:] = source[at : at + _CHUNK_BYTES]
        total = checksum(part, total)
    return total


def checksums(source: Buffer, plan: Buffer, threads: int = 1) -> list[int]:
    """See ``_native``."""
    del threads
    view = _bytes_of(source)
    return [checksum(part) for part in [_part(view, begin, count) for begin, count in _rows(plan, 2)]]


def copy_out(source: Buffer, plan: Buffer, threads: int = 1, fresh: bool = False) -> list[int]:
    """See ``_native``."""
    del threads, fresh
    view = _bytes_of(source)
    rows = _rows(plan, 3)
    parts = [_part(view, begin, nbytes) for begin, _, nbytes in rows]
    return [_copy(_at(row[1], row[2]), part) for row, part in zip(rows, parts, strict=True)]


def has_cuda() -> bool:
    """See ``_native``: never."""
    return False


def clear(slot: Buffer) -> None:
    """See ``_native``."""
    view = _part(_bytes_of(slot), 0, DATA_OFFSET)
    view[:8].cast("Q")[0] = 0
    view[:_RECORD_BYTES] = bytes(_RECORD_BYTES)


def populate(memory: Buffer, begin: int, nbytes: int) -> None:
    """See ``_native``. Where the kernel cannot, pages come with the first write."""
    part = _part(_bytes_of(memory), begin, nbytes)
    if nbytes:
        first = ctypes.addressof(ctypes.c_ubyte.from_buffer(part))
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), _POPULATE_WRITE)


def _aligned(count: int) -> int:
    return (count + 63) // 64 * 64


def _header_at(data_bytes: int) -> int:
    return DATA_OFFSET + _aligned(data_bytes)


def slot_bytes(data_bytes: int, header_bytes: int, storages: int) -> int:
    """See ``_native``."""
    return _header_at(data_bytes) + _aligned(header_bytes) + 8 * storages


class Snapshot:
    """See ``_native``."""

    def __init__(
        self,
        slot: Buffer,
        plan: Buffer,
        *,
        owners: object = None,
        header: bytes,
        data_bytes: int,
        step: int,
        incarnation: int,
        lock: int = -1,
        board: Buffer | None = None,
        board_index: int = 0,
        board_value: int = 0,
        threads: int = 1,
        stream: int = 0,
    ) -> None:
        del threads, stream
        self._process, self._owners = os.getpid(), owners
        self._slot = _bytes_of(slot)
        data = _part(self._slot, DATA_OFFSET, data_bytes)
        rows = _rows(plan, 4)
        _part(self._slot, 0, slot_bytes(data_bytes, len(header), len(rows)))
        if any(row[3] & ON_DEVICE for row in rows):
            raise RuntimeError("plain Python copies from no device")
        self._pieces = [
            (_at(address, nbytes), _part(data, offset, nbytes, "data"), bool(bits & URGENT))
            for address, offset, nbytes, bits in rows
        ]
        self._board = None
        if board is not None:
            self._board = _part(_bytes_of(board), 8 * board_index, 8).cast("Q"), board_value
        self._header, self._numbers, self._lock = header, (step, incarnation, data_bytes), lock
        self._sums = [0] * len(rows)
        self._urgent, self._over = threading.Event(), threading.Event()
        clear(self._slot)
        threading.Thread(target=self._run, name="keepstep-snapshot", daemon=True).start()

    def _run(self) -> None:
        for index in self._order(True):
            self._take(index)
        self._urgent.set()
        for index in self._order(False):
            self._take(index)
        self._seal()
        self._over.set()

    def _order(self, urgent: bool) -> Iterator[int]:
        return (index for index, piece in enumerate(self._pieces) if piece[2] is urgent)

    def _take(self, index: int) -> None:
        source, target, _ = self._pieces[index]
        self._sums[index] = _copy(target, source)

    def _seal(self) -> None:
        step, incarnation, data_bytes = self._numbers
        begin = _header_at(data_bytes)
        table = array("Q", self._sums).tobytes()
        self._slot[begin : begin + len(self._header)] = self._header
        begin += _aligned(len(self._header))
        self._slot[begin : begin + len(table)] = table
        record = struct.pack(
            "<7Q", MAGIC, step, incarnation, data_bytes, len(self._header), len(self._sums),
            checksum(table, checksum(self._header)),
        )  # fmt: skip
        record += struct.pack("<Q", checksum(record))
        self._slot[8:_RECORD_BYTES] = record[8:]
        self._slot[:8].cast("Q")[0] = MAGIC
        if self._lock >= 0:
            with suppress(OSError):
                fcntl.lockf(self._lock, fcntl.LOCK_UN)
        if self._board:
            self._board[0][0] = self._board[1]

    def wait(self, urgent: bool = False) -> None:
        """See ``_native``."""
        if os.getpid() != self._process:
            raise ValueError("this snapshot belongs to another process")
        (self._urgent if urgent else self._over).wait()

    def sums(self) -> Sequence[int]:
        """See ``_native``."""
        self.wait()
        return self._sums

    @property
    def finished(self) -> bool:
        """See ``_native``."""
        return self._over.is_set()

    def __del__(self) -> None:
        if getattr(self, "_process", 0) == os.getpid() and hasattr(self, "_over"):
            self._over.wait()
