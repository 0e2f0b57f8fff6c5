"""The tables of what may follow what are whole, and the drawings in the docs show them as they are."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.control import reforming_invariants
from tests.unit.control.membership.test_reforming import Job

from keepstep.control.membership import reforming
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.rendezvous import Launcher
from keepstep.control.membership.transitions import (
    CONCLUSIONS,
    FOLLOWING,
    TRANSITIONS,
    Action,
    Event,
    JobState,
    State,
    Transition,
)

PAGE = Path(__file__).parents[4] / "docs/design/reforming.md"
ENDS = (JobState.DONE, JobState.FAILED)


def test_every_state_has_a_row_and_is_reached() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {to.state for row in TRANSITIONS.values() for to in row.values()} == set(State)


def test_every_event_and_every_action_has_a_use() -> None:
    assert {event for row in TRANSITIONS.values() for event in row} == set(Event)
    used = {action for row in TRANSITIONS.values() for to in row.values() for action in to.actions}
    assert used == set(Action) == set(Reforming._ACTIONS)


def test_where_a_conclusion_is_possible_all_are() -> None:
    for state in (State.HALTING, State.WAITING):
        assert TRANSITIONS[state].keys() >= CONCLUSIONS
    assert TRANSITIONS[State.SUSPENDED].keys() & CONCLUSIONS == {Event.HELD}  # R10: nothing else is concluded
    assert not (TRANSITIONS[State.RUNNING].keys() | TRANSITIONS[State.OVER].keys()) & CONCLUSIONS


def test_every_beginning_calls_the_roll_and_halts_everyone() -> None:
    begun = [to for to in TRANSITIONS[State.RUNNING].values() if to.state is State.HALTING]
    assert begun
    for to in begun:
        assert to.actions[0] is Action.CALL_ROLL
        assert to.actions[-1] is Action.HALT_ALL


def mermaid(arrows: list[str]) -> str:
    return "\n".join(["```mermaid", "stateDiagram-v2", *(f"    {arrow}" for arrow in arrows), "```"])


def reforming_drawing() -> str:
    """One arrow for each event that a state does not ignore: what happens, and after the slash what is done."""

    def arrow(here: State, event: Event, to: Transition) -> str:
        done = ", ".join(action.value for action in to.actions)
        return f"{here.value} --> {to.state.value}: {event.value}{f' / {done}' if done else ''}"

    return mermaid([arrow(state, *item) for state, row in TRANSITIONS.items() for item in row.items()])


def job_drawing() -> str:
    """What may follow what, without the two ends, which may follow every other state."""
    ways = [(here, there) for here in JobState for there in JobState if there in FOLLOWING[here]]
    names = [(here.name.lower(), there.name.lower()) for here, there in ways if there not in ENDS]
    return mermaid([f"{here} --> {there}" for here, there in names])


@pytest.mark.parametrize(("name", "drawing"), [("re-forming", reforming_drawing), ("job", job_drawing)])
def test_the_page_shows_the_table(name: str, drawing: Callable[[], str]) -> None:
    """``KEEPSTEP_REWRITE=1`` draws it anew."""
    begin, end = f"<!-- drawn from the table: {name} -->\n", "\n<!-- end of the drawing -->"
    before, found, rest = PAGE.read_text().partition(begin)
    assert found, f"{PAGE.name} has no place for it"
    shown, _, after = rest.partition(end)
    if os.environ.get("KEEPSTEP_REWRITE"):
        PAGE.write_text(f"{before}{begin}{drawing()}{end}{after}")
    else:
        assert shown == drawing()
    assert max(map(len, drawing().splitlines())) <= 100


def running() -> Job:
    return Job(3)


def halting() -> Job:
    job = Job(3)
    job.fail(1)
    return job


NOBODY = Launcher("gpu-7", 107)
BROKEN: list[tuple[str, Callable[[], Job], Callable[[Reforming, Launcher], None]]] = [
    ("R1", running, lambda one, _: one._occasion.failed(1, "left over")),
    ("R2", halting, lambda one, member: one._roll.lost.add(member)),
    ("R2", halting, lambda one, member: one._roll.awaited.discard(member)),
    ("R3", halting, lambda one, _: one._roll.unfit.update({NOBODY: "disk full"})),
    ("R4", halting, lambda one, _: setattr(one._roll, "deadline_s", math.inf)),
    ("R5", running, lambda one, _: setattr(one, "_incarnations", SimpleNamespace(current=1, restarts=2))),
    ("R6", running, lambda one, _: one._absence.went(NOBODY, 1.0)),
    ("R7", running, lambda one, member: one._absence._unheard.add(member)),
    ("R8", halting, lambda one, member: one._absence.finished.add(member)),
    ("R9", halting, lambda one, member: setattr(one._occasion, "exchange", {member: member})),
    ("R10", halting, lambda one, _: setattr(one, "state", State.SUSPENDED)),
    ("R11", running, lambda one, _: setattr(one._trial, "newcomers", frozenset((NOBODY,)))),
    ("R12", halting, lambda one, _: setattr(one, "_waits_since_s", 5.0)),
]


@pytest.mark.parametrize(
    ("number", "begin", "break_it"), BROKEN, ids=lambda one: one if type(one) is str else ""
)
def test_an_invariant_that_is_broken_is_found(
    number: str, begin: Callable[[], Job], break_it: Callable[[Reforming, Launcher], None]
) -> None:
    job = begin()
    reforming_invariants.check(job.reforming)
    break_it(job.reforming, job.launcher(0))
    assert number in reforming_invariants.broken(job.reforming)


def test_an_invariant_that_the_source_states_is_checked_and_broken_here() -> None:
    source = "".join(path.read_text() for path in Path(reforming.__file__).parent.glob("*.py"))
    stated = set(re.findall(r"Invariant (R\d+):", source))
    assert stated == set(reforming_invariants.INVARIANTS) == {number for number, _, _ in BROKEN}
