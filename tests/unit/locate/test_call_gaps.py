from __future__ import annotations

import pytest
from tests.unit.locate.synthetic_calls import call_logs

from keepstep.core.traced_operations import Call
from keepstep.locate import boundaries, locate_by_gaps, split

PERIOD = {rank: [Call(0.0, "AllReduce", 1), Call(1.0, "ReduceScatter", 100 + rank)] for rank in range(2)}


def located(rank_factors: dict[int, float]):
    slow = range(20, 30)
    logs = call_logs(40, slow, rank_factors)
    steps = {rank: split(calls, ("ReduceScatter", (1 << 24) + rank // 2)) for rank, calls in logs.items()}
    healthy = {rank: own[:18] + own[32:] for rank, own in steps.items()}
    return locate_by_gaps(healthy, {rank: own[21:28] for rank, own in steps.items()})


@pytest.mark.parametrize("rank", range(4))
def test_the_slow_one_of_a_tensor_parallel_pair_is_told(rank):
    found = located({rank: 2.0})
    assert [culprit.rank for culprit in found.culprits] == [rank]
    assert set(found.victims) == set(range(4)) - {rank}


def test_both_of_a_pair_are_named_together():
    assert {culprit.rank for culprit in located({2: 2.0, 3: 2.0}).culprits} == {2, 3}


def test_nobody_slower_names_nobody():
    assert located({}).culprits == ()


def test_without_healthy_steps_nobody_is_named():
    found = locate_by_gaps({0: []}, {0: []})
    assert found.culprits == ()
    assert "ranks 0" in found.missing[0]


def test_the_boundary_comes_once_everywhere():
    assert boundaries(PERIOD) == {0: ("ReduceScatter", 100), 1: ("ReduceScatter", 101)}
    assert boundaries(PERIOD | {2: [Call(0.0, "Send", 1)]}) is None
    assert boundaries({}) is None
