"""What a launcher keeps so that a restart is quick, how long each one took, and what each one was for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from keepstep.core.budgets import Cause, Refusal, refusal
from keepstep.core.incident import Recovery
from keepstep.launch.command.job import Job
from keepstep.launch.command.placement import OURS, Place, WorkerPlan
from keepstep.launch.workers.guard import Guard
from keepstep.launch.workers.processes import Processes
from keepstep.launch.workers.recovery_times import Milestones, Restart
from keepstep.launch.workers.root_cause import Failure
from keepstep.launch.workers.standbys import Standbys
from keepstep.launch.workers.survivors import Survivors

_WARM_AFTER_S = 60.0  # of training that makes no optimizer step that we would see
_WARMED_S = 60.0  # that a restart which can wait waits for standbys (`control.operating`)
_LOOK_S = 0.1


class Restarts:
    """Milestones and standbys of a job that may be restarted; of another there is nothing."""

    def __init__(
        self,
        job: Job,
        environ: Mapping[str, str],
        folder: Path,
        processes: Processes,
        guard: Guard,
        *,
        warn: Callable[[str], None],
        note: Callable[[str], None],
        recovered: Callable[[Recovery], None],
        raised: Callable[[int], object],
    ) -> None:
        """``folder``: of this node. ``recovered`` is told once all ranks train again.

        ``raised`` is told a rank that goes down with an error, where a restart may follow; in the last incarnation it
        may take its time.
        """
        self._recovered, self._raised = recovered, raised
        self._milestones = Milestones(self._reached) if job.max_restarts else None
        environ = {name: value for name, value in environ.items() if name not in OURS}
        self.standbys = Standbys(job.standbys, environ, folder, processes, guard, warn=warn, note=note)
        in_place = job.in_place and job.max_restarts > 0
        if in_place and job.master_port and job.rendezvous.endpoint is None:
            in_place = False
            warn(
                "--in-place: every process is replaced at a restart, since --master-port gives all the same port"
            )
        self.survivors = Survivors(processes, guard, job.leave_s, warn=warn) if in_place else None
        self._incarnation = 0
        self._plans: Sequence[WorkerPlan] = ()
        self._stepped: set[int] = set()
        self._is_last = False
        self._due = False  # standbys are to be warmed, as soon as it is known with what
        self._later: asyncio.TimerHandle | None = None
        self._restart: Restart | None = None
        self._limits, self._node, self._most = job.restart_budget, job.node, job.max_restarts
        self._causes: list[Cause] = []
        self._loaded: dict[int, int] = {}  # step of the state that a rank began with, by rank

    async def dismiss(self) -> None:
        """No process goes on in a job of another size."""
        if self.survivors:
            await self.survivors.dismiss()

    def environment(self, place: Place, local_rank: int) -> dict[str, str]:
        """What a worker tells its milestones and imports by."""
        if self._milestones is None:
            return {}
        return {
            **self._milestones.environment(place.incarnation),
            **self.standbys.environment(local_rank),
            **(self.survivors.environment if self.survivors else {}),
        }

    def started(self, plans: Sequence[WorkerPlan], place: Place, from_standbys: int, survived: int) -> None:
        """The workers run. New standbys are warmed once all have made a step, or are a minute old."""
        self._plans, self._incarnation, self._stepped, self._loaded = plans, place.incarnation, set(), {}
        if self._restart:
            ranks = frozenset(plan.rank for plan in plans)
            self._restart.started(ranks, from_standbys, survived, time.monotonic())
        if self._later:
            self._later.cancel()
        self._due, self._is_last = False, place.restarts >= self._most
        self._later = asyncio.get_running_loop().call_later(_WARM_AFTER_S, self._warm)

    @property
    def pids(self) -> frozenset[int]:
        """Processes that wait to play a rank."""
        standbys = self.standbys.pids
        return standbys | self.survivors.pids if self.survivors else standbys

    def ended(self, failure: Failure, failed_s: float, incarnation: int) -> None:
        """All workers have ended because of ``failure``; ``incarnation`` begins."""
        self._restart = Restart(failure, failed_s, time.monotonic(), incarnation)

    def cause(self, failure: Failure, steps: int) -> Cause:
        """What the budgets have to know of a failure. ``steps``: that its rank made in this incarnation; -1: unknown.

        A rank that has neither made a step nor left a word of its own may have failed for any reason.
        """
        known = steps > 0 or (steps == 0 and bool(failure.message))
        step = self._loaded.get(failure.rank, 0) + steps if known else -1
        return Cause(failure.unix_s, self._node, failure.rank, step, failure.text, failure.by_keepstep)

    def refused(self, cause: Cause) -> Refusal | None:
        """Why there is no restart for this cause; None: there is, and it is counted."""
        self._causes.append(cause)
        return refusal(self._limits, self._causes)

    async def warmed(self, ready: Callable[[], bool], over: Callable[[], bool]) -> None:
        """Wait until standbys are warm, so that a restart needs no fresh process, and all else is ``ready``.

        A minute at most, or until it is ``over``. Processes that can go on do not change that: whether they will is
        known only when they are called.
        """
        deadline_s = time.monotonic() + _WARMED_S
        while time.monotonic() < deadline_s and not (over() or self._is_last):
            if self._due and self.standbys.are_warm and ready():
                return
            await asyncio.sleep(_LOOK_S)

    def end(self) -> None:
        """There are no more restarts."""
        if self._later:
            self._later.cancel()
        if self._milestones:
            self._milestones.close()
            self._milestones = None
        self.standbys.end()
        if self.survivors:
            self.survivors.end()

    def _warm(self) -> None:
        self._due = True
        if not self._is_last:
            self.standbys.warm(self._plans)

    def _reached(self, name: str, rank: int, incarnation: int, at_s: float, step: int) -> None:
        if incarnation != self._incarnation:
            return
        if name == "raised" and not self._is_last:
            self._raised(rank)
        if name == "state":
            self._loaded[rank] = step
        if name == "step":
            self._stepped.add(rank)
        if self._due or len(self._stepped) == len(self._plans):
            self._warm()
        recovery = self._restart.reached(name, rank, at_s) if self._restart else None
        if recovery:
            self._recovered(recovery)
