"""The node's part in a hold: orders from the controller onto the ranks' pages, what the ranks answer back to it.

A lease on a page is renewed by the controller's messages only. When it dies, or this process does, the leases run out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec

from keepstep.core.errors import RingError
from keepstep.core.validation import RankFigures, TransferEndpoint
from keepstep.ring.orders import MOST_LEASE_S, OrdersPage, State
from keepstep.wire.messages import Held, HeldRank, Hold, Measured, Message, Release, RunTests

logger = logging.getLogger("keepstep.agent")

T = TypeVar("T")

_MOST_FIGURES = 1024  # of one rank
_MOST_TEXT = 256


class Holding:
    """Answers ``Hold``, ``RunTests`` and ``Release``; ``poll`` tells what changed meanwhile."""

    def __init__(
        self, pages: Mapping[int, str], node_rank: int, steps_at_end_of: Callable[[int, int], int | None]
    ) -> None:
        """``steps_at_end_of(rank, step)``: optimizer steps of the rank at the end of an iteration, None: unknown."""
        self._paths = dict(sorted(pages.items()))
        self._node_rank = node_rank
        self._steps_at_end_of = steps_at_end_of
        self._pages: dict[int, OrdersPage] = {}
        self._number = 0  # of the hold that was ordered last
        self._released = 0
        self._unable: dict[int, str] = {}
        self._told: tuple[HeldRank, ...] = ()
        self._tests: dict[int, int] = {}  # tests that were ordered, by rank
        self._untold: set[int] = set()  # ranks whose figures were not sent yet

    def receive(self, message: Message) -> list[Message]:
        """Carry out a message about holds; what to answer. Repeating one is harmless: it renews and tells again."""
        if isinstance(message, Hold):
            return self._hold(message)
        if isinstance(message, RunTests):
            return self._run_tests(message)
        if isinstance(message, Release):
            self._release(message.number)
        return []

    def held(self, rank: int, now_ns: int) -> bool:
        """Whether a hold is in force for this rank (also one that an agent before this one ordered)."""
        try:
            return self._page(rank).leased(now_ns)
        except (KeyError, RingError):
            return False

    def take_times(self, seconds: float) -> None:
        """Let the NCCL shims of all ranks take the GPU's times of their calls from now on."""
        until_ns = time.monotonic_ns() + int(seconds * 1e9)
        for rank in self._paths:
            with suppress(RingError):
                self._page(rank).take_times(until_ns)

    def poll(self) -> list[Message]:
        """What the ranks did since the last look; cheap while nothing is ordered."""
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

    def close(self) -> None:
        """Let go of the pages; what is held goes on."""
        for page in self._pages.values():
            page.release()
            page.close()
        self._pages.clear()

    def _hold(self, message: Hold) -> list[Message]:
        if message.number == self._released:
            return []  # overtaken by its own end
        if message.number != self._number:
            self._number, self._unable, self._told = message.number, {}, ()
            self._tests.clear()
            self._untold.clear()
            logger.info("hold %d is ordered at the end of step %d", message.number, message.step)
        lease_s = min(max(message.lease_s, 0.0), MOST_LEASE_S)
        lease_ns = time.monotonic_ns() + int(lease_s * 1e9)
        for rank in self._paths:
            boundary = self._steps_at_end_of(rank, message.step)
            try:
                if boundary is None or boundary <= 0:
                    self._unable[rank] = "its optimizer steps are not known yet"
                else:
                    self._page(rank).order(message.number, boundary, lease_ns)
            except RingError as error:
                self._unable[rank] = str(error)[:_MOST_TEXT]
        return [self._tell(self._states())]

    def _run_tests(self, message: RunTests) -> list[Message]:
        if message.number != self._number:
            return []
        for tests in message.ranks:
            if tests.rank not in self._paths:
                continue
            if self._tests.get(tests.rank) == message.tests:
                self._untold.add(tests.rank)  # asked once more: the answer may have been lost
                continue
            try:
                body: dict[str, Any] = asdict(tests)
                self._page(tests.rank).put_tests(message.tests, body)
                self._tests[tests.rank] = message.tests
                self._untold.add(tests.rank)
            except RingError as error:
                logger.warning("rank %d cannot be tested: %s", tests.rank, error)
        return self.poll()

    def _release(self, number: int) -> None:
        if number == self._number:
            logger.info("hold %d is over", number)
            self._released = number
            for page in self._pages.values():
                page.release()

    def _states(self) -> tuple[HeldRank, ...]:
        return tuple(self._state(rank) for rank in self._paths)

    def _state(self, rank: int) -> HeldRank:
        if rank in self._unable:
            return HeldRank(rank, State.UNABLE, why=self._unable[rank])
        page = self._page(rank)
        state = page.state(self._number)
        endpoint = None
        if state is State.HELD:
            known = next((one for one in self._told if one.rank == rank and one.state == State.HELD), None)
            endpoint = known.endpoint if known else _checked(page.report(self._number), TransferEndpoint)
        return HeldRank(rank, state, endpoint)

    def _tell(self, states: tuple[HeldRank, ...]) -> Held:
        self._told = states
        return Held(self._number, self._node_rank, states)

    def _figures(self, rank: int) -> RankFigures | None:
        figures = _checked(self._page(rank).report(self._tests[rank]), RankFigures)
        if figures is None or figures.rank != rank:
            return None
        if max(len(figures.devices), len(figures.links), len(figures.missing)) > _MOST_FIGURES:
            return None
        return figures

    def _page(self, rank: int) -> OrdersPage:
        page = self._pages.get(rank)
        if page is None:
            page = self._pages[rank] = OrdersPage(self._paths[rank])
        return page


def _checked(body: dict[str, Any] | None, kind: type[T]) -> T | None:
    """What a worker wrote, as what it should be; None when it is nothing of the kind."""
    if body is None:
        return None
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError:
        return None
