"""Writes the controller's orders (holds, shares of micro-batches) to the ranks' pages, and returns the ranks' answers.

Only the controller's messages renew the lease on a page. If the controller or this process dies, the leases run out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any, TypeVar

import msgspec

from keepstep.core.errors import RingError
from keepstep.core.microbatch_shares import Split
from keepstep.core.validation import RankFigures, TransferEndpoint
from keepstep.ring.orders import MOST_LEASE_S, OrdersPage, State
from keepstep.wire.messages import (
    Held,
    HeldRank,
    Hold,
    Measured,
    Message,
    Release,
    RunTests,
    Shares,
    Splits,
)

logger = logging.getLogger("keepstep.agent")

T = TypeVar("T")

_MOST_FIGURES = 1024  # most results of tests that one rank may report
_MOST_TEXT = 256


class RankPages(dict[int, OrdersPage]):
    """The orders pages of a node by rank, each opened when it is first used. ``paths``: by rank.

    Opening raises RingError for a file that is no orders page, KeyError for a rank without one.
    """

    def __init__(self, paths: Mapping[int, str]) -> None:
        super().__init__()
        self.paths = dict(sorted(paths.items()))

    def __missing__(self, rank: int) -> OrdersPage:
        page = self[rank] = OrdersPage(self.paths[rank])
        return page

    def close(self) -> None:
        """Close all pages; the ranks keep what was ordered."""
        for page in self.values():
            page.close()
        self.clear()


class Holding:
    """Carries out ``Hold``, ``RunTests`` and ``Release`` on one node."""

    def __init__(
        self, pages: RankPages, node_rank: int, steps_at_end_of: Callable[[int, int], int | None]
    ) -> None:
        """``steps_at_end_of(rank, step)``: its optimizer steps until the end of that iteration; None: unknown."""
        self._pages, self._node_rank = pages, node_rank
        self._steps_at_end_of = steps_at_end_of
        self._number = 0  # number of the hold that was ordered last
        self._released = 0  # number of the hold that was ended last
        self._unable: dict[int, str] = {}
        self._told: tuple[HeldRank, ...] = ()
        self._tests: dict[int, int] = {}  # number of the tests that were ordered last, by rank
        self._untold: set[int] = set()  # ranks whose figures have not been sent yet

    def receive(self, message: Message) -> list[Message]:
        """Carry out a message about holds and return the answers. A repeated `Hold` renews the leases."""
        if isinstance(message, Hold):
            return self._hold(message)
        if isinstance(message, RunTests):
            return self._run_tests(message)
        if isinstance(message, Release) and message.number == self._number:
            logger.info("hold %d is over", message.number)
            self._released = message.number
            self.release()
        return []

    def held(self, rank: int, now_ns: int) -> bool:
        """Whether a hold is in force for this rank, even if it was ordered through an earlier agent process."""
        try:
            return self._pages[rank].leased(now_ns)
        except (KeyError, RingError):
            return False

    def take_times(self, seconds: float) -> None:
        """Have the NCCL shims of all ranks measure the GPU's times of their calls for this many seconds."""
        until_ns = time.monotonic_ns() + int(seconds * 1e9)
        for rank in self._pages.paths:
            with suppress(RingError):
                self._pages[rank].take_times(until_ns)

    def poll(self) -> list[Message]:
        """Messages about changes since the last call; costs nothing while no hold is ordered."""
        if not self._number:
            return []
        messages: list[Message] = []
        states = self._states()
        if states != self._told:
            messages.append(self._tell(states))
        for rank in sorted(self._untold):
            figures = self._figures(rank)
            if figures is not None:
                self._untold.discard(rank)
                messages.append(Measured(self._number, self._tests[rank], self._node_rank, figures))
        return messages

    def release(self) -> None:
        for page in self._pages.values():
            page.release()

    def _hold(self, message: Hold) -> list[Message]:
        if message.number == self._released:
            return []  # this message was overtaken by the end of its hold
        if message.number != self._number:
            self._number, self._unable, self._told = message.number, {}, ()
            self._tests.clear()
            self._untold.clear()
            logger.info("hold %d is ordered at the end of step %d", message.number, message.step)
        lease_s = min(max(message.lease_s, 0.0), MOST_LEASE_S)
        lease_ns = time.monotonic_ns() + int(lease_s * 1e9)
        for rank in self._pages.paths:
            boundary = self._steps_at_end_of(rank, message.step)
            try:
                if boundary is None or boundary <= 0:
                    self._unable[rank] = "its optimizer steps are not known yet"
                else:
                    self._pages[rank].order(message.number, boundary, lease_ns)
            except RingError as error:
                self._unable[rank] = str(error)[:_MOST_TEXT]
        return [self._tell(self._states())]

    def _run_tests(self, message: RunTests) -> list[Message]:
        if message.number != self._number:
            return []
        for tests in message.ranks:
            if tests.rank not in self._pages.paths:
                continue
            if self._tests.get(tests.rank) == message.tests:
                self._untold.add(tests.rank)  # the order is repeated because the answer may have been lost
                continue
            try:
                self._pages[tests.rank].tests.put(message.tests, asdict(tests))
                self._tests[tests.rank] = message.tests
                self._untold.add(tests.rank)
            except RingError as error:
                logger.warning("rank %d cannot be tested: %s", tests.rank, error)
        return self.poll()

    def _states(self) -> tuple[HeldRank, ...]:
        return tuple(self._state(rank) for rank in self._pages.paths)

    def _state(self, rank: int) -> HeldRank:
        if rank in self._unable:
            return HeldRank(rank, State.UNABLE, why=self._unable[rank])
        page = self._pages[rank]
        state = page.state(self._number)
        endpoint = None
        if state is State.HELD:
            told = next((one for one in self._told if one.rank == rank and one.state == State.HELD), None)
            endpoint = told.endpoint if told else _checked(page.report.under(self._number), TransferEndpoint)
        return HeldRank(rank, state, endpoint)

    def _tell(self, states: tuple[HeldRank, ...]) -> Held:
        self._told = states
        return Held(self._number, self._node_rank, states)

    def _figures(self, rank: int) -> RankFigures | None:
        figures = _checked(self._pages[rank].report.under(self._tests[rank]), RankFigures)
        if figures is None or figures.rank != rank:
            return None
        counts = len(figures.devices), len(figures.links), len(figures.missing)
        return figures if max(counts) <= _MOST_FIGURES else None


class Microbatches:
    """Micro-batches of the ranks of one node: tells how ranks divide them, and orders other shares."""

    def __init__(self, pages: RankPages, node_rank: int) -> None:
        self._pages, self._node_rank = pages, node_rank
        self._told: dict[int, int] = {}  # number of the split that was sent last, by rank

    def again(self) -> None:
        """Report all splits again, because the controller is a new one."""
        self._told.clear()

    def look(self) -> Splits | None:
        """The splits that ranks have changed since the last call, if any."""
        found: list[Split] = []
        for rank in self._pages.paths:
            try:
                told = self._pages[rank].split.newest(self._told.get(rank, 0))
            except RingError:
                continue
            split = _checked(told[1] | {"rank": rank}, Split) if told is not None else None
            # A split that is incomplete or impossible is looked at again.
            if told and split and all(0 <= getattr(split, one.name) < 1 << 62 for one in fields(split)):
                found.append(split)
                self._told[rank] = told[0]
        return Splits(self._node_rank, tuple(found)) if found else None

    def order(self, shares: Shares) -> None:
        """Write the ordered shares to the page of their rank, if it is on this node."""
        if shares.rank not in self._pages.paths:
            return
        try:
            body = {"incarnation": shares.incarnation, "shares": list(shares.shares)}
            self._pages[shares.rank].shares.put(shares.number, body)
        except RingError as error:
            logger.warning("rank %d is not told its micro-batches: %s", shares.rank, error)


def _checked(body: dict[str, Any] | None, kind: type[T]) -> T | None:
    """The content that a worker wrote, as an object of ``kind``; None if it cannot be one."""
    if body is None:
        return None
    try:
        return msgspec.convert(body, kind)
    except (msgspec.ValidationError, UnicodeError):  # half a character pair is no text
        return None
