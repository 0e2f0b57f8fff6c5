"""The life of one run on one node, from the first process to the exit code. Start reading at ``Launcher.run``.

One thread, one event loop. Polled are only workers whose death the kernel is slow to tell, and output that is shown on
the console. Watching is optional: what fails of it is said once, and the job runs on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.core.descriptors import raise_limit
from keepstep.core.errors import KeepstepError, LostJobError
from keepstep.core.exit_codes import TEMPORARY_FAILURE, UNUSABLE
from keepstep.core.home import home_folder
from keepstep.core.incident import Recovery
from keepstep.core.process_mark import machine_mark
from keepstep.core.ranges import fold_ranks
from keepstep.launch import signals
from keepstep.launch.after_incarnation import (
    after,
    leave_alone,
    may_follow,
    say_goodbye,
    sweep,
    tell_failed,
    tell_found,
)
from keepstep.launch.command import addresses, run_folder
from keepstep.launch.command.job import Job
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.command.placement import COOKIE, Place
from keepstep.launch.controller.hosting import Hosting
from keepstep.launch.controller.late_names import address_in_time
from keepstep.launch.controller_orders import Orders
from keepstep.launch.course import Course, EndedEarly, Outcome, Parts
from keepstep.launch.local_run import LocalRun
from keepstep.launch.node.agent_process import Watching
from keepstep.launch.node.checks import Found
from keepstep.launch.node.node_cache import NodeCache
from keepstep.launch.node.node_checks import NodeChecks, alike, versions
from keepstep.launch.schedulers.kubernetes import is_pod
from keepstep.launch.workers import root_cause
from keepstep.launch.workers.gpu_memory import PATIENCE_S, as_text
from keepstep.launch.workers.guard import Guard
from keepstep.launch.workers.incarnation import Crew, Workers
from keepstep.launch.workers.processes import Child, Processes
from keepstep.launch.workers.recovery_times import sentence
from keepstep.launch.workers.rings import autoloads
from keepstep.launch.workers.standbys import Imports

if TYPE_CHECKING:
    from keepstep.launch.controller.connection import Link
    from keepstep.report.ended_run import End


class Launcher:
    """Owns everything that one run starts on this node."""

    def __init__(self, job: Job, folder: Path, guard: Guard, cookie: str, environ: Mapping[str, str]) -> None:
        secret = run_folder.secret_path(job, folder, home_folder(environ))
        # Programs that use select() break with descriptors above 1023, so that children get the original limit.
        self._job, self._run = job, LocalRun(job, folder, secret, Processes(guard, descriptors=raise_limit()))
        self._course = course = Course()
        self._caching = NodeCache(self._run)
        self._watching = Watching(
            self._run,
            self._caching,
            where=lambda: (course.place, self._controller.at),
            workers=lambda: self._crew.workers,
        )
        self._controller = Hosting(
            self._run,
            ready=self._on_controller,
            gave_up=lambda: course.link and course.link.resign(),
            moved=self._on_move,
        )
        self._checks = NodeChecks(self._run)
        self._crew = Crew(
            self._run,
            {**environ, COOKIE: cookie},
            failed=self._on_failure,
            finished=lambda: course.settle(Outcome("finished", 0, "finished")),
            told=self._on_death,
            recovered=self._on_recovery,
            imported=self._on_imports,
        )
        self._parts = parts = Parts(
            *(self._run, course, self._crew, self._controller, self._watching, self._caching, self._checks)
        )
        self._orders = Orders(parts)

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
        except LostJobError as error:
            self._run.warn(f"{error}: this node ends")
            self._course.stop_kind = "node-lost"
            outcome = Outcome("failed", TEMPORARY_FAILURE, str(error))
        except KeepstepError as error:
            self._run.warn(str(error))
            outcome = Outcome("failed", UNUSABLE, str(error))
        await self._crew.end(signal.SIGTERM, self._course.kill_now)
        await self._crew.close()
        self._orders.unwatch_lease()
        return await say_goodbye(self._parts, outcome)

    @property
    def knows_the_end(self) -> bool:
        """Whether the controller is on this node, so that it has written ``end.json``."""
        return self._controller.is_here

    # Before the workers run.

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
            patience_s = job.rendezvous.join_timeout_s
            finding = address_in_time(endpoint.host, os.environ, patience_s, self._run.say)
            self._controller.at = Endpoint(await self._course.until(finding), endpoint.port)
        self._run.note(f"joining the other nodes at {self._controller.at}")
        from keepstep.report.ended_run import end_of  # here, because it loads msgspec

        first_end = end_of(self._run.folder)
        link = self._connect()
        joining = self._course.until(link.join(job.rendezvous.join_timeout_s))
        if self._controller.is_here:
            return await joining
        late = asyncio.get_running_loop().create_task(self._come_too_late(link, first_end))
        try:
            return await joining
        finally:
            late.cancel()

    async def _come_too_late(self, link: Link, first_end: End | None) -> None:
        """Leave the job, if it ends without this node."""
        from keepstep.launch.controller.late_launcher import ended_before  # here, because it loads msgspec

        folder = self._run.folder
        is_own = run_folder.is_of_slurm_job(self._job, os.environ)
        end = await ended_before(folder, first_end, link, is_of_this_job=is_own)
        self._run.say(f"run {folder} has ended: node {self._run.job.node} came too late to join it")
        code = end.exit_code if end.exit_code == TEMPORARY_FAILURE else 0
        self._course.settle(Outcome("stopped", code, end.reason))

    def _connect(self) -> Link:
        from keepstep import wire
        from keepstep.launch.controller.connection import Link

        assert self._controller.at is not None
        course = self._course
        job, rendezvous, place = self._job, self._job.rendezvous, course.place
        address = addresses.resolve(self._controller.at.host)[0]
        own = addresses.own_address(rendezvous.local_addr, address)
        join = wire.Join(
            node=self._run.job.node,
            machine=machine_mark(),
            address=own,
            nproc=job.nproc,
            free_port=place.master_port if place else addresses.free_port(own),
            node_rank=rendezvous.node_rank,
            min_nodes=job.min_nodes,
            max_nodes=job.max_nodes,
            max_restarts=job.max_restarts if rendezvous.endpoint else 0,
            versions=versions(job) if job.check else (),
            alike=alike(job) if job.check else (),
            checks=self._checks.found,
            hosts_controller=self._controller.is_here,
        )
        endpoint = replace(self._controller.at, host=address)
        link = course.link = Link(
            *(self._run, endpoint, join),
            ordered=self._orders.follow,
            token=self._controller.seat,
            elected=self._on_election,
        )
        self._controller.met_at = endpoint
        if job.max_nodes > 1:
            self._orders.watch_lease(link)
        if place:
            for found in course.untold:
                link.member.found(found)  # told as soon as there is a connection
            link.placed(place)
            link.open()
        return link

    # The workers, incarnation after incarnation.

    async def _incarnations(self, place: Place) -> Outcome:
        course, crew = self._course, self._crew
        while True:
            course.place = place
            workers = self._start_workers(place)
            outcome = await course.outcome
            await self._end_workers(workers, outcome, place)
            following = await after(self._parts, self._orders.follow, outcome, place)
            if isinstance(following, Outcome):
                return following
            self._watching.renew()
            if (following.world_size, following.first_rank) != (place.world_size, place.first_rank):
                await self._watching.renewed()
                if following.world_size != place.world_size and crew.restarts.survivors:
                    crew.restarts.gpu_memory.open()
                    self._note_stuck(await crew.restarts.survivors.dismiss())
                    await self._memory_freed()
                self._caching.move(place, following)
            place = following
            if workers.failures:
                crew.restarts.ended(workers.blamed, workers.failed_s, place.incarnation)

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
        if job.watch and job.rendezvous.endpoint is None and controller.at is None:
            self._watching.attempt(controller.start)
        if controller.can_be_met:
            link = self._course.link
            if link and job.rendezvous.endpoint is None:
                link.placed(place)
            elif not link:
                self._watching.attempt(self._connect)
            self._watching.start()
        ranks = fold_ranks(range(place.first_rank, place.first_rank + job.nproc))
        which = f"rank{'s' if job.nproc > 1 else ''} {ranks} of {place.world_size}"
        is_watched = self._watching.rings.paths and controller.at and autoloads(self._crew.environ)
        watched = "watched, " if is_watched else ""
        self._run.say(f"{which} on {self._run.job.node}: {watched}run folder {self._run.folder}")
        return workers

    async def _end_workers(self, workers: Workers, outcome: Outcome, place: Place) -> None:
        course = self._course
        begins_fresh = course.link and course.link.member.begins_fresh
        if may_follow(self._parts, outcome, place):
            self._crew.restarts.gpu_memory.open()
        if outcome.kind in ("failed", "halted"):
            await workers.leaving(self._is_over)
        if may_follow(self._parts, outcome, place) and not begins_fresh:
            workers.call_survivors()
        self._note_stuck(await self._crew.end(outcome.number, course.kill_now))
        await sweep(self._parts)
        await self._crew.shown()
        await self._memory_freed()

    def _note_stuck(self, children: Sequence[Child]) -> None:
        """Tell of processes that SIGKILL did not end: a spare may take this node's place."""
        for child in children:
            self._run.processes.stuck.add(child.pid)
            stuck = f"{child.name} (process {child.pid}) is stuck in the kernel, even when killed"
            text = f"node {self._run.job.node}: {stuck}; restart the node"
            self._checks.note(Found(text, unfit=True))

    async def _memory_freed(self) -> None:
        """Wait until the workers that begin next find the GPUs' memory free."""
        if held := await self._crew.restarts.gpu_memory.freed(self._is_over):
            late = f"{as_text(held)} is not free after {PATIENCE_S:g} s; end what keeps it, or reset the GPU"
            text = f"node {self._run.job.node}: {late}"
            self._checks.note(Found(text, unfit=any(one.is_missed for one in held)))

    def _is_over(self) -> bool:
        return bool(self._course.signalled) or self._course.job_over.is_set()

    def _describe(self) -> None:
        controller = self._controller
        if controller.is_here:
            term = controller.term if controller.seat else 0
            self._run.describe(self._course.place, controller.at, term, self._watching.rings.paths)

    # Events while the workers run; orders of the controller come to ``Orders``.

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._run.processes.reap)
        for number in self._job.signals:
            # A signal that nohup has the launcher ignore stays ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        for number in set(signals.WARNINGS).difference(self._job.signals):
            if signal.getsignal(number) == signal.SIG_DFL:
                loop.add_signal_handler(number, self._on_warning, number)
        if signal.getsignal(signal.SIGWINCH) == signal.SIG_DFL:
            loop.add_signal_handler(signal.SIGWINCH, self._crew.resized)
        signals.watch((*self._job.signals, *signals.WARNINGS))

    def _on_signal(self, number: signal.Signals) -> None:
        course = self._course
        if course.outcome.done() and number == signal.SIGINT:
            course.kill_now.set()  # a second Ctrl-C, or a first one while the job ends anyway
        if course.signalled is None:
            end_s = signals.end_time(os.environ, self._job.end_unix_s)
            said = self._crew.said
            sender, in_pod = signals.sender_of(number), is_pod(os.environ)
            course.ending = signals.ending(
                *(number, sender, end_s, time.time(), said),
                in_pod=in_pod,
                preempted=lambda: signals.preemption_of(os.environ),
            )
            leaves = course.ending.of_pod and course.together
            what = "this node leaves the job" if leaves else "the job ends"
            self._run.say(f"{course.ending.text}: {what}")
            if leaves and not course.has_parted:
                leaving = leave_alone(self._parts, course.ending.text)
                course.leaving = asyncio.get_running_loop().create_task(leaving)
            # A worker that had failed of its own before did not end because of this.
            is_cause = all(one.status in signals.TERMINATED for one in self._crew.failures)
            if course.link and course.ending.kind and is_cause and not leaves:
                row = signals.ROWS[course.ending.kind]
                course.link.send(course.link.member.told_to_end(row, course.ending.text, time.time()))
        course.signalled = course.signalled or number
        course.settle(course.signal_outcome())

    def _on_warning(self, number: signal.Signals) -> None:
        """Pass a signal on that is meant for the workers: by default it would end launcher and workers."""
        workers = self._crew.workers
        told = signals.pass_on(number, workers.pids) if workers is not None else []
        sender = signals.sender_of(number)
        said = f"{number.name} from {sender}" if sender is not None else number.name
        whom = (
            f"passed on to rank{'s' if len(told) > 1 else ''} {fold_ranks(told)}"
            if told
            else "no worker handles it"
        )
        self._run.say(f"{said}: {whom}; the job goes on")

    def _on_failure(self, failure: root_cause.Failure) -> None:
        self._checks.failed()
        tell_found(self._parts, failure)
        if self._course.together:
            tell_failed(self._parts, failure)
        self._course.settle(Outcome("failed", failure.exit_code, f"rank {failure.rank}: {failure.text}"))

    def _on_death(self, failure: root_cause.Failure) -> None:
        tell_found(self._parts, failure)

    def _on_recovery(self, recovery: Recovery) -> None:
        self._run.say(sentence(recovery))
        if recovery.gpu_memory:
            from keepstep.report.wording import (
                freed_memory,
            )  # here, as reports are rarely made by the launcher

            if text := freed_memory(recovery):
                self._run.say(text)
        if link := self._course.link:
            link.send(link.member.recovered(recovery))

    def _on_imports(self, imports: Imports) -> None:
        """Have spares import what the workers of the first node do."""
        from keepstep.launch.controller.told_imports import for_spares

        link, place = self._course.link, self._course.place
        if link and place and place.node_rank == 0 and place.node_count > 1:
            told = for_spares(*imports)
            link.send(link.member.imported(told) if told else [])

    def _on_controller(self) -> None:
        """Watch the job of one node, because its controller can be met now."""
        self._run.note(f"controller at {self._controller.at}")
        self._describe()
        if self._job.rendezvous.endpoint is None:
            self._watching.attempt(self._connect)
            self._watching.start()

    def _on_election(self) -> None:
        assert self._course.link is not None
        if not self._course.job_over.is_set():
            self._controller.look(self._course.link)

    def _on_move(self) -> None:
        """Name the controller's new address in ``run.json`` and to the agent."""
        self._describe()
        self._watching.restart()
