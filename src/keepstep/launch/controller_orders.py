"""What the controller orders a node to do, and what the node does when it hears nothing of it for too long."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from keepstep.core.exit_codes import TEMPORARY_FAILURE
from keepstep.core.log_lines import one_line
from keepstep.launch.course import Outcome, Parts

if TYPE_CHECKING:
    from keepstep.launch.controller.connection import Link
    from keepstep.launch.controller.member import Member
    from keepstep.wire import Imports, Kill, Seal, Stop

LONG_STILL_S = 60.0
_USUAL_TIMES = 4
_STALE_S = 10.0  # age of what was seen of a process, beyond which it is not ended for that


class Orders:
    """Carries orders out: end the workers, kill one that hangs, tell the step that all ranks here have sealed."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._run, self._course = parts, parts.run, parts.course
        self._is_spare = False
        self._imports: Imports | None = None  # what standbys of this spare import
        self._no_restart_told = False
        self._sealing: asyncio.Task[None] | None = None
        self._lease: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Carry out what the controller has ordered since the last call."""
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
            self._run.say(
                f"{self._run.job.node} is a spare: the job has its nodes, and gets this one when one is lost"
            )
        self._is_spare = member.is_spare
        if member.is_spare and member.imports is not None and self._parts.crew.workers is None:
            self._warm_spare(member.imports)

    def _warm_spare(self, imports: Imports) -> None:
        """Have standbys and an agent wait on a spare, so that it is no later than the others when it gets a place."""
        if imports != self._imports:
            self._imports = imports
            self._parts.crew.warm_for_spare((imports.modules, dict(imports.environment)))
            self._parts.watching.expect_first()

    def _end_hung(self, kill: Kill) -> None:
        course, workers = self._course, self._parts.crew.workers
        assert course.place is not None
        if time.monotonic() - kill.seen_s > _STALE_S:
            return  # this launcher or the connection stood still: if the process still hangs, the order comes again
        if course.place.restarts >= self._run.job.max_restarts:
            if not self._no_restart_told:
                self._no_restart_told = True
                self._run.warn(f"rank {kill.rank}: {kill.reason}; no restart is left, so it is not ended")
        elif (
            workers is not None
            and not course.outcome.done()
            and not workers.kill(kill.rank, kill.process, one_line(kill.reason))
            and os.path.exists(f"/proc/{kill.process}")
        ):
            self._run.warn(f"rank {kill.rank}: {kill.reason}; process {kill.process} is no worker of ours")

    async def _tell_sealed(self, seal: Seal) -> None:
        place, outcome, link = self._course.place, self._course.outcome, self._course.link
        if link is None or place is None or place.incarnation != seal.incarnation or outcome.done():
            return
        from keepstep.wire import Sealed

        watching = self._parts.watching
        watching.expect()
        if seal.warm:
            await self._parts.crew.restarts.warmed(lambda: watching.is_ready, outcome.done)
        caching = self._parts.caching
        step, why = await caching.next_sealed(place, outcome.done, alike=seal.alike, leave=seal.leave)
        if step is not None:
            link.send([Sealed(seal.incarnation, step, why)])

    def _on_stop(self, stop: Stop) -> None:
        course = self._course
        # A spare has not failed with the job, but is to be started again with it.
        course.stop_code = 0 if self._is_spare and stop.exit_code != TEMPORARY_FAILURE else stop.exit_code
        course.stopped_by_hand, course.stop_kind = stop.by_operator, stop.kind
        course.job_over.set()
        self._parts.controller.may_end()
        course.settle(Outcome("stopped", course.stop_code, stop.reason))

    def watch_lease(self, link: Link) -> None:
        """From now on, end the workers when the controller is silent for too long: another node may get their place."""
        self._lease = asyncio.get_running_loop().create_task(self._watch_lease(link))

    async def _watch_lease(self, link: Link) -> None:
        course, cut_off = self._course, CutOff(link.member)
        while True:
            await asyncio.sleep(1.0)
            why = cut_off.look(self._parts.watching.rings.all_steps, asyncio.get_running_loop().time())
            if why and not (course.outcome.done() or course.has_parted):
                self._run.warn(f"{why} ({self._parts.controller.at}): the workers of this node end")
                course.settle(Outcome("halted", 0, why) if course.together else Outcome("alone", 1, why))

    def unwatch_lease(self) -> None:
        """Do not look any more whether the controller is heard, because this node is about to leave by itself."""
        if self._lease:
            self._lease.cancel()


class Standstill:
    """For how long no step was made, where that is much longer than any pause that this job has made before."""

    def __init__(self) -> None:
        self._steps = 0
        self._since_s = 0.0
        self._longest_s = 0.0

    def look(self, steps: int, now_s: float) -> float:
        """Seconds without a step; 0 before the first one, and while the pause is a usual one. Called once a second.

        ``steps``: that all ranks of this node have made; a smaller number than before is another incarnation's.
        """
        if steps != self._steps:
            if 0 < self._steps < steps:
                self._longest_s = max(self._longest_s, now_s - self._since_s)
            self._steps, self._since_s = steps, now_s
        still_s = now_s - self._since_s
        return still_s if steps > 0 and still_s > _USUAL_TIMES * self._longest_s else 0.0


class CutOff:
    """Decides when a node that is cut off ends its workers.

    In a job that may begin again that is soon, since another node may be given this one's place. In a job that does
    not, training goes on without a controller. But its host may have died without a last packet, so that collectives
    with the host's ranks never end: there workers end once they also stand still.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._standstill = Standstill()

    def look(self, steps: int, now_s: float) -> str:
        """Why the workers have to end; "" while they do not. ``steps``: that all ranks of this node have made."""
        still_s = self._standstill.look(steps, now_s)
        if self._member.is_cut_off(now_s):
            return self._member.missing if self._member.runs else ""
        if self._member.begins_again or still_s < LONG_STILL_S or not self._member.is_alone(now_s):
            return ""
        return f"no step for {still_s:.0f} s, and nothing comes from the controller's host"
