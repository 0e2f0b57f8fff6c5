"""How far this node's share of the job has come, as all parts of a launcher have to know it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from keepstep.launch.command.placement import Place

if TYPE_CHECKING:
    from keepstep.launch.controller.connection import Link

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an incarnation ended. ``number``: the signal to end what still runs with."""

    kind: str  # "finished" | "failed" | "signal" | "stopped" | "halted" | "alone"
    code: int
    reason: str
    number: signal.Signals = signal.SIGTERM


class EndedEarly(Exception):
    """A signal or the controller ended the job before there were workers."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class Course:
    """This node's place and its link to the controller, how its incarnation ends, and what has ended the job."""

    def __init__(self) -> None:
        self.place: Place | None = None
        self.link: Link | None = None
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.kill_now = asyncio.Event()
        self.signalled: signal.Signals | None = None
        self.job_over = asyncio.Event()  # the controller said Stop
        self.stop_code = 0
        self.stopped_by_hand = False
        self.has_parted = False  # said that our workers have ended, and waited for the others

    @property
    def incarnation(self) -> int:
        """The newest of this node; 0 before the first."""
        return self.place.incarnation if self.place else 0

    @property
    def together(self) -> bool:
        """Whether the nodes of the job begin again together, as the controller orders it."""
        return self.link is not None and self.link.member.begins_again

    def settle(self, outcome: Outcome) -> None:
        """The incarnation ends like this, unless it is settled already."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def signal_outcome(self) -> Outcome:
        """The end that the first signal brings; only after one."""
        number = self.signalled
        assert number is not None
        return Outcome("signal", 128 + number, f"signal {number.name}", number)

    def renew(self) -> None:
        """Another incarnation may follow: nobody knows how it ends."""
        self.outcome = asyncio.get_running_loop().create_future()

    async def until(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for ``work``.

        Raises:
            EndedEarly: a signal or the controller has ended the job first.
        """
        task = asyncio.get_running_loop().create_task(work)
        waits: list[asyncio.Future[Any]] = [task, self.outcome]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise EndedEarly(self.outcome.result())
