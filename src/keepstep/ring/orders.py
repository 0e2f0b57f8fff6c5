"""The orders page of one rank: shared memory through which its agent orders a hold, or shares of micro-batches.

Like a ring it lives in a memfd of the launcher, reached as ``/proc/PID/fd/N``. The agent writes the upper half of the
words, the tests and the shares of micro-batches; the worker the lower half, its report and its split. Each word has one
writer; each body carries the number that it belongs to, so that one which is torn or old is refused by its reader.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from enum import IntEnum
from typing import Any, cast

from keepstep.core.errors import RingError

PAGE_BYTES = 262_144
MOST_LEASE_S = 10.0  # no lease is longer, whatever was ordered

_MAGIC = 0x4B53_4F52_4445_5231  # "KSORDER1"
_TESTS, _REPORT, _SHARES, _SPLIT = range(4)
_BODIES = (4096, 36864, 65536, 245_760, PAGE_BYTES)  # where each begins, after which bytes are the next one's


class Word(IntEnum):
    """Index of a 64-bit word."""

    MAGIC = 0
    ORDER = 1  # number of the hold that is ordered; 0: none. Written last
    BOUNDARY = 2  # hold after this many optimizer steps, as the ring counts them
    LEASE_NS = 3  # CLOCK_MONOTONIC up to which the hold may last
    TESTS = 4  # number of the tests that are ordered; 0: none
    TIMES_NS = 5  # CLOCK_MONOTONIC up to which the NCCL shim takes the GPU's times of calls; 0: not
    SHARES = 6  # number of the shares of micro-batches that are ordered; 0: none
    STATE = 16  # a State of hold ACK
    ACK = 17
    STEPS = 18  # optimizer steps when the state was written
    REPORT = 19  # number of the tests whose report is there
    COUNT = 20  # optimizer steps so far, written at the end of each: outlives the worker
    SPLIT = 21  # how often the worker has told how micro-batches are divided


class State(IntEnum):
    """How a rank stands to the hold it was ordered."""

    UNSEEN = 0  # it has not come to an optimizer step since
    COMING = 1  # it has seen the order
    HELD = 2
    MISSED = 3  # it was past the boundary when it saw the order
    RELEASED = 4  # it was held and goes on
    UNABLE = 5  # it cannot be held (said by its agent, never on the page)


def create() -> int:
    """A new page in a memfd, size sealed; the descriptor, which the caller closes. Raises OSError."""
    descriptor = os.memfd_create("keepstep-orders", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, PAGE_BYTES)
    os.pwrite(descriptor, _MAGIC.to_bytes(8, "little"), 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def steps_made(descriptor: int) -> int:
    """Launcher: the optimizer steps that the worker of a page has made, also when it is dead."""
    return int.from_bytes(os.pread(descriptor, 8, 8 * Word.COUNT), "little")


class OrdersPage:
    """One side's view of a page. ``words[Word.ORDER]`` is all that a step costs while nothing is ordered."""

    def __init__(self, where: str | int) -> None:
        """``where``: path or descriptor. Raises RingError for what is no page of ours."""
        try:
            descriptor = os.dup(where) if isinstance(where, int) else os.open(where, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_size != PAGE_BYTES:
                    raise RingError(f"{where}: is no orders page; it has another size")
                self._map = mmap.mmap(descriptor, PAGE_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RingError(f"{where}: the orders page cannot be opened: {error.strerror}") from error
        self.words = memoryview(self._map).cast("Q")
        if self.words[Word.MAGIC] != _MAGIC:
            raise RingError(f"{where}: is no orders page of this version of keepstep")

    def order(self, number: int, boundary: int, lease_ns: int) -> None:
        """Agent: hold at ``boundary``, or renew the lease of hold ``number``."""
        words = self.words
        words[Word.LEASE_NS] = lease_ns
        if words[Word.ORDER] != number:
            words[Word.ORDER] = 0
            words[Word.BOUNDARY] = boundary
            words[Word.TESTS] = 0
            words[Word.ORDER] = number

    def release(self) -> None:
        """Agent: whoever is held goes on."""
        self.words[Word.ORDER] = 0

    def take_times(self, until_ns: int) -> None:
        """Agent: the NCCL shim takes the GPU's times of its calls up to then (CLOCK_MONOTONIC); 0: no longer."""
        self.words[Word.TIMES_NS] = until_ns

    def leased(self, now_ns: int) -> bool:
        """Whether a hold is ordered and its lease has not run out; a lease beyond the longest is none."""
        lease_ns = self.words[Word.LEASE_NS]
        return self.words[Word.ORDER] != 0 and now_ns < lease_ns <= now_ns + int(MOST_LEASE_S * 1e9)

    def state(self, number: int) -> State:
        """Agent: how the rank stands to hold ``number``."""
        words = self.words
        if words[Word.ACK] != number:
            return State.UNSEEN
        try:
            return State(words[Word.STATE])
        except ValueError:
            return State.UNSEEN

    def say(self, number: int, state: State, steps: int) -> None:
        """Worker: how it stands to hold ``number``."""
        words = self.words
        words[Word.ACK] = 0
        words[Word.STATE] = state
        words[Word.STEPS] = steps
        words[Word.ACK] = number

    def put_tests(self, number: int, body: dict[str, Any]) -> None:
        """Agent: tests for the rank to run while it is held. Raises RingError when they are too many."""
        self._put(_TESTS, number, body)
        self.words[Word.TESTS] = number

    def tests(self) -> tuple[int, dict[str, Any]] | None:
        """Worker: the tests that are ordered, with their number."""
        number = self.words[Word.TESTS]
        body = self._get(_TESTS, number) if number else None
        return None if body is None else (number, body)

    def put_report(self, number: int, body: dict[str, Any]) -> None:
        """Worker: something for the agent (its endpoint under the hold's number, figures under the tests')."""
        self._put(_REPORT, number, body)
        self.words[Word.REPORT] = number

    def report(self, number: int) -> dict[str, Any] | None:
        """Agent: the worker's report under ``number``; None while there is none."""
        return self._get(_REPORT, number) if self.words[Word.REPORT] == number else None

    def put_shares(self, number: int, body: dict[str, Any]) -> None:
        """Agent: micro-batches for each replica. Raises RingError when they are too many."""
        self._put(_SHARES, number, body)
        self.words[Word.SHARES] = number

    def shares(self, told: int) -> tuple[int, dict[str, Any]] | None:
        """Worker: the shares that are ordered, with their number, unless that is ``told``."""
        number = self.words[Word.SHARES]
        body = self._get(_SHARES, number) if number not in (0, told) else None
        return None if body is None else (number, body)

    def put_split(self, body: dict[str, Any]) -> None:
        """Worker: how it divides micro-batches from now on."""
        number = self.words[Word.SPLIT] + 1
        self._put(_SPLIT, number, body)
        self.words[Word.SPLIT] = number

    def split(self, told: int) -> tuple[int, dict[str, Any]] | None:
        """Agent: what the worker has put, with its number, unless that is ``told``."""
        number = self.words[Word.SPLIT]
        body = self._get(_SPLIT, number) if number != told else None
        return None if body is None else (number, body)

    def close(self) -> None:
        """Let go of the memory."""
        self.words.release()
        self._map.close()

    def _put(self, place: int, number: int, body: dict[str, Any]) -> None:
        text = json.dumps({"number": number, "body": body}, separators=(",", ":")).encode()
        begin, most = _BODIES[place], _room(place)
        if len(text) > most:
            raise RingError(f"{len(text)} bytes do not fit on an orders page ({most})")
        self._map[begin + 8 : begin + 8 + len(text)] = text
        self._map[begin : begin + 8] = len(text).to_bytes(8, "little")

    def _get(self, place: int, number: int) -> dict[str, Any] | None:
        begin = _BODIES[place]
        length = int.from_bytes(self._map[begin : begin + 8], "little")
        if length > _room(place):
            return None
        try:
            found: Any = json.loads(self._map[begin + 8 : begin + 8 + length])
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        known = cast("dict[str, Any]", found)
        body = known.get("body")
        return (
            cast("dict[str, Any]", body) if known.get("number") == number and isinstance(body, dict) else None
        )


def _room(place: int) -> int:
    """Bytes that a body may have."""
    return _BODIES[place + 1] - _BODIES[place] - 8
