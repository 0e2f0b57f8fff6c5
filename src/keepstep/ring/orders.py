"""The orders page of one rank: shared memory through which its agent orders a hold, micro-batches, or a trace.

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
MOST_LEASE_S = 10.0  # the longest lease of a hold, whatever was ordered

_MAGIC = 0x4B53_4F52_4445_5231  # "KSORDER1"
_TESTS, _REPORT, _SHARES, _SPLIT = 4096, 36864, 65536, 245_760  # where each body begins
_TRACE, _TRACED = 1024, 2560
KNOCK = (1 << 64) - 1  # stands in a hold's place and is none: the rank is to look at the page


class Word(IntEnum):
    """Index of a 64-bit word."""

    MAGIC = 0
    ORDER = 1  # number of the hold that is ordered; 0: none; KNOCK: look at the page. Written last
    BOUNDARY = 2  # the hold begins after this many optimizer steps, as the ring counts them
    LEASE_NS = 3  # time on CLOCK_MONOTONIC up to which the hold may last
    TESTS = 4  # number of the tests that are ordered; 0: none
    TIMES_NS = 5  # time on CLOCK_MONOTONIC up to which the NCCL shim takes the GPU's times of calls; 0: never
    SHARES = 6  # number of the shares of micro-batches that are ordered; 0: none
    TRACE = 7  # number of the trace that is ordered; 0: none
    STATE = 16  # the rank's State in the hold with the number in ACK
    ACK = 17  # number of the hold that STATE is about
    STEPS = 18  # optimizer steps made when STATE was written
    REPORT = 19  # number of the order to test that the report on this page answers
    COUNT = 20  # optimizer steps made so far, written at the end of each step: outlives the worker
    SPLIT = 21  # how often the worker has reported how micro-batches are divided
    TRACED = 22  # number of the worker's report on a trace


class State(IntEnum):
    """How a rank stands to a hold that was ordered."""

    UNSEEN = 0  # the rank has not come to an optimizer step since the order
    COMING = 1  # the rank has seen the order
    HELD = 2
    MISSED = 3  # the rank was past the boundary when it saw the order
    RELEASED = 4  # the rank was held and goes on
    UNABLE = 5  # the rank cannot be held (a state that its agent reports, never on the page)


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


class Body:
    """The place of one body on a page; ``word`` announces the number that the body there belongs to."""

    def __init__(self, words: memoryview, memory: mmap.mmap, word: Word, begin: int, end: int) -> None:
        self._words, self._map, self._word = words, memory, word
        self._begin, self._most = begin, end - begin - 8

    def put(self, number: int, body: dict[str, Any]) -> None:
        """Write a body, then announce it: the word gets its number last. Raises RingError when it is too large."""
        text = json.dumps({"number": number, "body": body}, separators=(",", ":")).encode()
        begin = self._begin
        if len(text) > self._most:
            raise RingError(f"{len(text)} bytes do not fit on an orders page ({self._most})")
        self._map[begin + 8 : begin + 8 + len(text)] = text
        self._map[begin : begin + 8] = len(text).to_bytes(8, "little")
        self._words[self._word] = number

    def add(self, body: dict[str, Any]) -> None:
        """Write a body under the next number."""
        self.put(self._words[self._word] + 1, body)

    def newest(self, known: int = 0) -> tuple[int, dict[str, Any]] | None:
        """The body and the number that is announced for it; None for no number, or if that number is ``known``."""
        number = self._words[self._word]
        body = self.under(number) if number not in (0, known) else None
        return None if body is None else (number, body)

    def under(self, number: int) -> dict[str, Any] | None:
        """The body of this number; None when another is announced, or it is torn or damaged, which its number shows."""
        begin = self._begin
        length = int.from_bytes(self._map[begin : begin + 8], "little")
        if self._words[self._word] != number or length > self._most:
            return None
        try:
            found: Any = json.loads(self._map[begin + 8 : begin + 8 + length])
        except (ValueError, RecursionError):
            return None
        match found:
            case {"number": known, "body": dict()} if known == number:
                return cast("dict[str, Any]", found["body"])
            case _:
                return None


class OrdersPage:
    """One side's view of a page.

    While nothing is ordered, a step costs no more than reading ``words[Word.ORDER]``.

    Attributes:
        tests: written by the agent: tests for the rank to run while it is held.
        report: by the worker: its endpoint under the hold's number, or figures under the number of the tests.
        shares: by the agent: shares of micro-batches.
        split: by the worker: how it divides micro-batches from now on.
        trace: by the agent: steps to trace, see `capture.step_trace`.
        traced: by the worker: how far it is with that.
    """

    def __init__(self, where: str | int) -> None:
        """``where``: path or descriptor. Raises RingError for anything but an orders page of this version."""
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
        self.tests = Body(self.words, self._map, Word.TESTS, _TESTS, _REPORT)
        self.report = Body(self.words, self._map, Word.REPORT, _REPORT, _SHARES)
        self.shares = Body(self.words, self._map, Word.SHARES, _SHARES, _SPLIT)
        self.split = Body(self.words, self._map, Word.SPLIT, _SPLIT, PAGE_BYTES)
        self.trace = Body(self.words, self._map, Word.TRACE, _TRACE, _TRACED)
        self.traced = Body(self.words, self._map, Word.TRACED, _TRACED, _TESTS)

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
        """Agent: end the hold; a rank that is held goes on."""
        self.words[Word.ORDER] = 0

    def knock(self, wanted: bool) -> None:
        """Agent: have the rank look at the page at the end of its step, or not; where a hold is ordered it does so."""
        order = self.words[Word.ORDER]
        if order == (0 if wanted else KNOCK):
            self.words[Word.ORDER] = KNOCK if wanted else 0

    def take_times(self, until_ns: int) -> None:
        """Agent: have the NCCL shim take its calls' times on the GPU until then (CLOCK_MONOTONIC); 0: stop now."""
        self.words[Word.TIMES_NS] = until_ns

    def leased(self, now_ns: int) -> bool:
        """Whether a hold is ordered and its lease has not run out; a lease beyond the longest is none."""
        lease_ns = self.words[Word.LEASE_NS]
        return self.words[Word.ORDER] not in (0, KNOCK) and now_ns < lease_ns <= now_ns + int(
            MOST_LEASE_S * 1e9
        )

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
        """Worker: write how the rank stands to hold ``number``."""
        words = self.words
        words[Word.ACK] = 0
        words[Word.STATE] = state
        words[Word.STEPS] = steps
        words[Word.ACK] = number

    def close(self) -> None:
        """Let go of the memory."""
        self.words.release()
        self._map.close()
