"""The job's state as operators see it: an explicit table of what may follow what (TRANSOM, section IV-A, TOL).

No second truth beside ``reforming``: what the controller knows is looked at, and the state follows along the table, so
that nothing is ever published that the table does not name.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from keepstep.control.cluster import Cluster
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.rendezvous import Rendezvous
from keepstep.control.membership.transitions import FOLLOWING, JobState

_UNSEEN_STEPS_S = 60.0  # of progress without an optimizer step that we would see: it trains, too


@dataclass(frozen=True, slots=True)
class Facts:
    """What the controller knows of the job at one moment."""

    placed: bool = False  # there is a rank table
    incarnation: int = 0
    trains: bool = False  # all ranks of this incarnation have made a step
    ending: bool = False  # the workers of this incarnation are being ended, or have been
    suspended: bool = False  # for an operator, until one resumes it
    exit_code: int | None = None  # of a job that is over; 0 when an operator stopped it


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


def way(here: JobState, there: JobState) -> tuple[JobState, ...]:
    """The shortest way along the table, without ``here``; empty when there is none, or nowhere to go."""
    before: dict[JobState, JobState] = {here: here}
    open_ = deque([here])
    while open_ and there not in before:
        state = open_.popleft()
        for following in JobState:  # in one order: the way is always the same
            if following in FOLLOWING[state] and following not in before:
                before[following] = state
                open_.append(following)
    found: list[JobState] = []
    while there in before and there is not here:
        found.insert(0, there)
        there = before[there]
    return tuple(found)


class JobStates:
    """Follows the facts. A controller that begins anew begins where they are."""

    def __init__(self) -> None:
        self.state: JobState | None = None
        self.since_s = 0.0
        self._trained = -1  # newest incarnation of which all ranks have made a step

    def look(
        self,
        cluster: Cluster,
        rendezvous: Rendezvous,
        reforming: Reforming,
        dying: int,
        exit_code: int | None,
        now_s: float,
    ) -> JobState:
        """Follow what the controller knows. ``dying``: incarnation of which a death is open; -1: none is."""
        incarnation = reforming.incarnation
        if self._trained < incarnation and dying < incarnation:
            steps_unseen = now_s - self.since_s >= _UNSEEN_STEPS_S
            self._trained = incarnation if cluster.trains(steps_unseen) else self._trained
        facts = Facts(
            placed=bool(rendezvous.placements) or bool(cluster.node_of),
            incarnation=incarnation,
            trains=self._trained >= incarnation,
            ending=reforming.under_way or dying >= incarnation,
            suspended=reforming.suspended,
            exit_code=exit_code,
        )
        self.follow(facts, now_s)
        return self.state or state_of(facts)

    def follow(self, facts: Facts, now_s: float) -> tuple[JobState, ...]:
        """The states that it has come through since the last call, the present one last.

        What happened between two looks is made up for along the table. Where no way leads, facts are older than what
        was said: it stays, and what ended stays ended.
        """
        there = state_of(facts)
        if self.state is None:
            self.state, self.since_s = there, now_s
            return (there,)
        passed = way(self.state, there)
        if passed:
            self.state, self.since_s = there, now_s
        return passed
