"""What a launcher keeps so that a restart is quick, how long each one took, and what each one was for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from keepstep.core.budgets import Cause, Refusal, pause_s, refusal
from keepstep.core.incident import Recovery
from keepstep.core.steady_time import monotonic_s, steady_unix_s
from keepstep.detect.error_kind import kind_of
from keepstep.launch.command.placement import OURS, Place, WorkerPlan
from keepstep.launch.local_run import LocalRun
from keepstep.launch.workers.gpu_memory import GpuMemory
from keepstep.launch.workers.processes import Child
from keepstep.launch.workers.recovery_times import Milestones, Restart
from keepstep.launch.workers.root_cause import Failure
from keepstep.launch.workers.standbys import Imports, Standbys
from keepstep.launch.workers.survivors import Survivors

_WARM_AFTER_S = 60.0  # seconds after which standbys are warmed though no optimizer step was seen
_WARMED_S = 60.0  # most seconds that a restart which can wait waits for standbys
_LOOK_S = 0.1


class Restarts:
    """Milestones, standbys and survivors; a job that is never restarted has none of them."""

    def __init__(
        self,
        run: LocalRun,
        environ: Mapping[str, str],
        *,
        recovered: Callable[[Recovery], None],
        raised: Callable[[int], object],
        leaves: Callable[[int], object] = lambda _: None,
        lost: Callable[[int, str], object] = lambda _process, _error: None,
        imported: Callable[[Imports], object] = lambda _: None,
    ) -> None:
        """``recovered`` is called once all ranks train again after a restart, ``imported`` with what workers import.

        ``raised`` is called with a rank that says that it ends with an error, where a restart may follow; ``leaves``
        with one that says that it ends, ``lost`` with a process whose training has ended, and its error: a restart may
        follow, and it may survive.
        """
        self._job, job = run.job, run.job
        self._recovered, self._raised, self._leaves, self._imported = recovered, raised, leaves, imported
        self._lost = lost
        self._have_told_imports = False
        self._milestones = Milestones(self._reached) if job.max_restarts else None
        environ = {name: value for name, value in environ.items() if name not in OURS}
        self.standbys = Standbys(run, job.standbys, environ)
        self.gpu_memory = GpuMemory(run)
        in_place = job.in_place and job.max_restarts > 0
        if in_place and job.master_port and job.rendezvous.endpoint is None:
            in_place = False
            run.warn(
                "--in-place: every process is replaced at a restart, since --master-port gives all the same port"
            )
        self.survivors = Survivors(run, self._has_lost) if in_place else None
        self._incarnation = 0
        self._plans: Sequence[WorkerPlan] = ()
        self._stepped: set[int] = set()  # ranks that have made a step in this incarnation
        self._is_last = False  # no restart is left after this incarnation
        self._due = False  # standbys are to be warmed as soon as a worker has said what it imports
        self._later: asyncio.TimerHandle | None = None
        self._restart: Restart | None = None
        self._taken = {"standbys": 0, "survived": 0}  # how many workers of the next incarnation are each
        self._causes: list[Cause] = []
        self._loaded: dict[int, int] = {}  # step of the state that a rank began with, by rank

    def environment(self, place: Place, local_rank: int) -> dict[str, str]:
        """Variables by which a worker tells its milestones, its imports, and that it can outlive its incarnation."""
        if self._milestones is None:
            return {}
        return {
            **self._milestones.environment(place.incarnation),
            **self.standbys.environment(local_rank),
            **(self.survivors.environment if self.survivors else {}),
        }

    def take(self, local_rank: int, environment: Mapping[str, str], outputs: Sequence[int]) -> Child | None:
        """Make the survivor of a local rank, else its warm standby, a worker again; None when there is neither.

        ``outputs``: descriptors of its stdout and stderr. The caller sees to the child's end (``Processes.become``).
        """
        for kind, kept in (("survived", self.survivors), ("standbys", self.standbys)):
            if kept and (child := kept.take(local_rank, environment, outputs)):
                self._taken[kind] += 1
                return child
        return None

    def started(self, plans: Sequence[WorkerPlan], place: Place) -> None:
        """Note that the workers run. Standbys are warmed once all have made a step, or are a minute old."""
        self._plans, self._incarnation, self._stepped, self._loaded = plans, place.incarnation, set(), {}
        if self._restart:
            ranks = frozenset(plan.rank for plan in plans)
            self._restart.started(ranks, **self._taken, now_s=time.monotonic())
        self._taken = dict.fromkeys(self._taken, 0)
        if self._later:
            self._later.cancel()
        self._due, self._is_last = False, place.restarts >= self._job.max_restarts
        self._later = asyncio.get_running_loop().call_later(_WARM_AFTER_S, self._warm)

    @property
    def pids(self) -> frozenset[int]:
        """Processes that wait to play a rank, and what else is kept for a restart."""
        own = self.standbys.pids | self.gpu_memory.pids
        return own | self.survivors.pids if self.survivors else own

    def ended(self, failure: Failure, failed_s: float, incarnation: int) -> None:
        """Note that all workers have ended because of ``failure``, and that ``incarnation`` begins."""
        self._restart = Restart(failure, failed_s, time.monotonic(), incarnation, self.gpu_memory.told())

    def cause(self, failure: Failure, steps: int) -> Cause:
        """A failure as the restart budgets count it.

        ``steps``: that its rank made in this incarnation; -1: unknown. A rank that has neither made a step nor left a
        message may have failed for any reason, so that its step counts as unknown.
        """
        known = steps > 0 or (steps == 0 and bool(failure.message))
        step = self._loaded.get(failure.rank, 0) + steps if known else -1
        at_s = steady_unix_s(monotonic_s(failure.unix_s))
        kind = kind_of(failure.text)
        return Cause(
            *(at_s, self._job.node, failure.rank, step, failure.text, failure.by_keepstep),
            kind=kind[1] if kind else "",
        )

    def step_of(self, rank: int, steps: int) -> int:
        """The step that a rank was in which made so many in this incarnation (-1: unknown); -1: not known."""
        loaded = self._loaded.get(rank)
        return -1 if loaded is None and steps < 1 else (loaded or 0) + max(steps, 0)

    def refused(self, cause: Cause) -> Refusal | None:
        """Why the budgets allow no restart for this cause; None: they do, and it is counted."""
        self._causes.append(cause)
        return refusal(self._job.restart_budget, self._causes)

    @property
    def pause_s(self) -> float:
        """How long to wait before the restart for the newest cause."""
        return pause_s(self._causes)

    async def warmed(self, ready: Callable[[], bool], over: Callable[[], bool]) -> None:
        """Wait until a restart needs no fresh process: all standbys are warm, and everything else is ``ready``.

        It takes a minute at most, and ends once the incarnation is ``over``. Workers that may survive do not count:
        whether they can leave their training is known only when they are told to.
        """
        deadline_s = time.monotonic() + _WARMED_S
        while time.monotonic() < deadline_s and not (over() or self._is_last):
            if self._due and self.standbys.are_warm and ready():
                return
            await asyncio.sleep(_LOOK_S)

    def end(self) -> None:
        """End all processes that wait, because there are no more restarts."""
        if self._later:
            self._later.cancel()
        if self._milestones:
            self._milestones.close()
            self._milestones = None
        self.standbys.end()
        self.gpu_memory.close()
        if self.survivors:
            self.survivors.end()

    def _warm(self) -> None:
        self._due = True
        if not self._is_last:
            self.standbys.warm(self._plans)
            self.gpu_memory.watch()
        if not self._have_told_imports and (imports := self.standbys.imports) is not None:
            self._have_told_imports = True
            self._imported(imports)

    def _has_lost(self, process: int, error: str) -> None:
        if not self._is_last:
            self._lost(process, error)

    def _reached(self, name: str, rank: int, incarnation: int, at_s: float, step: int) -> None:
        if incarnation != self._incarnation:
            return
        if name == "raised" and not self._is_last:
            self._raised(rank)
        if name == "leaves":
            self._leaves(rank)
        if name == "state":
            self._loaded[rank] = step
        if name == "step":
            self._stepped.add(rank)
        if self._due or len(self._stepped) == len(self._plans):
            self._warm()
        recovery = self._restart.reached(name, rank, at_s) if self._restart else None
        if recovery:
            self._recovered(recovery)
