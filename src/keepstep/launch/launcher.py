"""The life of one run on one node, from the first process to the exit code. Start reading at ``Launcher.run``.

One thread, one event loop; polled are workers, for a slow death, and teed output. Watching is optional: whatever of it
fails is said once, and the job runs on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from keepstep.core.budgets import Cause
from keepstep.core.descriptors import raise_limit
from keepstep.core.errors import KeepstepError
from keepstep.core.home import home_folder
from keepstep.core.incident import Recovery
from keepstep.core.log_lines import one_line
from keepstep.launch.command import addresses, run_folder
from keepstep.launch.command.job import Job
from keepstep.launch.command.placement import COOKIE, OURS, Place, worker_plans
from keepstep.launch.command.rendezvous import Endpoint
from keepstep.launch.controller.cut_off import CutOff
from keepstep.launch.controller.hosting import Hosting
from keepstep.launch.node.agent import FAILURES, Watching
from keepstep.launch.node.cache import Caching
from keepstep.launch.node.node_checks import NodeChecks, versions
from keepstep.launch.workers import root_cause
from keepstep.launch.workers.guard import Guard
from keepstep.launch.workers.incarnation import Workers, sweep
from keepstep.launch.workers.processes import Processes
from keepstep.launch.workers.recovery_times import sentence
from keepstep.launch.workers.restarts import Restarts
from keepstep.launch.workers.streams import Following, worker_streams

if TYPE_CHECKING:
    from keepstep.launch.controller.connection import Link
    from keepstep.wire import Kill, Seal, Stop

T = TypeVar("T")

CANNOT_START = 2
_EXIT_BARRIER_S = 300.0
_DRAIN_S = 1.0
_FAILED_WAIT_S = 60.0
_NEXT_LEADER_S = 60.0  # to hear from it that all nodes have finished


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How an incarnation ended. ``number``: the signal to end what still runs with."""

    kind: str  # "finished" | "failed" | "signal" | "stopped" | "halted" | "alone"
    code: int
    reason: str
    number: signal.Signals = signal.SIGTERM


class Launcher:
    """Owns everything that one run starts on this node."""

    def __init__(self, job: Job, folder: Path, guard: Guard, cookie: str, environ: Mapping[str, str]) -> None:
        self._job = job
        self._folder = folder
        self._guard = guard
        self._environ = {**environ, COOKIE: cookie}
        # Programs that use select() break with descriptors above 1023: no child has more of them than we were given.
        self._processes = Processes(descriptors=raise_limit())
        self._logs = run_folder.LogFiles(folder, job.streams.log_dir, job.run_id)
        self._secret = run_folder.secret_path(job, folder, home_folder(environ))
        self._link: Link | None = None
        self._place: Place | None = None
        self._caching = Caching(job, self._warn)
        self._watching = Watching(
            *(job, folder, self._secret, self._processes, guard, self._caching),
            where=lambda: (self._place, self._controller.at),
            warn=self._warn,
        )
        self._controller = Hosting(
            *(job, folder, self._secret, self._processes, guard),
            ready=self._on_controller,
            gave_up=lambda: self._link and self._link.resign(),
            moved=self._on_move,
            say=self._say,
            warn=self._warn,
        )
        self._workers: Workers | None = None
        self._following = Following(job, self._logs)
        self._checks = NodeChecks(job, folder, self._warn)
        self._restarts: Restarts | None = None
        self._outcome: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()
        self._kill_now = asyncio.Event()
        self._job_over = asyncio.Event()  # the controller said Stop
        self._stop_code = 0
        self._stopped_by_hand = False
        self._is_spare = False
        self._no_restart_told = False
        self._has_parted = False  # said that our workers have ended, and waited for the others
        self._lease: asyncio.Task[None] | None = None
        self._signalled: signal.Signals | None = None
        self._sealing: asyncio.Task[None] | None = None
        self._started_unix_s = time.time()

    async def run(self, *, hosts_controller: bool) -> int:
        """Run the job's share of this node; returns the exit code."""
        self._controller.is_here = hosts_controller
        self._handle_signals()
        try:
            self._checks.before_start()
            place = await self._find_place()
            outcome = await self._incarnations(place)
        except _EndedEarly as early:
            outcome = early.outcome
        except KeepstepError as error:
            self._warn(str(error))
            outcome = _Outcome("failed", CANNOT_START, str(error))
        if self._workers:
            await self._workers.end(signal.SIGTERM, self._job.shutdown_timeout_s, self._kill_now)
        self._following.stop()
        return await self._say_goodbye(outcome)

    # Before the workers.

    async def _find_place(self) -> Place:
        job = self._job
        if job.rendezvous.endpoint is None:
            port = job.master_port or addresses.free_port("127.0.0.1")
            return Place(0, 0, job.nproc, 1, job.master_addr, port)
        endpoint = job.rendezvous.endpoint
        if self._controller.is_here:
            await self._until(self._controller.can_begin())
            self._controller.start()
            await self._until(self._controller.is_ready())
        else:
            self._controller.at = Endpoint(addresses.resolve(endpoint.host)[0], endpoint.port)
        self._note(f"joining the other nodes at {self._controller.at}")
        self._connect()
        assert self._link is not None
        return await self._until(self._link.join(job.rendezvous.join_timeout_s))

    async def _until(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for ``work``, or stop waiting when a signal ends the job."""
        task = asyncio.get_running_loop().create_task(work)
        waits: list[asyncio.Future[Any]] = [task, self._outcome]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise _EndedEarly(self._outcome.result())

    def _try_watching(self, step: Callable[[], None]) -> None:
        try:
            step()
        except FAILURES as error:
            self._warn(f"the job is not watched: {error}")

    def _connect(self) -> None:
        from keepstep import wire
        from keepstep.launch.controller.connection import Link

        assert self._controller.at is not None
        job, rendezvous = self._job, self._job.rendezvous
        address = addresses.resolve(self._controller.at.host)[0]
        own = addresses.own_address(rendezvous.local_addr, address)
        join = wire.Join(
            node=job.node,
            address=own,
            nproc=job.nproc,
            free_port=self._place.master_port if self._place else addresses.free_port(own),
            node_rank=rendezvous.node_rank,
            min_nodes=job.min_nodes,
            max_nodes=job.max_nodes,
            max_restarts=job.max_restarts if rendezvous.endpoint else 0,
            versions=versions(job) if job.check else (),
            checks=self._checks.found,
            hosts_controller=self._controller.is_here,
        )
        endpoint = replace(self._controller.at, host=address)
        self._link = Link(
            job,
            endpoint,
            self._secret,
            join,
            free_port=lambda: addresses.free_port(own),
            ordered=self._on_order,
            token=self._controller.seat,
            elected=self._on_election,
            known=lambda: run_folder.controller(self._folder),
            warn=self._warn,
        )
        self._controller.met(endpoint)
        if self._job.max_nodes > 1:
            self._lease = asyncio.get_running_loop().create_task(self._watch_lease(self._link))
        if self._place:
            self._link.placed(self._place)
            self._link.open()

    # The workers.

    async def _incarnations(self, place: Place) -> _Outcome:
        self._restarts = Restarts(
            self._job,
            self._environ,
            self._folder / "nodes" / str(place.node_rank),
            self._processes,
            self._guard,
            warn=self._warn,
            note=self._note,
            recovered=self._on_recovery,
            raised=lambda rank: self._workers and self._workers.raised(rank),
        )
        while True:
            self._place = place
            self._start_workers(place, place.incarnation)
            outcome = await self._outcome
            assert self._workers is not None
            if self._may_follow(outcome, place) and not (self._link and self._link.member.begins_fresh):
                self._workers.call_survivors()
            stuck = await self._workers.end(outcome.number, self._job.shutdown_timeout_s, self._kill_now)
            for child in stuck:
                self._warn(f"{child.name} (process {child.pid}) is stuck in the kernel, even when killed")
            await self._sweep()
            self._following.stop()
            failures = self._workers.failures
            if (
                self._link
                and outcome.kind == "failed"
                and (root := root_cause.first(failures)) is not failures[0]
            ):
                # A survivor was quicker to say that it lost its peer than we were to see that peer dead.
                self._link.found(root_cause.finding(root, self._job.node, self._incarnation))
            following = await (
                self._begin_again_with_all(outcome) if self._together else self._begin_again(outcome, place)
            )
            if isinstance(following, _Outcome):
                return following
            self._watching.renew()
            if (following.world_size, following.first_rank) != (place.world_size, place.first_rank):
                await self._watching.renewed()
                if following.world_size != place.world_size:
                    await self._restarts.dismiss()
                self._caching.move(place, following)
            place = following
            if failures:
                self._restarts.ended(root_cause.first(failures), self._workers.failed_s, place.incarnation)

    def _may_follow(self, outcome: _Outcome, place: Place) -> bool:
        """Whether another incarnation may follow that of ``place``."""
        over = self._signalled or self._job_over.is_set() or place.restarts >= self._job.max_restarts
        return outcome.kind in ("failed", "halted") and not over

    async def _begin_again(self, outcome: _Outcome, place: Place) -> Place | _Outcome:
        """Whether and where this node's workers, the only ones of the job or its unwatched share, begin again."""
        if outcome.kind == "halted" and self._link:
            return await self._begin_again_with_all(outcome)
        if outcome.kind != "failed":
            return outcome
        assert self._workers is not None
        assert self._restarts is not None
        if not self._may_follow(outcome, place):
            return self._explain(outcome)
        root = root_cause.first(self._workers.failures)
        if refused := self._restarts.refused(self._cause(root)):
            ended = self._explain(outcome)
            self._warn(refused.reason)
            return replace(ended, reason=refused.reason)
        self._say(f"rank {root.rank}: {root.text}; restart {place.restarts + 1} of {self._job.max_restarts}")
        self._checks.unfit()  # only told: there is no other node
        self._outcome = asyncio.get_running_loop().create_future()
        port = self._job.master_port or addresses.free_port("127.0.0.1")
        return replace(place, incarnation=place.incarnation + 1, master_port=port)

    @property
    def _together(self) -> bool:
        """Whether the nodes of the job begin again together, as the controller orders it."""
        return self._link is not None and self._link.member.begins_again

    async def _begin_again_with_all(self, outcome: _Outcome) -> Place | _Outcome:
        """What the controller orders after an incarnation: the place in the next one, or the end."""
        assert self._link is not None
        if outcome.kind == "finished":
            self._outcome = asyncio.get_running_loop().create_future()
            await self._part(outcome)
            if not (self._outcome.done() and self._outcome.result().kind == "halted"):
                return outcome
        elif outcome.kind not in ("failed", "halted") or self._signalled:
            return outcome
        self._outcome = asyncio.get_running_loop().create_future()
        self._has_parted = False
        if outcome.kind == "failed" and self._workers is not None:
            root = root_cause.first(self._workers.failures)
            self._link.failed(root.exit_code, self._cause(root))
        self._link.halted(self._checks.unfit(), self._caching.rigid(self._place))
        self._on_order()
        try:
            place = await self._until(self._link.next_place())
        except _EndedEarly as early:
            return self._explain(outcome, early.outcome) if outcome.kind == "failed" else early.outcome
        if place is not None:
            return place
        why = self._link.stranger or f"{self._link.member.missing} ({self._controller.at})"
        self._warn(f"{why}: this node ends")
        ended = (
            self._explain(outcome) if outcome.kind == "failed" else replace(outcome, kind="failed", code=1)
        )
        return replace(ended, reason=f"{why}; {ended.reason}")

    def _start_workers(self, place: Place, restarts: int) -> None:
        job, prepared = self._job, self._restarts
        assert prepared is not None
        watching = self._watching.make_rings(place, self._environ) if job.watch else {}
        caching = self._caching.environment(place)
        ranks = {local_rank: place.first_rank + local_rank for local_rank in range(job.nproc)}
        error_files = {
            local: str(self._logs.error_file(rank, local, restarts)) for local, rank in ranks.items()
        }
        plans = worker_plans(
            job,
            place,
            self._environ,
            error_files=error_files,
            restart_count=restarts,
            extra={
                local: {**caching, **watching.get(local, {}), **prepared.environment(place, local)}
                for local in ranks
            },
        )
        streams = {
            local: worker_streams(job, self._logs, rank, local, restarts) for local, rank in ranks.items()
        }
        self._workers = Workers(
            plans,
            streams,
            self._processes,
            self._guard,
            failed=self._on_failure,
            finished=lambda: self._settle(_Outcome("finished", 0, "finished")),
            standbys=prepared.standbys,
            survivors=prepared.survivors,
        )
        self._following.start(streams, ranks, restarts)
        self._workers.start({k: v for k, v in self._environ.items() if k not in OURS})
        self._checks.began()
        prepared.started(plans, place, self._workers.from_standbys, self._workers.survived)
        if place.restarts < job.max_restarts:
            self._workers.watch()
        self._describe()
        if job.watch and job.rendezvous.endpoint is None and not self._controller.is_started:
            self._try_watching(self._controller.start)
        if self._controller.can_be_met:
            if self._link and job.rendezvous.endpoint is None:
                self._link.placed(place)
            elif not self._link:
                self._try_watching(self._connect)
            self._watching.start()
        first, last = place.first_rank, place.first_rank + job.nproc - 1
        ranks_text = f"rank {first}" if first == last else f"ranks {first}-{last}"
        watched = "watched, " if self._watching.rings and self._controller.at else ""
        self._say(f"{ranks_text} of {place.world_size} on {job.node}: {watched}run folder {self._folder}")

    # What happens.

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
        if self._outcome.done() and number == signal.SIGINT:
            self._kill_now.set()  # the second Ctrl-C, or one while the job is ending anyway
        self._signalled = self._signalled or number
        self._settle(_Outcome("signal", 128 + number, f"signal {number.name}", number))

    def _on_failure(self, failure: root_cause.Failure) -> None:
        self._checks.failed()
        if self._link:
            self._link.found(root_cause.finding(failure, self._job.node, self._incarnation))
            if self._together:
                self._link.failed(failure.exit_code, self._cause(failure))
        self._settle(_Outcome("failed", failure.exit_code, f"rank {failure.rank}: {failure.text}"))

    def _on_recovery(self, recovery: Recovery) -> None:
        self._say(sentence(recovery))
        if self._link:
            self._link.recovered(recovery)

    def _on_controller(self) -> None:
        """It can be met here."""
        self._note(f"controller at {self._controller.at}")
        self._describe()
        if self._job.rendezvous.endpoint is None:
            self._try_watching(self._connect)
            self._watching.start()

    def _on_election(self) -> None:
        assert self._link is not None
        if not self._job_over.is_set():
            self._controller.look(self._link)

    def _on_move(self) -> None:
        """The controller is somewhere else."""
        self._describe()
        self._watching.restart()

    def _on_order(self) -> None:
        """The controller has said something."""
        assert self._link is not None
        member = self._link.member
        while member.kills:
            self._end_hung(member.kills.pop(0))
        if member.seal is not None:
            seal, member.seal = member.seal, None
            self._sealing = asyncio.get_running_loop().create_task(self._tell_sealed(seal))
        if member.stop is not None and not self._job_over.is_set():
            self._on_stop(member.stop)
        elif member.must_halt:
            self._settle(_Outcome("halted", 0, "all nodes begin again"))
        elif member.is_spare and not self._is_spare:
            self._say(
                f"{self._job.node} is a spare: the job has its nodes, and gets this one when one is lost"
            )
        self._is_spare = member.is_spare

    async def _tell_sealed(self, seal: Seal) -> None:
        place, outcome, link = self._place, self._outcome, self._link
        if link is None or place is None or place.incarnation != seal.incarnation or outcome.done():
            return
        self._watching.expect()
        if seal.warm and self._restarts:
            await self._restarts.warmed(lambda: self._watching.is_ready, outcome.done)
        step, why = await self._caching.next_sealed(place, outcome.done, alike=seal.alike, leave=seal.leave)
        if step is not None:
            link.sealed(seal.incarnation, step, why)

    def _end_hung(self, kill: Kill) -> None:
        assert self._place is not None
        if self._place.restarts >= self._job.max_restarts:
            if not self._no_restart_told:
                self._no_restart_told = True
                self._warn(f"rank {kill.rank}: {kill.reason}; no restart is left, so it is not ended")
        elif (
            self._workers is not None
            and not self._outcome.done()
            and not self._workers.kill(kill.rank, kill.process, one_line(kill.reason))
            and os.path.exists(f"/proc/{kill.process}")
        ):
            self._warn(f"rank {kill.rank}: {kill.reason}; process {kill.process} is no worker of ours")

    async def _watch_lease(self, link: Link) -> None:
        cut_off = CutOff(link.member)
        while True:
            await asyncio.sleep(1.0)
            why = cut_off.look(self._watching.steps_made, asyncio.get_running_loop().time())
            if why and not (self._outcome.done() or self._has_parted):
                self._warn(f"{why} ({self._controller.at}): the workers of this node end")
                kind, code = ("halted", 0) if self._together else ("alone", 1)
                self._settle(_Outcome(kind, code, why))

    def _on_stop(self, stop: Stop) -> None:
        self._stop_code = 0 if self._is_spare else stop.exit_code
        self._stopped_by_hand = stop.by_operator
        self._job_over.set()
        self._controller.may_end()
        self._settle(_Outcome("stopped", self._stop_code, stop.reason))

    def _settle(self, outcome: _Outcome) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    @property
    def _incarnation(self) -> int:
        return self._place.incarnation if self._place else 0

    def _cause(self, failure: root_cause.Failure) -> Cause:
        assert self._restarts is not None
        return self._restarts.cause(failure, self._watching.steps(failure.rank))

    # After the workers.

    def _explain(self, outcome: _Outcome, ended: _Outcome | None = None) -> _Outcome:
        """Say why the job failed; the exit code is that of the failure that came first, or as ``ended`` says."""
        assert self._workers is not None
        failures = self._workers.failures
        root = root_cause.first(failures)
        print(root_cause.render(self._job.script, self._job.node, failures), file=sys.stderr, flush=True)
        target = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if target:
            root_cause.hand_up(root, target)
        if self._link:
            for failure in failures[1:]:
                self._link.found(root_cause.finding(failure, self._job.node, self._incarnation))
        if ended is not None:
            return ended
        return replace(outcome, code=self._workers.exit_code, reason=f"rank {root.rank}: {root.text}")

    async def _sweep(self) -> None:
        ours = {self._guard.pid, *self._watching.pids}
        ours |= {self._controller.pid} if self._controller.pid else set()
        ours |= self._restarts.pids if self._restarts else set()
        await sweep(frozenset(ours), self._kill_now)

    async def _say_goodbye(self, outcome: _Outcome) -> int:
        """Tell the controller, wait for the other nodes, end what is beside the workers; returns the exit code."""
        if self._restarts:
            self._restarts.end()
        if outcome.kind == "stopped" and (outcome.code or self._stopped_by_hand):
            self._say(f"the job was ended: {outcome.reason}")
        if self._lease:
            self._lease.cancel()
        if not self._has_parted:
            await self._part(outcome)
        await self._controller.settled()
        await self._watching.end()
        if self._link:
            await self._link.close()
        await self._controller.stop()
        await self._sweep()
        self._watching.close()
        self._caching.close()
        code = self._stop_code if outcome.kind == "finished" and self._stop_code else outcome.code
        if self._controller.is_here:
            ending = {"exit_code": code, "reason": outcome.reason, "ended_unix_s": time.time()}
            self._write("end.json", ending)
        return code

    async def _part(self, outcome: _Outcome) -> None:
        """Keep what is on its way to storage, say that this node has ended, and wait for the others."""
        self._has_parted = True
        await self._wait_for_storage(outcome)
        if self._link:
            self._link.ended(outcome.code, outcome.reason)
            await self._link.drained(_DRAIN_S)
            if self._place is None and not self._job_over.is_set():
                await self._link.unseated(_DRAIN_S)
            await self._wait_for_others(outcome)

    async def _wait_for_storage(self, outcome: _Outcome) -> None:
        """Keep the cache until what was to be on storage is there: it ends with this process."""
        persisting = self._job.persisting
        if persisting is None:
            return
        briefly_s = min(persisting.wait_s, _FAILED_WAIT_S)
        wait_s = {
            "finished": persisting.wait_s,
            "failed": briefly_s,
            "alone": briefly_s,
            "stopped": briefly_s if self._stopped_by_hand else 0.0,
        }.get(outcome.kind, 0.0)

        def in_vain() -> bool:
            over = self._job_over.is_set() and not self._stopped_by_hand
            interrupted = self._kill_now.is_set() or over or self._signalled is not None
            return interrupted or not self._watching.is_steady

        lost = await self._caching.stored(wait_s, in_vain, self._say)
        if lost:
            self._warn(f"{lost}: see `keepstep status {self._folder}`")

    async def _wait_for_others(self, outcome: _Outcome) -> None:
        """The job is over when all nodes are: the controller says so, and node 0 keeps it alive until then."""
        assert self._link is not None
        if self._place is None or self._job_over.is_set():
            return
        alone = self._place.node_count == 1
        patience_s = self._job.linger_s if alone or outcome.kind != "finished" else _EXIT_BARRIER_S
        moves = self._controller.seat and self._together and outcome.kind == "finished"
        away_s = _NEXT_LEADER_S if moves else _DRAIN_S if alone else self._job.linger_s
        gone = asyncio.ensure_future(self._link.lost(away_s))
        over = asyncio.ensure_future(self._job_over.wait())
        kill = asyncio.ensure_future(self._kill_now.wait())
        waits: list[asyncio.Future[Any]] = [gone, over, kill]
        again = [self._outcome] if outcome.kind == "finished" and self._together else []
        await asyncio.wait([*waits, *again], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    # Words and files.

    def _describe(self) -> None:
        if not self._controller.is_here:
            return
        told = run_folder.description(
            self._job, self._folder, self._place, self._started_unix_s, self._controller.at, self._secret
        )
        self._write(
            "run.json",
            {
                **told,
                **({"term": self._controller.term} if self._controller.seat else {}),
                "rings": {str(rank): path for rank, path in self._watching.rings.items()},
            },
        )

    def _write(self, name: str, content: Mapping[str, object]) -> None:
        try:
            run_folder.write_json(self._folder / name, content)
        except OSError as error:
            self._warn(f"{self._folder / name}: cannot be written: {error.strerror}")

    def _say(self, text: str) -> None:
        if not self._job.quiet:
            self._warn(text)

    def _note(self, text: str) -> None:
        if self._job.verbose:
            self._say(text)

    def _warn(self, text: str) -> None:
        print(f"keepstep: {one_line(text)}", file=sys.stderr, flush=True)


class _EndedEarly(Exception):
    """A signal or the controller ended the job before there were workers."""

    def __init__(self, outcome: _Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome
