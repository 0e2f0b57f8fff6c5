"""The workers of one node: started together, watched, ended together, and begun again in the next incarnation."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace

from keepstep.core.abort_file import drop_empty
from keepstep.core.incident import Recovery
from keepstep.launch.command import run_folder
from keepstep.launch.command.job import STDERR, STDOUT
from keepstep.launch.command.placement import ERROR_FILE, OURS, Place, WorkerPlan, spare_plan, worker_plan
from keepstep.launch.local_run import LocalRun
from keepstep.launch.signals import pass_on
from keepstep.launch.workers.processes import (
    FREEING_S,
    UNKILLABLE_S,
    Child,
    Processes,
    descendants,
    end_group,
    failing_status,
)
from keepstep.launch.workers.rank_words import RankWords, Words, read_at
from keepstep.launch.workers.restarts import Restarts
from keepstep.launch.workers.rings import preload, shim
from keepstep.launch.workers.root_cause import (
    Failure,
    examine,
    first,
    last_lines,
    left_early,
    seem_left,
    to_blame,
)
from keepstep.launch.workers.standbys import Imports
from keepstep.launch.workers.streams import Following, WorkerStreams, open_for_worker, sizes, worker_streams

_SWEEP_PATIENCE_S = 5.0
_LOOK_S = 0.05
_LEAVING_S = 2.0  # most seconds from lost connections to the end of the worker that may have closed them
_ENDING_S = 10.0  # most seconds to the end of a worker that says that its program is over


class Workers:
    """The workers of one incarnation."""

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        streams: Mapping[int, WorkerStreams],
        processes: Processes,
        restarts: Restarts,
        *,
        failed: Callable[[Failure], None],
        finished: Callable[[], None],
        told: Callable[[Failure], None] = lambda _: None,
        is_part: bool = False,
        words: Mapping[int, RankWords] | None = None,
    ) -> None:
        """``failed`` is called at the first failure, ``finished`` when all ended well.

        ``told`` is called, too, as soon as another fails, but not at an end that the launcher may have brought about,
        and when one leaves while others still train. ``is_part``: whether other nodes have workers of the job.
        ``streams`` and ``words`` are by local rank.
        """
        self._plans, self._streams, self._words = plans, streams, words or {}
        self._begin_at = sizes(streams.values())
        self._processes, self._restarts = processes, restarts
        self._failed, self._finished, self._told, self._is_part = failed, finished, told, is_part
        self._children: dict[int, Child] = {}  # workers by local rank
        self._asked: set[int] = set()  # signals that the launcher sent to end the workers
        self._asked_unix_s = 0.0  # when it sent the first one
        self._all_ended = asyncio.Event()
        self._interrupted: set[int] = set()  # failed ranks whose status is the launcher's signal
        self._falling: set[int] = set()  # local ranks that have failed and are not gone yet
        self._lost: set[int] = set()  # local ranks that live and have failed, because they lost others
        self._leaving: set[int] = set()  # ranks that say that they end
        self._reasons: dict[int, str] = {}  # why keepstep killed a worker, by rank
        self.failures: list[Failure] = []  # in the order in which they were seen
        self.left: list[Failure] = []  # workers that have ended well while others were still training
        self.failed_s = 0.0  # when the first one was; CLOCK_MONOTONIC

    def start(self, environ: Mapping[str, str]) -> None:
        """Start all workers. Raises RunError where one cannot be started; ``end`` then ends those that were."""
        for plan in self._plans:
            streams, words = self._streams[plan.local_rank], self._words_of(plan)
            opened = [open_for_worker(path) for path in (streams.stdout, streams.stderr)]
            kept = [words.writer(stream) for stream in (STDOUT, STDERR)]
            candidates = zip(opened, kept, (1, 2), strict=True)
            outputs = [next(one for one in three if one is not None) for three in candidates]
            try:
                self._children[plan.local_rank] = self._begin(plan, {**environ, **plan.environment}, outputs)
            finally:
                for file in opened:
                    if file is not None:
                        os.close(file)
                words.started()

    def _words_of(self, plan: WorkerPlan) -> RankWords:
        return self._words.get(plan.local_rank, RankWords())

    def _begin(self, plan: WorkerPlan, environment: Mapping[str, str], outputs: Sequence[int]) -> Child:
        """Make a survivor of the last incarnation or a warm standby the worker, else start a process."""

        def exited(child: Child) -> None:
            self._exited(plan, child)

        name = f"rank {plan.rank}"
        if child := self._restarts.take(plan.local_rank, environment, outputs):
            self._processes.become(child, name, exited)
            return child
        stdout, stderr = outputs
        return self._processes.start(
            name, plan.command, environment, on_exit=exited, stdout=stdout, stderr=stderr
        )

    @property
    def alive(self) -> list[Child]:
        """Workers that have not ended."""
        return [child for child in self._children.values() if child.alive]

    @property
    def pids(self) -> dict[int, int]:
        """The processes of ``alive``, by rank."""
        children = ((plan.rank, self._children.get(plan.local_rank)) for plan in self._plans)
        return {rank: child.pid for rank, child in children if child is not None and child.alive}

    @property
    def words(self) -> dict[int, list[str]]:
        """Where what the workers write can be read, by rank; as by `read_at`."""
        return {
            plan.rank: read_at(self._words_of(plan), self._streams[plan.local_rank], self._begin_at)
            for plan in self._plans
        }

    def said(self) -> Iterator[str]:
        """The end of what each worker has written to its stderr."""
        for plan in self._plans:
            file = self._streams[plan.local_rank].stderr
            yield "\n".join(last_lines(file)) if file else self._words_of(plan).stderr() or ""

    @property
    def exit_code(self) -> int:
        """The root cause's exit code; where the launcher's signal replaced that, the code of the failure seen first."""
        root = first(self.failures)
        return (self.failures[0] if root.rank in self._interrupted else root).exit_code

    @property
    def blamed(self) -> Failure:
        """The failure, or the early exit, for which the job begins again or ends."""
        return to_blame(self.failures, self.left, len(self._plans))

    @property
    def first_left(self) -> Failure | None:
        """The first worker that has left early; None where so many have that those that remained are the odd ones."""
        few = 2 * len(self.left) <= len(self._plans)
        return min(self.left, key=lambda one: one.unix_s) if self.left and few else None

    def kill(self, rank: int, process: int, reason: str) -> bool:
        """Kill a worker that hangs; ``reason`` counts as its error. False: this process does not play that rank."""
        self._look()  # a worker that fails by itself is not to be taken for one that was killed
        for plan in self._plans:
            child = self._children.get(plan.local_rank)
            if plan.rank == rank and child is not None and child.alive and child.pid == process:
                self._reasons[rank] = reason
                end_group(child.pid, signal.SIGKILL)
                # At once: others fail by its death, and their ends may be told before its own.
                self._falls(plan, lambda _: -signal.SIGKILL)
                return True
        return False

    def raised(self, rank: int) -> None:
        """Count a worker as failed that says that it ends with the error in its error file."""
        for plan in self._plans:
            if plan.rank == rank:
                self._falls(plan, lambda _: 1)

    def lost(self, process: int, error: str) -> None:
        """Count a worker as failed whose training has ended by an error that tells of others; it may survive."""
        for plan in self._plans:
            local_rank = plan.local_rank
            child = self._children.get(local_rank)
            if child is None or child.pid != process or not child.alive or self._asked:
                continue
            if local_rank not in self._falling | self._lost:
                self._lost.add(local_rank)
                failure = Failure(plan.rank, local_rank, process, 1, time.time(), error, error, None)
                self._fail(failure, time.monotonic())

    def leaves(self, rank: int) -> None:
        """Note that a worker says that its program is over."""
        self._leaving.add(rank)

    def watch(self) -> None:
        """Look many times a second for workers that have failed, but whose memory is still being freed."""
        if self.alive and not self._asked:
            asyncio.get_running_loop().call_later(_LOOK_S, self.watch)
        self._look()

    def _look(self) -> None:
        for plan in self._plans:
            self._falls(plan, failing_status)

    def _falls(self, plan: WorkerPlan, status_of: Callable[[int], int | None]) -> None:
        child = self._children.get(plan.local_rank)
        if child is None or not child.alive or self._asked or plan.local_rank in self._falling | self._lost:
            return
        status, now_s = status_of(child.pid), time.monotonic()
        if status:
            self._falling.add(plan.local_rank)
            self._fail(self._examine(plan, child.pid, status, now_s), now_s)

    async def leaving(self, over: Callable[[], bool]) -> None:
        """Where workers have only lost connections, wait a moment for the end of the one that has closed them.

        Python takes long to end, and closes connections early. Nothing is waited for once the end is ``over``.
        """
        began_s = time.monotonic()
        while self.alive and not over():
            self._look()
            if time.monotonic() - began_s >= self._patience_s():
                return
            await _either(self._all_ended, None, _LOOK_S)

    def _patience_s(self) -> float:
        """How long to wait for a worker that says that it ends, or else for the one that all others have lost."""
        if not seem_left(self.failures):
            return 0.0
        said = [plan.local_rank for plan in self._plans if plan.rank in self._leaving]
        children = [self._children.get(local_rank) for local_rank in said if local_rank not in self._falling]
        if any(child is not None and child.alive for child in children):
            return _ENDING_S
        # On several nodes it may be on another one.
        return _LEAVING_S if self.failures and not (self._is_part or self.left) else 0.0

    def call_survivors(self) -> None:
        """Tell workers that can outlive this incarnation to leave it: they do not count as its workers any more."""
        self._look()  # a worker that fails together with the first one is no survivor
        if self._restarts.survivors:
            well = {local: child for local, child in self._children.items() if local not in self._falling}
            for local_rank in self._restarts.survivors.call(well):
                del self._children[local_rank]

    def ask(self, number: int) -> None:
        """Send a signal to the whole process group of every worker that lives."""
        self._look()  # a worker that fails by itself is not to be taken for one that the signal ended
        self._asked_unix_s = self._asked_unix_s or time.time()
        self._asked.add(number)
        for child in self.alive:
            end_group(child.pid, number)

    async def end(self, number: int, patience_s: float, kill_now: asyncio.Event) -> list[Child]:
        """End all workers: signal ``number``, then SIGKILL after ``patience_s`` or once ``kill_now`` is set.

        Survivors that were called have left their training by then, or are ended too. Returns workers and survivors
        that even SIGKILL did not end (stuck in the kernel).
        """
        if self.alive:
            self.ask(number)
            await _either(self._all_ended, kill_now, patience_s)
        if self.alive:
            self.ask(signal.SIGKILL)
            await _either(self._all_ended, None, UNKILLABLE_S)
        deadline_s = time.monotonic() + FREEING_S
        while self.alive and all(failing_status(child.pid) for child in self.alive):
            if time.monotonic() > deadline_s:
                break
            await _either(self._all_ended, None, 1.0)
        for child in self._children.values():
            if not child.alive:
                self._processes.clear(child)
        survivors = self._restarts.survivors
        stuck = await survivors.left() if survivors else []
        return self.alive + stuck

    def _exited(self, plan: WorkerPlan, child: Child) -> None:
        assert child.status is not None
        if child.status == 0:
            self._ended_well(plan, child)
        elif plan.local_rank not in self._falling | self._lost:
            failure = self._examine(plan, child.pid, child.status, child.ended_s)
            by_us = any(child.status in (-number, 128 + number) for number in self._asked)
            # A worker that was already ending with an error of its own has failed, whatever signal it was sent.
            if not by_us or failure.error_file:
                if by_us:
                    self._interrupted.add(failure.rank)
                self._fail(replace(failure, late=self._is_late(failure)), child.ended_s)
        drop_empty(plan.environment[ERROR_FILE], child.pid)
        if not self.alive and (self._asked or len(self._children) == len(self._plans)):
            self._all_ended.set()
            if not self.failures and not self._asked:
                self._finished()

    def _ended_well(self, plan: WorkerPlan, child: Child) -> None:
        """Note the end of a worker as an early one if others run, or have failed, but by lost connections only."""
        has_failed = plan.local_rank in self._falling or not seem_left(self.failures)
        if self._asked or has_failed or not (self.alive or self.failures or self._is_part):
            return
        self.left.append(left_early(plan, child.pid, _unix_s(child.ended_s)))
        self._told(self.left[-1])

    def _is_late(self, failure: Failure) -> bool:
        """Whether a worker may have died of what the launcher had done before, to end them all."""
        killed = failure.status == -signal.SIGKILL and signal.SIGKILL not in self._asked
        return bool(self._asked) and not (killed or failure.unix_s < self._asked_unix_s)

    def _fail(self, failure: Failure, failed_s: float) -> None:
        is_first, has_failed = not self.failures, any(not one.late for one in self.failures)
        self.failures.append(failure)
        if is_first:
            self.failed_s = failed_s
        if is_first and not self._asked:
            self._failed(failure)
        elif has_failed and (
            not failure.late or failure.is_echo
        ):  # else the job was ended, and nobody is to blame
            # The launcher's signal is not what a worker with an error of its own has died of.
            interrupted = failure.rank in self._interrupted
            self._told(replace(failure, status=1) if interrupted else failure)

    def _examine(self, plan: WorkerPlan, pid: int, status: int, failed_s: float) -> Failure:
        stderr, words = self._streams[plan.local_rank].stderr, self._words_of(plan).stderr()
        found = examine(plan, pid, status, _unix_s(failed_s), stderr, words)
        reason = self._reasons.get(plan.rank)
        if not reason or status != -signal.SIGKILL or found.error_file:
            return found
        return replace(found, message=reason, detail=reason, by_keepstep=True)


class Crew:
    """Makes the workers of each incarnation, and keeps what makes a restart quick."""

    def __init__(
        self,
        run: LocalRun,
        environ: Mapping[str, str],
        *,
        failed: Callable[[Failure], None],
        finished: Callable[[], None],
        told: Callable[[Failure], None],
        recovered: Callable[[Recovery], None],
        imported: Callable[[Imports], None],
    ) -> None:
        """``environ``: of each worker, beside what its place adds.

        ``failed``, ``finished`` and ``told`` are called as by `Workers`, ``recovered`` when all ranks train again after
        a restart, ``imported`` with what they import.
        """
        self._run, self.environ = run, environ
        self._failed, self._finished, self._told = failed, finished, told
        self._logs = run_folder.LogFiles(run.folder, run.job.streams.log_dir, run.job.run_id)
        self._following = Following(run.job, self._logs)
        self._words = Words(run.job, self._logs, run.warn)
        self.workers: Workers | None = None  # workers of the newest incarnation
        self.restarts = Restarts(
            run,
            environ,
            recovered=recovered,
            imported=imported,
            raised=lambda rank: self.workers and self.workers.raised(rank),
            leaves=lambda rank: self.workers and self.workers.leaves(rank),
            lost=lambda process, error: self.workers and self.workers.lost(process, error),
        )

    @property
    def failures(self) -> list[Failure]:
        """Failures in the newest incarnation, in the order in which they were seen."""
        return self.workers.failures if self.workers else []

    def warm_for_spare(self, imports: Imports) -> None:
        """Warm standbys on a node that has no place yet, by what the workers of another node import."""
        standbys = self.restarts.standbys
        standbys.folder = self._run.folder / "spares" / str(os.getpid())
        job = self._run.job
        preloaded = preload(self.environ, shim()) if job.watch else {}
        plans = [spare_plan(job, local, self.environ, preloaded) for local in range(job.nproc)]
        standbys.warm_for_spare(imports, plans)

    def start(self, place: Place, environment: Mapping[int, Mapping[str, str]]) -> Workers:
        """Begin an incarnation. ``environment``: what each worker alone is given, by local rank.

        Raises RunError where a worker cannot be started; those that were are to be ended with ``end``.
        """
        job, attempt = self._run.job, place.incarnation
        if self.workers is None:
            self.restarts.standbys.folder = self._run.folder / "nodes" / str(place.node_rank)
        plans: list[WorkerPlan] = []
        streams: dict[int, WorkerStreams] = {}
        words: dict[int, RankWords] = {}
        self._words.renew()
        for local in range(job.nproc):
            rank = place.first_rank + local
            error_file = {ERROR_FILE: str(self._logs.error_file(rank, local, attempt))}
            more = {**error_file, **environment[local], **self.restarts.environment(place, local)}
            plans.append(worker_plan(job, place, local, self.environ, more))
            streams[local] = worker_streams(job, self._logs, rank, local, attempt)
            words[local] = self._words.begin(rank, local, attempt, streams[local])
        self.workers = Workers(
            *(plans, streams, self._run.processes, self.restarts),
            failed=self._failed,
            finished=self._finished,
            told=self._told,
            is_part=place.node_count > 1,
            words=words,
        )
        self._following.start(streams, place)
        self.workers.start({k: v for k, v in self.environ.items() if k not in OURS})
        self.restarts.started(plans, place)
        return self.workers

    async def end(self, number: int, kill_now: asyncio.Event) -> list[Child]:
        """End all workers, as `Workers.end` does."""
        if self.workers is None:
            return []
        return await self.workers.end(number, self._run.job.shutdown_timeout_s, kill_now)

    def resized(self) -> None:
        """The console has another size: so have the workers' terminals."""
        self._words.resize()
        if self.workers:
            pass_on(signal.SIGWINCH, self.workers.pids)

    def said(self) -> Iterator[str]:
        """The end of what each worker of the newest incarnation has written to its stderr."""
        return self.workers.said() if self.workers else iter(())

    async def shown(self) -> None:
        """Have all that the workers have written on the console, and follow them no more."""
        self._following.stop()
        await self._words.shown()

    async def close(self) -> None:
        """Let go of everything, because no incarnation follows."""
        self._following.stop()
        self.restarts.end()
        await self._words.end()


def _unix_s(at_s: float) -> float:
    """A moment on CLOCK_MONOTONIC in Unix seconds."""
    return time.time() - (time.monotonic() - at_s)


async def _either(first: asyncio.Event, second: asyncio.Event | None, timeout_s: float) -> None:
    """Wait until one of the events is set or the time is over."""
    waits = [asyncio.ensure_future(event.wait()) for event in (first, second) if event is not None]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def sweep(apart_from: frozenset[int], sessions: Container[int], kill_now: asyncio.Event) -> None:
    """End all processes below the launcher except some: data loaders and helpers that workers have left behind.

    Those of sessions other than ``sessions`` are meant to outlive the workers: they have called setsid.
    """
    deadline_s = time.monotonic() + _SWEEP_PATIENCE_S
    asked: set[int] = set()
    while left := descendants(os.getpid(), apart_from, sessions):
        urgent = kill_now.is_set() or time.monotonic() >= deadline_s
        for pid in left:
            if urgent or pid not in asked:
                _signal(pid, signal.SIGKILL if urgent else signal.SIGTERM)
                asked.add(pid)
        if time.monotonic() >= deadline_s + UNKILLABLE_S:
            return
        await asyncio.sleep(0.02)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
        if number != signal.SIGKILL:
            os.kill(pid, signal.SIGCONT)
    except OSError:
        return
