"""Holds the training thread at an ordered optimizer step while its device is tested, then lets it go on.

A hold is a lease. It ends when it is called off, when nobody renews the lease, and after ``MOST_HELD_S`` in any case.
Anything that may block (a device that does not drain, a test) runs in another thread, so that nothing outlasts the
lease. The state of the training is not touched.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from keepstep.capture.recorder import Recorder, harmless
from keepstep.core.errors import RingError
from keepstep.core.events import Phase

if TYPE_CHECKING:
    from keepstep.capture.step_trace import StepTrace
    from keepstep.ring.orders import OrdersPage
    from keepstep.validate.worker import HeldTests

MOST_HELD_S = 30.0
# Words of the page as plain integers, which are faster to look up at every step.
ORDER, TRACE, COUNT = 1, 7, 20
_LOOK_S = 0.005
_NO_WORDS = [0] * (COUNT + 1)  # stand in for a page on which nothing is ever ordered


class Hold:
    """Holds of this rank. An optimizer step costs one word read and one written unless a hold is ordered."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._page: OrdersPage | None = None
        self.words: Any = _NO_WORDS  # words of the orders page
        self._opened = False
        self._done = 0  # number of the last hold that this rank has obeyed or missed
        self._trace: StepTrace | None = None  # made when the first trace is ordered
        self._traced = 0  # number of the last trace that was looked at

    def open(self) -> None:
        """Open the orders page that the launcher made for this rank; without one the rank cannot be held."""
        if self._opened:
            return
        self._opened = True
        where = os.environ.get("KEEPSTEP_ORDERS")
        if not where:
            return
        from keepstep.ring.orders import OrdersPage

        try:
            self._page = OrdersPage(where)
            self.words = self._page.words
        except RingError as error:
            self.recorder.stumbled(error)

    def renew(self) -> None:
        """Forget the page: the process plays another rank now, with a page of its own."""
        if self._trace is not None:
            self._trace.give_up("the job began again meanwhile")
            self._trace = None
        self._traced = 0
        self._page, self.words, self._opened, self._done = None, _NO_WORDS, False, 0

    @harmless
    def look(self, steps: int) -> None:
        """At the end of optimizer step ``steps``, counted from 1: begin or end a trace, wait here if a hold is ordered.

        Only called if ``words[ORDER]`` is not 0.
        """
        page = self._page
        if page is None:
            return
        if self._trace is not None or page.words[TRACE] != self._traced:
            self._look_at_trace(page, steps)
        order = page.words[ORDER]
        if order and order != self._done:
            self._obey(page, order, steps)

    def _look_at_trace(self, page: OrdersPage, steps: int) -> None:
        """Begin the trace that is ordered, or go on with the one that is under way.

        While it is, this is called at the end of every step, also where the agent has gone.
        """
        from keepstep.capture.step_trace import EveryStep, StepTrace

        if self._trace is None:
            self._traced = page.words[TRACE]
            self._trace = StepTrace.ordered(page, self.recorder, steps)
        elif self._trace.step(steps):
            self._trace = None
        self.words = page.words if self._trace is None else EveryStep(page.words)

    def _obey(self, page: OrdersPage, order: int, steps: int) -> None:
        from keepstep.ring.orders import State, Word

        if not page.leased(time.monotonic_ns()):
            return
        boundary = page.words[Word.BOUNDARY]
        if steps < boundary:
            page.say(order, State.COMING, steps)
            return
        self._done = order
        if steps > boundary:
            page.say(order, State.MISSED, steps)
            return
        record = self.recorder.phase(Phase.HOLD)
        try:
            self._wait(page, order, steps)
        finally:
            page.say(order, State.RELEASED, steps)
            if record is not None:
                record()

    def _wait(self, page: OrdersPage, order: int, steps: int) -> None:
        from keepstep.ring.orders import State
        from keepstep.validate.worker import HeldTests

        until_ns = time.monotonic_ns() + int(MOST_HELD_S * 1e9)
        drained = _beside(_drain())
        tests: HeldTests | None = None
        running: threading.Thread | None = None
        ran = 0
        try:
            while page.words[ORDER] == order:
                now_ns = time.monotonic_ns()
                if now_ns >= until_ns or not page.leased(now_ns):
                    return
                if tests is None:
                    if not drained.is_alive():
                        tests = HeldTests(int(os.environ.get("RANK", "0")))
                        page.report.put(order, tests.endpoint())
                        page.say(order, State.HELD, steps)
                elif running is None or not running.is_alive():
                    asked = page.tests.newest()
                    if asked is not None and asked[0] != ran:
                        ran = asked[0]
                        running = _beside(_reporting(tests, page, *asked))
                time.sleep(_LOOK_S)
        finally:
            if tests is not None:
                tests.stop()


def _reporting(tests: HeldTests, page: OrdersPage, number: int, body: dict[str, Any]) -> Callable[[], None]:
    return lambda: page.report.put(number, tests.run(body))


def _drain() -> Callable[[], None]:
    """A function that waits until the GPU has run everything queued on it, if the job uses one."""
    if not torch.cuda.is_initialized():
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.synchronize(device)


def _beside(work: Callable[[], None]) -> threading.Thread:
    def harmless() -> None:
        with suppress(Exception):  # no report is written then, and the agent waits for one only so long
            work()

    thread = threading.Thread(target=harmless, name="keepstep-hold", daemon=True)
    thread.start()
    return thread
