"""Which steps are due on storage."""

from __future__ import annotations

import pytest

from keepstep.checkpoint.storage.cadence import Cadence, Storing
from keepstep.checkpoint.storage.cost import Costs, best_interval


def test_every_so_many_steps_also_when_saves_leave_some_out() -> None:
    one = Cadence(Storing("/ckpt", every=10))
    one.begin(0)
    due = []
    for step in (1, 9, 10, 11, 19, 25, 26, 29, 47, 50):
        if one.due(step):
            due.append(step)
            one.accepted(step, 0.0)
    assert due == [10, 25, 47, 50]


def test_a_step_that_was_not_taken_stays_due() -> None:
    one = Cadence(Storing("/ckpt", every=10))
    one.begin(20)
    assert [step for step in range(21, 33) if one.due(step)] == [30, 31, 32]


def test_none_is_due_when_only_asked_for_ones_go() -> None:
    one = Cadence(Storing("/ckpt", every=0))
    one.begin(0)
    assert not any(one.due(step) for step in range(1000))
    one.agree([0, 0])
    assert not any(one.due(step) for step in range(1000))


def test_by_the_cost_model_from_what_saves_and_steps_took() -> None:
    one = Cadence(Storing("/ckpt", every=None, failures_per_day=4.0))
    one.begin(0)
    step = 0
    while not one.due(step):
        step += 1
        one.note(step, step * 2.0, 0.5, pending=False)
        assert step < 20
    costs = Costs(period_s=86400, failures=4.0, recovery_s=0, checkpoint_s=0.5, step_s=1.5)
    assert one.proposal() == best_interval(costs).steps
    one.agree([one.proposal(), one.proposal() + 7])
    assert one.steps == one.proposal() + 7
    one.accepted(step, step * 2.0)
    assert not one.due(step + 1)


def test_the_interval_is_not_shorter_than_the_way_to_storage() -> None:
    one = Cadence(Storing("/ckpt", every=None, failures_per_day=1000.0))
    one.begin(0)
    for step in range(1, 5):
        one.note(step, step * 1.0, 1e-6, pending=False)
    one.accepted(4, 4.0)
    one.note(5, 5.0, 1e-6, pending=True)
    before = one.proposal()
    one.note(600, 600.0, 1e-6, pending=False)
    assert before < 596 <= one.proposal()


@pytest.mark.parametrize("every", [None, 3])
def test_before_a_second_save_nothing_is_known(every: int | None) -> None:
    one = Cadence(Storing("/ckpt", every=every))
    one.begin(0)
    one.note(1, 1.0, 0.1, pending=False)
    assert one.proposal() == 0
