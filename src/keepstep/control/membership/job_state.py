"""The job's state as operators see it, after an explicit table of what may follow what (TRANSOM, section IV-A, TOL).

It is no second truth beside ``reforming``: the state follows from what the controller knows, as far as the table allows
it. So a job that has ended stays ended, whatever is heard late.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.control.cluster import Cluster
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.rendezvous import Rendezvous
from keepstep.control.membership.transitions import FOLLOWING, JobState

_UNSEEN_STEPS_S = 60.0  # ranks that get on for so long train, though no optimizer step of theirs is seen


@dataclass(frozen=True, slots=True)
class Facts:
    """What the controller knows of the job at one moment."""

    placed: bool = False  # there is a rank table
    incarnation: int = 0
    trains: bool = False  # all ranks of this incarnation have made a step
    ending: bool = False  # the workers of this incarnation are being ended, or have been
    suspended: bool = False  # no worker runs before an operator resumes the job
    exit_code: int | None = None  # set once the job is over; 0 when an operator stopped it


def state_of(facts: Facts) -> JobState:
    """The state that these facts amount to."""
    if facts.exit_code is not None:
        return JobState.FAILED if facts.exit_code else JobState.DONE
    if not facts.placed:
        return JobState.CREATED
    if facts.suspended:
        return JobState.SUSPENDED
    if facts.ending:
        return JobState.CHECKING
    if facts.trains:
        return JobState.RUNNING
    return JobState.RECOVERING if facts.incarnation else JobState.WARMING_UP


def leads(here: JobState, there: JobState) -> bool:
    """Whether a job can come from one state to another along the table, with whatever states between."""
    reached = {here}
    while further := {state for one in reached for state in FOLLOWING[one]} - reached:
        reached |= further
    return there in reached


class JobStates:
    """Follows the facts. A controller that begins anew begins with the state that they amount to."""

    def __init__(self) -> None:
        self.state: JobState | None = None
        self.since_s = 0.0
        self._trained = -1  # the newest incarnation in which all ranks have made a step

    def look(
        self,
        cluster: Cluster,
        rendezvous: Rendezvous,
        reforming: Reforming,
        dying: int,
        exit_code: int | None,
        now_s: float,
    ) -> JobState:
        """Follow what the controller knows. ``dying``: incarnation in which a death has no verdict yet, or -1."""
        incarnation = reforming.incarnation
        if self._trained < incarnation and dying < incarnation:
            steps_unseen = now_s - self.since_s >= _UNSEEN_STEPS_S
            self._trained = incarnation if cluster.trains(incarnation, steps_unseen) else self._trained
        facts = Facts(
            placed=bool(rendezvous.placements) or bool(cluster.node_of),
            incarnation=incarnation,
            trains=self._trained >= incarnation,
            ending=reforming.under_way or dying >= incarnation,
            suspended=reforming.suspended,
            exit_code=exit_code,
        )
        return self.follow(facts, now_s)

    def follow(self, facts: Facts, now_s: float) -> JobState:
        """The state now. It stays where the table does not lead to what the facts amount to: they are out of date."""
        state = state_of(facts)
        if self.state is None or (state is not self.state and leads(self.state, state)):
            self.state, self.since_s = state, now_s
        return self.state
