"""The job's states: no event leads anywhere that the table does not name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.membership.job_state import Facts, JobStates, state_of, way
from keepstep.control.membership.transitions import FOLLOWING, JobState

FACTS = st.builds(
    Facts,
    placed=st.booleans(),
    incarnation=st.integers(0, 2),
    trains=st.booleans(),
    ending=st.booleans(),
    suspended=st.booleans(),
    exit_code=st.sampled_from([None, None, None, 0, 1]),
)


@given(st.lists(FACTS, min_size=1, max_size=30))
def test_nothing_is_published_that_the_table_does_not_name(seen: list[Facts]) -> None:
    states, before = JobStates(), None
    for now_s, facts in enumerate(seen):
        for state in states.follow(facts, float(now_s)):
            assert before is None or state in FOLLOWING[before], (before, state)
            before = state
        assert states.state is before
        assert before is not None
        if before is not state_of(facts):
            assert way(before, state_of(facts)) == ()


def test_every_state_can_come_to_an_end_and_none_follows() -> None:
    for state in JobState:
        if FOLLOWING[state]:
            assert way(state, JobState.FAILED)
            assert way(state, JobState.DONE)
            assert state in {one for ones in FOLLOWING.values() for one in ones} or state is JobState.CREATED
    assert not FOLLOWING[JobState.DONE] | FOLLOWING[JobState.FAILED]


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (Facts(), "created"),
        (Facts(placed=True), "warming up"),
        (Facts(placed=True, trains=True), "running"),
        (Facts(placed=True, trains=True, ending=True), "checking"),
        (Facts(placed=True, ending=True, suspended=True), "suspended"),
        (Facts(placed=True, incarnation=1), "recovering"),
        (Facts(placed=True, incarnation=1, trains=True), "running"),
        (Facts(placed=True, exit_code=0), "done"),
        (Facts(placed=True, suspended=True, exit_code=79), "failed"),
    ],
)
def test_what_facts_amount_to(facts: Facts, state: str) -> None:
    assert state_of(facts).value == state


def test_what_happened_between_two_looks_is_made_up_for() -> None:
    states = JobStates()
    said = [
        [one.value for one in states.follow(facts, now_s)]
        for now_s, facts in enumerate(
            [
                Facts(),
                Facts(placed=True, trains=True),
                Facts(placed=True, incarnation=1),
                Facts(placed=True, incarnation=1, trains=True),
                Facts(placed=True, exit_code=0),
                Facts(placed=True),
            ]
        )
    ]
    assert said == [
        ["created"],
        ["warming up", "running"],
        ["checking", "recovering"],
        ["running"],
        ["done"],
        [],
    ]
