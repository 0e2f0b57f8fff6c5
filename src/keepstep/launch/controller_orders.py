"""What the controller orders a node to do, and what the node does when it hears nothing of it for too long."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from keepstep.core.log_lines import one_line
from keepstep.launch.command.job import Job
from keepstep.launch.controller.cut_off import CutOff
from keepstep.launch.controller.hosting import Hosting
from keepstep.launch.course import Course, Outcome
from keepstep.launch.local_run import Words
from keepstep.launch.node.node_cache import NodeCache
from keepstep.launch.node.watching import Watching
from keepstep.launch.workers.crew import Crew

if TYPE_CHECKING:
    from keepstep.launch.controller.connection import Link
    from keepstep.wire import Kill, Seal, Stop


class Orders:
    """Carries them out: halt or end the workers, end one that hangs, tell a step that all ranks here have sealed."""

    def __init__(
        self,
        job: Job,
        course: Course,
        crew: Crew,
        controller: Hosting,
        watching: Watching,
        caching: NodeCache,
        words: Words,
    ) -> None:
        self._job, self._course, self._crew = job, course, crew
        self._controller, self._watching, self._caching = controller, watching, caching
        self._words = words
        self._is_spare = False
        self._no_restart_told = False
        self._sealing: asyncio.Task[None] | None = None
        self._lease: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """The controller has said something."""
        assert self._course.link is not None
        member = self._course.link.member
        while member.kills:
            self._end_hung(member.kills.pop(0))
        if member.seal is not None:
            seal, member.seal = member.seal, None
            self._sealing = asyncio.get_running_loop().create_task(self._tell_sealed(seal))
        if member.stop is not None and not self._course.job_over.is_set():
            self._on_stop(member.stop)
        elif member.must_halt:
            self._course.settle(Outcome("halted", 0, "all nodes begin again"))
        elif member.is_spare and not self._is_spare:
            self._words.say(
                f"{self._job.node} is a spare: the job has its nodes, and gets this one when one is lost"
            )
        self._is_spare = member.is_spare

    def _end_hung(self, kill: Kill) -> None:
        course, workers = self._course, self._crew.workers
        assert course.place is not None
        if course.place.restarts >= self._job.max_restarts:
            if not self._no_restart_told:
                self._no_restart_told = True
                self._words.warn(f"rank {kill.rank}: {kill.reason}; no restart is left, so it is not ended")
        elif (
            workers is not None
            and not course.outcome.done()
            and not workers.kill(kill.rank, kill.process, one_line(kill.reason))
            and os.path.exists(f"/proc/{kill.process}")
        ):
            self._words.warn(f"rank {kill.rank}: {kill.reason}; process {kill.process} is no worker of ours")

    async def _tell_sealed(self, seal: Seal) -> None:
        place, outcome, link = self._course.place, self._course.outcome, self._course.link
        if link is None or place is None or place.incarnation != seal.incarnation or outcome.done():
            return
        self._watching.expect()
        if seal.warm and self._crew.restarts:
            await self._crew.restarts.warmed(lambda: self._watching.is_ready, outcome.done)
        step, why = await self._caching.next_sealed(place, outcome.done, alike=seal.alike, leave=seal.leave)
        if step is not None:
            link.sealed(seal.incarnation, step, why)

    def _on_stop(self, stop: Stop) -> None:
        course = self._course
        course.stop_code = 0 if self._is_spare else stop.exit_code
        course.stopped_by_hand = stop.by_operator
        course.job_over.set()
        self._controller.may_end()
        course.settle(Outcome("stopped", course.stop_code, stop.reason))

    def watch_lease(self, link: Link) -> None:
        """From now on: others may be given this node's place once it hears nothing of the controller."""
        self._lease = asyncio.get_running_loop().create_task(self._watch_lease(link))

    async def _watch_lease(self, link: Link) -> None:
        course, cut_off = self._course, CutOff(link.member)
        while True:
            await asyncio.sleep(1.0)
            why = cut_off.look(self._watching.steps_made, asyncio.get_running_loop().time())
            if why and not (course.outcome.done() or course.has_parted):
                self._words.warn(f"{why} ({self._controller.at}): the workers of this node end")
                kind, code = ("halted", 0) if course.together else ("alone", 1)
                course.settle(Outcome(kind, code, why))

    def unwatch_lease(self) -> None:
        """The node is about to leave by itself."""
        if self._lease:
            self._lease.cancel()
