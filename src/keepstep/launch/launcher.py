"""The life of one run on one node, from the first process to the exit code. Start reading at ``Launcher.run``.

One thread, one event loop; polled are workers, for a slow death, and teed output. Watching is optional: whatever of it
fails is said once, and the job runs on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.core.budgets import Cause
from keepstep.core.descriptors import raise_limit
from keepstep.core.errors import KeepstepError
from keepstep.core.home import home_folder
from keepstep.core.incident import Recovery
from keepstep.launch.command import addresses, run_folder
from keepstep.launch.command.job import Job
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.command.placement import COOKIE, Place
from keepstep.launch.controller.hosting import Hosting
from keepstep.launch.controller_orders import Orders
from keepstep.launch.course import Course, EndedEarly, Outcome
from keepstep.launch.local_run import Words
from keepstep.launch.node.node_cache import NodeCache
from keepstep.launch.node.node_checks import NodeChecks, versions
from keepstep.launch.node.watching import FAILURES, Watching
from keepstep.launch.parting import Parting
from keepstep.launch.workers import root_cause
from keepstep.launch.workers.crew import Crew
from keepstep.launch.workers.guard import Guard
from keepstep.launch.workers.processes import Processes
from keepstep.launch.workers.recovery_times import sentence

if TYPE_CHECKING:
    from keepstep.launch.controller.connection import Link
    from keepstep.launch.workers.incarnation import Workers

CANNOT_START = 2


class Launcher:
    """Owns everything that one run starts on this node."""

    def __init__(self, job: Job, folder: Path, guard: Guard, cookie: str, environ: Mapping[str, str]) -> None:
        self._job, self._folder, self._guard = job, folder, guard
        # Programs that use select() break with descriptors above 1023: no child has more of them than we were given.
        self._processes = Processes(descriptors=raise_limit())
        self._secret = run_folder.secret_path(job, folder, home_folder(environ))
        self._words = words = Words(job, folder, self._secret)
        self._course = course = Course()
        self._caching = NodeCache(job, words.warn)
        self._watching = Watching(
            *(job, folder, self._secret, self._processes, guard, self._caching),
            where=lambda: (course.place, self._controller.at),
            warn=words.warn,
        )
        self._controller = Hosting(
            *(job, folder, self._secret, self._processes, guard),
            ready=self._on_controller,
            gave_up=lambda: course.link and course.link.resign(),
            moved=self._on_move,
            say=words.say,
            warn=words.warn,
        )
        self._checks = NodeChecks(job, folder, words.warn)
        self._crew = Crew(
            *(job, folder, {**environ, COOKIE: cookie}, self._processes, guard),
            failed=self._on_failure,
            finished=lambda: course.settle(Outcome("finished", 0, "finished")),
            recovered=self._on_recovery,
            note=words.note,
            warn=words.warn,
        )
        beside = (self._controller, self._watching, self._caching, words)
        self._orders = Orders(job, course, self._crew, *beside)
        self._parting = Parting(job, folder, course, *beside, sweep=self._sweep)

    async def run(self, *, hosts_controller: bool) -> int:
        """Run the job's share of this node; returns the exit code."""
        self._controller.is_here = hosts_controller
        self._handle_signals()
        try:
            self._checks.before_start()
            place = await self._find_place()
            outcome = await self._incarnations(place)
        except EndedEarly as early:
            outcome = early.outcome
        except KeepstepError as error:
            self._words.warn(str(error))
            outcome = Outcome("failed", CANNOT_START, str(error))
        await self._crew.end(signal.SIGTERM, self._course.kill_now)
        self._crew.close()
        self._orders.unwatch_lease()
        return await self._parting.say_goodbye(outcome)

    # Before the workers.

    async def _find_place(self) -> Place:
        job = self._job
        if job.rendezvous.endpoint is None:
            port = job.master_port or addresses.free_port("127.0.0.1")
            return Place(0, 0, job.nproc, 1, job.master_addr, port)
        endpoint = job.rendezvous.endpoint
        if self._controller.is_here:
            await self._course.until(self._controller.can_begin())
            self._controller.start()
            await self._course.until(self._controller.is_ready())
        else:
            self._controller.at = Endpoint(addresses.resolve(endpoint.host)[0], endpoint.port)
        self._words.note(f"joining the other nodes at {self._controller.at}")
        link = self._connect()
        return await self._course.until(link.join(job.rendezvous.join_timeout_s))

    def _connect(self) -> Link:
        from keepstep import wire
        from keepstep.launch.controller.connection import Link

        assert self._controller.at is not None
        job, rendezvous, place = self._job, self._job.rendezvous, self._course.place
        address = addresses.resolve(self._controller.at.host)[0]
        own = addresses.own_address(rendezvous.local_addr, address)
        join = wire.Join(
            node=job.node,
            address=own,
            nproc=job.nproc,
            free_port=place.master_port if place else addresses.free_port(own),
            node_rank=rendezvous.node_rank,
            min_nodes=job.min_nodes,
            max_nodes=job.max_nodes,
            max_restarts=job.max_restarts if rendezvous.endpoint else 0,
            versions=versions(job) if job.check else (),
            checks=self._checks.found,
            hosts_controller=self._controller.is_here,
        )
        endpoint = replace(self._controller.at, host=address)
        link = self._course.link = Link(
            job,
            endpoint,
            self._secret,
            join,
            free_port=lambda: addresses.free_port(own),
            ordered=self._orders.follow,
            token=self._controller.seat,
            elected=self._on_election,
            known=lambda: run_folder.controller(self._folder),
            warn=self._words.warn,
        )
        self._controller.met(endpoint)
        if job.max_nodes > 1:
            self._orders.watch_lease(link)
        if place:
            link.placed(place)
            link.open()
        return link

    # The workers, incarnation after incarnation.

    async def _incarnations(self, place: Place) -> Outcome:
        course, crew = self._course, self._crew
        restarts = crew.prepare(place)
        while True:
            course.place = place
            workers = self._start_workers(place)
            outcome = await course.outcome
            if self._may_follow(outcome, place) and not (course.link and course.link.member.begins_fresh):
                workers.call_survivors()
            for child in await crew.end(outcome.number, course.kill_now):
                self._words.warn(
                    f"{child.name} (process {child.pid}) is stuck in the kernel, even when killed"
                )
            await self._sweep()
            crew.stop_following()
            failures = workers.failures
            if (
                course.link
                and outcome.kind == "failed"
                and (root := root_cause.first(failures)) is not failures[0]
            ):
                # A survivor was quicker to say that it lost its peer than we were to see that peer dead.
                course.link.found(root_cause.finding(root, self._job.node, course.incarnation))
            following = await (
                self._begin_again_with_all(outcome) if course.together else self._begin_again(outcome, place)
            )
            if isinstance(following, Outcome):
                return following
            self._watching.renew()
            if (following.world_size, following.first_rank) != (place.world_size, place.first_rank):
                await self._watching.renewed()
                if following.world_size != place.world_size:
                    await restarts.dismiss()
                self._caching.move(place, following)
            place = following
            if failures:
                restarts.ended(root_cause.first(failures), workers.failed_s, place.incarnation)

    def _start_workers(self, place: Place) -> Workers:
        job, controller = self._job, self._controller
        watching = self._watching.make_rings(place, self._crew.environ) if job.watch else {}
        caching = self._caching.environment(place)
        workers = self._crew.start(
            place, {local: {**caching, **watching.get(local, {})} for local in range(job.nproc)}
        )
        self._checks.began()
        if place.restarts < job.max_restarts:
            workers.watch()
        self._describe()
        if job.watch and job.rendezvous.endpoint is None and not controller.is_started:
            self._try_watching(controller.start)
        if controller.can_be_met:
            link = self._course.link
            if link and job.rendezvous.endpoint is None:
                link.placed(place)
            elif not link:
                self._try_watching(self._connect)
            self._watching.start()
        first, last = place.first_rank, place.first_rank + job.nproc - 1
        ranks_text = f"rank {first}" if first == last else f"ranks {first}-{last}"
        watched = "watched, " if self._watching.rings and controller.at else ""
        self._words.say(
            f"{ranks_text} of {place.world_size} on {job.node}: {watched}run folder {self._folder}"
        )
        return workers

    def _describe(self) -> None:
        self._words.describe(self._course.place, self._controller, self._watching.rings)

    def _try_watching(self, step: Callable[[], object]) -> None:
        try:
            step()
        except FAILURES as error:
            self._words.warn(f"the job is not watched: {error}")

    def _may_follow(self, outcome: Outcome, place: Place) -> bool:
        """Whether another incarnation may follow that of ``place``."""
        course = self._course
        over = course.signalled or course.job_over.is_set() or place.restarts >= self._job.max_restarts
        return outcome.kind in ("failed", "halted") and not over

    async def _begin_again(self, outcome: Outcome, place: Place) -> Place | Outcome:
        """Whether and where this node's workers, the only ones of the job or its unwatched share, begin again."""
        if outcome.kind == "halted" and self._course.link:
            return await self._begin_again_with_all(outcome)
        if outcome.kind != "failed":
            return outcome
        assert self._crew.restarts is not None
        if not self._may_follow(outcome, place):
            return self._explain(outcome)
        root = root_cause.first(self._crew.failures)
        if refused := self._crew.restarts.refused(self._cause(root)):
            ended = self._explain(outcome)
            self._words.warn(refused.reason)
            return replace(ended, reason=refused.reason)
        self._words.say(
            f"rank {root.rank}: {root.text}; restart {place.restarts + 1} of {self._job.max_restarts}"
        )
        self._checks.unfit()  # only told: there is no other node
        self._course.renew()
        port = self._job.master_port or addresses.free_port("127.0.0.1")
        return replace(place, incarnation=place.incarnation + 1, master_port=port)

    async def _begin_again_with_all(self, outcome: Outcome) -> Place | Outcome:
        """What the controller orders after an incarnation: the place in the next one, or the end."""
        course, link = self._course, self._course.link
        assert link is not None
        if outcome.kind == "finished":
            course.renew()
            await self._parting.part(outcome)
            if not (course.outcome.done() and course.outcome.result().kind == "halted"):
                return outcome
        elif outcome.kind not in ("failed", "halted") or course.signalled:
            # A signal that comes while workers are halted for the next incarnation ends the job all the same.
            return course.signal_outcome() if outcome.kind == "halted" else outcome
        course.renew()
        course.has_parted = False
        if outcome.kind == "failed":
            root = root_cause.first(self._crew.failures)
            link.failed(root.exit_code, self._cause(root))
        link.halted(self._checks.unfit(), self._caching.rigid(course.place))
        self._orders.follow()
        try:
            place = await course.until(link.next_place())
        except EndedEarly as early:
            return self._explain(outcome, early.outcome) if outcome.kind == "failed" else early.outcome
        if place is not None:
            return place
        why = link.stranger or f"{link.member.missing} ({self._controller.at})"
        self._words.warn(f"{why}: this node ends")
        ended = (
            self._explain(outcome) if outcome.kind == "failed" else replace(outcome, kind="failed", code=1)
        )
        return replace(ended, reason=f"{why}; {ended.reason}")

    def _explain(self, outcome: Outcome, ended: Outcome | None = None) -> Outcome:
        """Say why the job failed; the exit code is that of the failure that came first, or as ``ended`` says."""
        workers, link = self._crew.workers, self._course.link
        assert workers is not None
        failures = workers.failures
        root = root_cause.first(failures)
        print(root_cause.render(self._job.script, self._job.node, failures), file=sys.stderr, flush=True)
        target = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if target:
            root_cause.hand_up(root, target)
        if link:
            for failure in failures[1:]:
                link.found(root_cause.finding(failure, self._job.node, self._course.incarnation))
        if ended is not None:
            return ended
        return replace(outcome, code=workers.exit_code, reason=f"rank {root.rank}: {root.text}")

    def _cause(self, failure: root_cause.Failure) -> Cause:
        assert self._crew.restarts is not None
        return self._crew.restarts.cause(failure, self._watching.steps(failure.rank))

    async def _sweep(self) -> None:
        controller = {self._controller.pid} if self._controller.pid else set[int]()
        await self._crew.sweep(self._watching.pids | controller, self._course.kill_now)

    # What happens meanwhile; what the controller orders comes to ``Orders``.

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._on_child)
        for number in self._job.signals:
            # Started under nohup: what was ignored stays ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)

    def _on_child(self) -> None:
        if self._guard.pid in self._processes.reap():
            self._guard.start()

    def _on_signal(self, number: signal.Signals) -> None:
        course = self._course
        if course.outcome.done() and number == signal.SIGINT:
            course.kill_now.set()  # the second Ctrl-C, or one while the job is ending anyway
        course.signalled = course.signalled or number
        course.settle(course.signal_outcome())

    def _on_failure(self, failure: root_cause.Failure) -> None:
        course, link = self._course, self._course.link
        self._checks.failed()
        if link:
            link.found(root_cause.finding(failure, self._job.node, course.incarnation))
            if course.together:
                link.failed(failure.exit_code, self._cause(failure))
        course.settle(Outcome("failed", failure.exit_code, f"rank {failure.rank}: {failure.text}"))

    def _on_recovery(self, recovery: Recovery) -> None:
        self._words.say(sentence(recovery))
        if self._course.link:
            self._course.link.recovered(recovery)

    def _on_controller(self) -> None:
        """It can be met here."""
        self._words.note(f"controller at {self._controller.at}")
        self._describe()
        if self._job.rendezvous.endpoint is None:
            self._try_watching(self._connect)
            self._watching.start()

    def _on_election(self) -> None:
        assert self._course.link is not None
        if not self._course.job_over.is_set():
            self._controller.look(self._course.link)

    def _on_move(self) -> None:
        """The controller is somewhere else."""
        self._describe()
        self._watching.restart()
