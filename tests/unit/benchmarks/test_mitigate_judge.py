"""What the mitigation bench compares with: its best possible against all allocations there are, and its judge."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from benchmarks.mitigate import trial
from benchmarks.mitigate.solver import is_optimal, slowest
from benchmarks.mitigate.trial import Case, Row, best_possible, iteration_s, judge, replica_s

CASE = Case(4, 1, 1, 2.0)
FIRST_SLOW, IN_FORCE = 70, 80
LOSSES = [1.0] * 200
UNIT = trial.MICROBATCH_S


def allocations(groups: int, total: int) -> Iterator[tuple[int, ...]]:
    for shares in itertools.product(range(1, total + 1), repeat=groups):
        if sum(shares) == total:
            yield shares


def test_an_optimum_is_told_from_all_other_allocations() -> None:
    rng = random.Random(1)
    for _ in range(60):
        groups = rng.randrange(1, 4)
        total = groups + rng.randrange(6)
        seconds = [rng.choice((1.0, 1.0, 1.3, 2.0, rng.uniform(0.5, 4))) for _ in range(groups)]
        least = min(slowest(seconds, shares) for shares in allocations(groups, total))
        for shares in allocations(groups, total):
            assert is_optimal(seconds, total, shares) == (slowest(seconds, shares) == least)
    assert not is_optimal([1.0, 1.0], 4, [1, 2])
    assert not is_optimal([1.0, 1.0], 4, [4, 0])


@pytest.mark.parametrize("stages", [1, 2])
def test_nothing_is_better_than_the_best_possible(stages: int) -> None:
    rng = random.Random(stages)
    for _ in range(40):
        replicas = [[rng.uniform(1, 3) for _ in range(stages)] for _ in range(rng.randrange(1, 4))]
        total = len(replicas) + rng.randrange(7)
        found_s, shares = best_possible(replicas, total)
        assert sum(shares) == total
        assert found_s == min(iteration_s(replicas, one) for one in allocations(len(replicas), total))


def test_a_pipeline_is_filled_and_emptied() -> None:
    assert replica_s(8, [0.02]) == pytest.approx(0.16)
    assert replica_s(8, [0.02, 0.02]) == pytest.approx(9 * 0.02)
    assert replica_s(8, [0.02, 0.08]) == pytest.approx(8 * 0.08 + 0.02)
    assert replica_s(8, [0.08, 0.02]) == pytest.approx(8 * 0.08)  # the other stage is done meanwhile
    assert replica_s(1, [0.02, 0.04]) == pytest.approx(0.06)


def rows(after_s: float, shares: list[int], end: int = IN_FORCE + 50) -> list[Row]:
    """A job of which replica 1 turns slow, and gets other shares or not."""
    made: list[Row] = []
    at_s = 0.0
    for step in range(end):
        slow, treated = step >= FIRST_SLOW, step >= IN_FORCE
        at_s += after_s if treated else 16.5 * UNIT if slow else 8.25 * UNIT
        factors = [1.0, 2.0 if slow else 1.0, 1.0, 1.0]
        made.append(Row(step, at_s, shares if treated else [8, 8, 8, 8], factors, 1.0))
    return made


def test_a_trial_is_compared_with_what_is_possible() -> None:
    found = judge(CASE, rows(10.5 * UNIT, [9, 5, 9, 9]), LOSSES)
    assert found["failed"] == ""
    assert (found["onset_step"], found["in_force_steps"]) == (FIRST_SLOW, IN_FORCE - FIRST_SLOW)
    assert found["before_s"] == pytest.approx(8.25 * UNIT)
    assert found["slowed_s"] == pytest.approx(16.5 * UNIT)
    assert found["bound_s"] == pytest.approx(10 * UNIT)
    assert found["ratio"] == pytest.approx(1.05)
    assert found["loss_error"] == 0
    assert found["shares"] == [(0, [8, 8, 8, 8]), (IN_FORCE, [9, 5, 9, 9])]


def test_what_is_late_in_the_mean_counts() -> None:
    worse = [
        row._replace(at_s=row.at_s + max(row.step - IN_FORCE - 30, 0))
        for row in rows(10.5 * UNIT, [9, 5, 9, 9])
    ]
    assert judge(CASE, worse, LOSSES)["ratio"] > 1.5


@pytest.mark.parametrize(
    ("made", "losses", "why"),
    [
        (rows(16.5 * UNIT, [8, 8, 8, 8]), LOSSES, "shares were equal"),
        (rows(10.5 * UNIT, [9, 5, 9, 9], IN_FORCE + 20), LOSSES, "only 19 iterations"),
        (rows(10.5 * UNIT, [9, 5, 9, 9])[:FIRST_SLOW], LOSSES, "no rank turned slow"),
        (rows(10.5 * UNIT, [9, 5, 9, 9]), LOSSES[:90], "the undisturbed run is shorter"),
        (
            [
                row._replace(shares=[7, 9, 8, 8]) if row.step == 20 else row
                for row in rows(10.5 * UNIT, [9, 5, 9, 9])
            ],
            LOSSES,
            "shares changed at step 20",
        ),
    ],
)
def test_what_did_not_work_is_a_failure(made: list[Row], losses: list[float], why: str) -> None:
    assert why in judge(CASE, made, losses)["failed"]


def test_other_losses_are_seen() -> None:
    assert judge(CASE, rows(10.5 * UNIT, [9, 5, 9, 9]), [*LOSSES[:100], 1.001, *LOSSES[101:]])[
        "loss_error"
    ] == pytest.approx(1e-3, rel=1e-2)


def test_a_case_without_better_shares_is_to_stay_equal() -> None:
    slow = [
        row._replace(factors=[2.0] * 4 if row.step >= FIRST_SLOW else [1.0] * 4)
        for row in rows(16.5 * UNIT, [8] * 4)
    ]
    found = judge(Case(4, 1, 4, 2.0), slow, LOSSES)
    assert not found["worth"]
    assert found["failed"] == ""
    assert found["in_force_steps"] is None
    assert found["ratio"] == pytest.approx(16.5 / 16)


def test_ranks_are_drawn_from_the_seed() -> None:
    case = Case(2, 2, 1, 4.0)
    assert case.slowed(3) == case.slowed(3)
    assert {rank for seed in range(20) for rank in case.slowed(seed)} == {0, 1, 2, 3}
    assert all(len({rank // 2 for rank in case.slowed(seed)}) == 1 for seed in range(20))
    assert trial.CASES.count(CASE) == 1
