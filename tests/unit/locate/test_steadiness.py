"""Whoever is the slow one by chance is not named, whoever is it in each iteration is."""

from __future__ import annotations

import pytest
from tests.unit.locate.uneven_jobs import (
    ONSET,
    Work,
    few_long_ones,
    lengths,
    one_is_slow,
    pauses,
    surely_named,
    turns,
    uneven_job,
    verdict,
)

from keepstep.core.slow_steps import UNSTEADY
from keepstep.locate import slow_steps

SEEDS = range(30)


@pytest.mark.parametrize("world", [2, 3, 4, 8, 32])
@pytest.mark.parametrize("work", [lengths, few_long_ones, pauses])
def test_uneven_work_makes_nobody_a_culprit(work: Work, world: int) -> None:
    """By chance one rank in two or three may be the slow one in each of the first four slow iterations."""
    few = later = 0
    for seed in SEEDS:
        rows = uneven_job(world, work, seed, ONSET + 12)
        few += bool(surely_named(verdict(world, rows, ONSET + 4)))
        found = verdict(world, rows, ONSET + 12)
        later += bool(surely_named(found))
        assert all(one.link is None for one in found.culprits)
    assert few <= len(SEEDS) // 10
    assert later <= 1


@pytest.mark.parametrize("slow_iterations", [3, 4, 5, 7, 12])
@pytest.mark.parametrize("world", [2, 3, 4, 8, 32])
def test_ranks_that_take_turns_are_not_named(world: int, slow_iterations: int) -> None:
    found = verdict(world, uneven_job(world, turns(world), 1, 40), ONSET + slow_iterations)
    assert (found.culprits, found.summary) == ((), UNSTEADY)


def test_it_is_said_why_nobody_is_named() -> None:
    found = verdict(3, uneven_job(3, turns(3), 1, 40), ONSET + 4)
    assert (found.culprits, found.summary) == ((), UNSTEADY)
    assert found.evidence == (UNSTEADY, "rank 1 is the slow one in 2 of 4 slow iterations")


@pytest.mark.parametrize("noise", [0.01, 0.03])
@pytest.mark.parametrize("world", [2, 3, 4, 8, 32])
@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
def test_a_rank_that_is_slow_in_each_iteration_is_named_after_three(
    factor: float, world: int, noise: float
) -> None:
    for seed in range(10):
        rows = uneven_job(world, one_is_slow(factor), seed, ONSET + 12, noise=noise)
        for slow_iterations in (3, 7, 12):
            (culprit,) = verdict(world, rows, ONSET + slow_iterations).culprits
            assert (culprit.rank, culprit.confidence) == (1, "high")


def test_a_rank_that_is_fast_again_stays_named() -> None:
    rows = uneven_job(3, lambda draw, rank, step: 3.0 if rank == 1 and step < ONSET + 7 else 1.0, 1, 40)
    assert surely_named(verdict(3, rows, ONSET + 11)) == [1]


def test_without_ranks_that_can_be_compared_nothing_is_said() -> None:
    rows = uneven_job(2, lengths, 1, ONSET + 4)
    assert slow_steps(rows, {}, {1}) == slow_steps(rows, {0: 0.1, 1: 0.1}, ()) == {}
    assert slow_steps((), {0: 0.1, 1: 0.1}, {1}) == slow_steps(rows, {1: 0.1}, {1}) == {}
