"""The job's states: no event leads anywhere that the table does not name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.membership.job_state import Facts, JobStates, leads, state_of
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
def test_nothing_is_published_to_which_the_table_does_not_lead(seen: list[Facts]) -> None:
    states, before = JobStates(), None
    for now_s, facts in enumerate(seen):
        state = states.follow(facts, float(now_s))
        if before is not None:
            assert leads(before, state)
            assert state is state_of(facts) or not leads(before, state_of(facts))
        before = state


def test_every_state_can_come_to_an_end_and_none_follows() -> None:
    for state in JobState:
        if FOLLOWING[state]:
            assert {JobState.FAILED, JobState.DONE} <= FOLLOWING[state]
            assert leads(JobState.CREATED, state)
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


def test_what_happens_between_two_looks_may_be_missed_and_what_has_ended_stays_ended() -> None:
    states = JobStates()
    seen = [
        Facts(),
        Facts(placed=True, trains=True),
        Facts(placed=True, incarnation=1),
        Facts(placed=True, incarnation=1, trains=True),
        Facts(placed=True, exit_code=0),
        Facts(placed=True),
    ]
    said = [states.follow(facts, now_s).value for now_s, facts in enumerate(seen)]
    assert said == ["created", "running", "recovering", "running", "done", "done"]
    assert states.since_s == 4
