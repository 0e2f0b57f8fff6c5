"""Programs that look at the job: whose turn it is, and how much of the controller's time they may take together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from keepstep import wire
from keepstep.wire.messages.looking import MOST_VIEWERS
from keepstep.wire.violation import Violation

logger = logging.getLogger("keepstep.control")

_REFUSAL = f"{MOST_VIEWERS} viewers look at this job, and no more may: close one of them"
_SHARE = 0.025  # the share of a core that the answers to all viewers together may take
_SAVED_S = 5.0  # the share of so many seconds may be used at once, as for all pages of a large job
_UNREAD_S = 30.0  # time after which a viewer has to have read its answer

Answer = Callable[[wire.Message], wire.Message]


class Viewers:
    """The viewers of a job. They are no peers of the controller's core: what they send cannot reach it.

    Each has one question at a time, which is answered when it is its turn and the answers have not taken more than
    2.5 % of a core. What nobody used of that in the last five seconds may be used at once.
    """

    def __init__(
        self,
        answer: Answer,
        later: Callable[[float, Callable[[], None]], object],
        *,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        """``later`` calls a function after some seconds; ``spent`` gives the seconds of CPU that were used so far."""
        self._answer, self._later, self._clock, self._spent = answer, later, clock, spent
        self._viewers: dict[int, int] = {}  # how many answers each has got, by connection
        self._asked: dict[int, tuple[wire.Connection, wire.Message]] = {}  # by connection, in their order
        self._free_s = float("-inf")  # when the next question may be answered
        self._waits = False

    def opened(self, viewer: wire.Connection) -> None:
        """Take a new viewer, or refuse it where there are too many."""
        if len(self._viewers) >= MOST_VIEWERS:
            viewer.send(wire.Refused(_REFUSAL))
            viewer.close("too many viewers")
        else:
            self._viewers[viewer.number] = 0

    def closed(self, viewer: wire.Connection) -> None:
        """Forget a viewer that has gone."""
        self._viewers.pop(viewer.number, None)
        self._asked.pop(viewer.number, None)

    def message(self, viewer: wire.Connection, message: wire.Message) -> None:
        """Take what a viewer says: a question is answered when it is its turn."""
        if viewer.number not in self._viewers or not isinstance(message, wire.Look | wire.Follow):
            return
        if viewer.unsent_bytes:
            viewer.refuse(Violation("slow-reader", f"{viewer.peer} asks again before it has read its answer"))
            return
        self._asked[viewer.number] = viewer, message
        if not self._waits:
            self._next()

    def _next(self) -> None:
        """Answer those whose turn it is."""
        self._waits = False
        wait_s = 0.0
        while self._asked and (wait_s := self._free_s - self._clock()) <= 0:
            viewer, question = self._asked.pop(next(iter(self._asked)))
            self._tell(viewer, question)
        if self._asked:
            self._waits = True
            self._later(wait_s, self._next)

    def _tell(self, viewer: wire.Connection, question: wire.Message) -> None:
        before_s = self._spent()
        try:
            viewer.send(self._answer(question))
        except Exception:
            logger.exception("a viewer's question is not answered")
            viewer.close("an error of keepstep itself")
        self._free_s = max(self._free_s, self._clock() - _SAVED_S) + (self._spent() - before_s) / _SHARE
        answers = self._viewers[viewer.number] = self._viewers[viewer.number] + 1
        if viewer.unsent_bytes:
            self._later(_UNREAD_S, lambda: self._give_up(viewer, answers))

    def _give_up(self, viewer: wire.Connection, answers: int) -> None:
        """Let a viewer go that has still not read this answer."""
        if viewer.unsent_bytes and self._viewers.get(viewer.number) == answers:
            viewer.refuse(Violation("slow-reader", f"{viewer.peer} does not read its answer"))
