"""How far this node's share of the job has come, and all parts of a launcher that act together on it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from keepstep.core.exit_codes import (
    TEMPORARY_FAILURE,
    UNUSABLE,
    Category,
    TemporaryKind,
    temporary_category,
)
from keepstep.core.finding import Finding
from keepstep.launch.command.placement import Place
from keepstep.launch.controller.hosting import Hosting
from keepstep.launch.local_run import LocalRun
from keepstep.launch.node.agent_process import Watching
from keepstep.launch.node.node_cache import NodeCache
from keepstep.launch.node.node_checks import NodeChecks
from keepstep.launch.signals import TERMINATED, Ending
from keepstep.launch.workers.incarnation import Crew

if TYPE_CHECKING:
    from keepstep.launch.controller.connection import Link

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an incarnation ended.

    ``finished``: all workers ended well. ``failed``: one did not. ``signal``: the launcher was sent one.
    ``stopped``: the controller ended the job. ``halted``: all nodes re-form. ``alone``: this node is cut off.
    """

    kind: Literal["finished", "failed", "signal", "stopped", "halted", "alone"]
    code: int  # exit code of the job if it ends with this incarnation
    reason: str  # why it ended, in words
    number: signal.Signals = signal.SIGTERM  # ends the workers that still run


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
        self.untold: list[Finding] = []  # failures that the controller is to be told once there is a link
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.kill_now = asyncio.Event()  # set when the operator is impatient: nothing is waited for
        self.signalled: signal.Signals | None = None  # the first signal that the launcher was sent
        self.ending: Ending | None = None  # what that signal means
        self.job_over = asyncio.Event()  # the controller has said that the job ends
        self.stop_code = 0  # exit code of the job, as the controller has said it
        self.stopped_by_hand = False  # an operator has ended the job
        self.stop_kind: TemporaryKind = (
            ""  # why it ends with TEMPORARY_FAILURE, as the controller has said it
        )
        # This node has begun to part: it says that its workers ended, and waits for the others.
        self.has_parted = False
        self.leaving: asyncio.Task[None] | None = None  # tells the controller that this node alone leaves

    @property
    def together(self) -> bool:
        """Whether the nodes of the job begin again together, as the controller orders it."""
        return self.link is not None and self.link.member.begins_again

    def settle(self, outcome: Outcome) -> None:
        """End the incarnation with this outcome, unless it has one already."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def signal_outcome(self) -> Outcome:
        """The outcome that the first signal brings; called only after one."""
        number = self.signalled
        assert number is not None
        ending = self.ending or Ending(number, f"signal {number.name}")
        return Outcome("signal", ending.exit_code, ending.text, number)

    def kind_of(self, outcome: Outcome) -> TemporaryKind:
        """Why the job ends with `TEMPORARY_FAILURE`, as this node or another was told; empty: it does not."""
        if outcome.code != TEMPORARY_FAILURE:
            return ""
        return self.ending.kind if self.ending else self.stop_kind

    def category_of(self, outcome: Outcome, code: int) -> Category:
        """What has ended the job, where this node knows its end. ``code``: its exit code."""
        if self.stopped_by_hand:
            return "stopped"
        if kind := self.kind_of(outcome):
            return temporary_category(kind)
        if outcome.kind == "signal":
            return "signal"
        if self.place is None and code == UNUSABLE:
            return "unusable"
        return "training" if code else "finished"

    def ended_by_scheduler(self, status: int) -> bool:
        """Whether the scheduler ends the job, and a worker that ended with ``status`` may have ended of that."""
        return bool(self.ending and self.ending.kind) and status in TERMINATED

    def renew(self) -> None:
        """Have no outcome again, because another incarnation may follow."""
        self.outcome = asyncio.get_running_loop().create_future()

    async def until(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for ``work``. Raises EndedEarly if a signal or the controller ends the job first."""
        task = asyncio.get_running_loop().create_task(work)
        waits: list[asyncio.Future[Any]] = [task, self.outcome]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise EndedEarly(self.outcome.result())


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that one launcher owns; each part is made once and lives as long as the launcher."""

    run: LocalRun
    course: Course
    crew: Crew
    controller: Hosting
    watching: Watching
    caching: NodeCache
    checks: NodeChecks
