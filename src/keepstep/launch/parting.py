"""How a node parts from its job: what storage is to have gets there, the others hear of it, and all processes end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from keepstep.launch.command.job import Job
from keepstep.launch.controller.hosting import Hosting
from keepstep.launch.course import Course, Outcome
from keepstep.launch.local_run import Words
from keepstep.launch.node.node_cache import NodeCache
from keepstep.launch.node.watching import Watching

_EXIT_BARRIER_S = 300.0
_DRAIN_S = 1.0
_FAILED_WAIT_S = 60.0
_NEXT_LEADER_S = 60.0  # to hear from it that all nodes have finished


class Parting:
    """After the workers. ``sweep``: ends what they have left behind."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        course: Course,
        controller: Hosting,
        watching: Watching,
        caching: NodeCache,
        words: Words,
        *,
        sweep: Callable[[], Awaitable[None]],
    ) -> None:
        self._job, self._folder, self._course = job, folder, course
        self._controller, self._watching, self._caching = controller, watching, caching
        self._words, self._sweep = words, sweep

    async def say_goodbye(self, outcome: Outcome) -> int:
        """Tell the controller, wait for the other nodes, end what is beside the workers; returns the exit code."""
        course = self._course
        if outcome.kind == "stopped" and (outcome.code or course.stopped_by_hand):
            self._words.say(f"the job was ended: {outcome.reason}")
        if not course.has_parted:
            await self.part(outcome)
        await self._controller.settled()
        await self._watching.end()
        if course.link:
            await course.link.close()
        await self._controller.stop()
        await self._sweep()
        self._watching.close()
        self._caching.close()
        code = course.stop_code if outcome.kind == "finished" and course.stop_code else outcome.code
        if self._controller.is_here:
            self._words.ended(code, outcome.reason)
        return code

    async def part(self, outcome: Outcome) -> None:
        """Keep what is on its way to storage, say that this node has ended, and wait for the others."""
        course = self._course
        course.has_parted = True
        await self._wait_for_storage(outcome)
        if course.link:
            course.link.ended(outcome.code, outcome.reason)
            await course.link.drained(_DRAIN_S)
            if course.place is None and not course.job_over.is_set():
                await course.link.unseated(_DRAIN_S)
            await self._wait_for_others(outcome)

    async def _wait_for_storage(self, outcome: Outcome) -> None:
        """Keep the cache until what was to be on storage is there: it ends with this process."""
        course, persisting = self._course, self._job.persisting
        if persisting is None:
            return
        briefly_s = min(persisting.wait_s, _FAILED_WAIT_S)
        wait_s = {
            "finished": persisting.wait_s,
            "failed": briefly_s,
            "alone": briefly_s,
            "stopped": briefly_s if course.stopped_by_hand else 0.0,
        }.get(outcome.kind, 0.0)

        def in_vain() -> bool:
            over = course.job_over.is_set() and not course.stopped_by_hand
            interrupted = course.kill_now.is_set() or over or course.signalled is not None
            return interrupted or not self._watching.is_steady

        lost = await self._caching.stored(wait_s, in_vain, self._words.say)
        if lost:
            self._words.warn(f"{lost}: see `keepstep status {self._folder}`")

    async def _wait_for_others(self, outcome: Outcome) -> None:
        """The job is over when all nodes are: the controller says so, and node 0 keeps it alive until then."""
        course = self._course
        assert course.link is not None
        if course.place is None or course.job_over.is_set():
            return
        alone = course.place.node_count == 1
        patience_s = self._job.linger_s if alone or outcome.kind != "finished" else _EXIT_BARRIER_S
        moves = self._controller.seat and course.together and outcome.kind == "finished"
        away_s = _NEXT_LEADER_S if moves else _DRAIN_S if alone else self._job.linger_s
        gone = asyncio.ensure_future(course.link.lost(away_s))
        over = asyncio.ensure_future(course.job_over.wait())
        kill = asyncio.ensure_future(course.kill_now.wait())
        waits: list[asyncio.Future[Any]] = [gone, over, kill]
        again = [course.outcome] if outcome.kind == "finished" and course.together else []
        await asyncio.wait([*waits, *again], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
