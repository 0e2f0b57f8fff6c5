"""What may follow what, as data: the states of a re-forming, and the states of the job as operators see them.

Whatever moves a re-forming from one state to another stands in `TRANSITIONS`; `Reforming` only finds out which events
have happened and carries the actions out. The job's states follow from facts, a re-forming's state among them
(`job_state`); `FOLLOWING` says which changes may be published. The drawings in docs/design/reforming.md are made from
these tables by a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where a re-forming stands."""

    RUNNING = "running"  # no re-forming is under way: workers run, or have finished
    HALTING = "halting"  # launchers end their workers
    WAITING = "waiting"  # all workers have ended, but a place is vacant and no spare is here
    SUSPENDED = "suspended"  # all workers have ended, and an operator has to resume the job
    OVER = "over"  # the job ends


class Event(Enum):
    """What happens to a re-forming. A state ignores the events that its row does not list, apart from `CONCLUSIONS`."""

    FAILED = "workers of a member fail"
    LOST = "members are lost"
    HALTED = "a member has ended its workers unasked"
    AHEAD = "a member plays a later incarnation"
    RETURNED = "a member connects again"
    ORDERED = "a pause is ordered"
    SUSPEND = "a suspension is ordered"
    RESUME = "the operator resumes the job"
    END = "the job ends"
    HELD = "all halted, to be suspended"
    AWAITED = "all halted, a spare has yet to answer"
    PLACED = "all halted, every place can be filled"
    SHORT = "all halted, a place stays vacant"
    REFUSED = "all halted, nothing may begin again"


CONCLUSIONS = frozenset((Event.HELD, Event.AWAITED, Event.PLACED, Event.SHORT, Event.REFUSED))
"""Events that `Reforming` concludes itself once no member is awaited: where they can happen a row has to list them."""


class Action(Enum):
    """What is done on a transition of a re-forming from one state to another."""

    CALL_ROLL = "call the roll"
    VACATE = "vacate their places"
    HALT_ALL = "halt everyone"
    HALT_ONE = "halt it again"
    SAY_SUSPENDED = "say so"
    RELEASE = "drop the suspension"
    LOOK_AGAIN = "look again soon"
    SAY_WAITING = "say for how long"
    GIVE_PLACES = "give out the next rank table"
    END_JOB = "end the job"


@dataclass(frozen=True, slots=True)
class Transition:
    """The state that an event leads to, and what is done on the way, in this order."""

    state: State
    actions: tuple[Action, ...] = ()


_BEGIN = Transition(State.HALTING, (Action.CALL_ROLL, Action.HALT_ALL))
_GIVE_PLACES = Transition(State.RUNNING, (Action.GIVE_PLACES,))
_END_JOB = Transition(State.OVER, (Action.END_JOB,))
_OVER = Transition(State.OVER)


def _under_way(state: State) -> dict[Event, Transition]:
    """The events that do the same in all states in which a re-forming is under way."""
    return {
        Event.LOST: Transition(state, (Action.VACATE,)),
        Event.RETURNED: Transition(state, (Action.HALT_ONE,)),
        Event.SUSPEND: Transition(state, (Action.HALT_ALL,)),
        Event.END: _OVER,
    }


TRANSITIONS: Mapping[State, Mapping[Event, Transition]] = {
    State.RUNNING: {
        Event.FAILED: _BEGIN,
        Event.HALTED: _BEGIN,
        Event.AHEAD: _BEGIN,
        Event.ORDERED: _BEGIN,
        Event.SUSPEND: _BEGIN,
        Event.LOST: Transition(State.HALTING, (Action.CALL_ROLL, Action.VACATE, Action.HALT_ALL)),
        Event.END: _OVER,
    },
    State.HALTING: {
        **_under_way(State.HALTING),
        Event.AWAITED: Transition(State.HALTING, (Action.LOOK_AGAIN,)),
        Event.HELD: Transition(State.SUSPENDED, (Action.SAY_SUSPENDED,)),
        Event.SHORT: Transition(State.WAITING, (Action.SAY_WAITING,)),
        Event.PLACED: _GIVE_PLACES,
        Event.REFUSED: _END_JOB,
    },
    State.WAITING: {
        **_under_way(State.WAITING),
        Event.AWAITED: Transition(State.WAITING, (Action.LOOK_AGAIN,)),
        Event.HELD: Transition(State.SUSPENDED, (Action.SAY_SUSPENDED,)),
        Event.SHORT: Transition(State.WAITING),
        Event.PLACED: _GIVE_PLACES,
        Event.REFUSED: _END_JOB,
    },
    State.SUSPENDED: {
        **_under_way(State.SUSPENDED),
        Event.HELD: Transition(State.SUSPENDED),
        Event.RESUME: Transition(State.HALTING, (Action.RELEASE,)),
    },
    State.OVER: {},
}
"""What each event does in each state of a re-forming."""


class JobState(Enum):
    """Where a job stands. The value is what is written and shown."""

    CREATED = "created"  # not all nodes are here
    WARMING_UP = "warming up"  # workers have been started, not all have made a step
    RUNNING = "running"
    SUSPENDED = "suspended"  # by an operator: no workers; standbys and caches are kept
    CHECKING = "checking"  # workers are being ended, or it is not known yet with which nodes to go on
    RECOVERING = "recovering"  # the next incarnation has been placed, not all its ranks have made a step
    DONE = "done"  # all workers ended well, or an operator stopped the job
    FAILED = "failed"


_S = JobState
_ENDS = (_S.DONE, _S.FAILED)
FOLLOWING: Mapping[JobState, frozenset[JobState]] = {
    _S.CREATED: frozenset((_S.WARMING_UP, *_ENDS)),
    _S.WARMING_UP: frozenset((_S.RUNNING, _S.CHECKING, *_ENDS)),
    _S.RUNNING: frozenset((_S.CHECKING, *_ENDS)),
    _S.CHECKING: frozenset((_S.SUSPENDED, _S.RECOVERING, *_ENDS)),
    _S.SUSPENDED: frozenset((_S.CHECKING, _S.RECOVERING, *_ENDS)),
    _S.RECOVERING: frozenset((_S.RUNNING, _S.CHECKING, *_ENDS)),
    _S.DONE: frozenset(),
    _S.FAILED: frozenset(),
}
"""Which states of the job may follow each one."""
