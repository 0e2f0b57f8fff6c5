"""No node is moved for uneven work; the node of a rank that stays the slow one is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.locate.uneven_jobs import (
    ONSET,
    OWN_S,
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

from keepstep.control.incidents.locators import Locators
from keepstep.control.incidents.slow_evidence import Healthy
from keepstep.control.remedies.device_speeds import HealthyRanks, Look
from keepstep.control.remedies.steadiness import Steadiness
from keepstep.core.incident import Culprit
from keepstep.core.slow_steps import UNSTEADY

NAMED, LOOKED_AGAIN, END = ONSET + 4, ONSET + 7, 120


def case(ranks: list[int]) -> Any:
    culprits = tuple(Culprit(rank, None, f"node-{rank}", "", 4.0, "high", "compute") for rank in ranks)
    incident = SimpleNamespace(
        culprits=culprits, iteration_before_s=OWN_S, detected_step=NAMED - 1, number=1, onset_step=ONSET
    )
    return SimpleNamespace(incident=incident)


def moved_at(world: int, work: Work, seed: int, *, healthy: bool = True, named: list[int]) -> int | None:
    """The step at which the node of a rank that was named would be replaced or exchanged; None: never."""
    rows = uneven_job(world, work, seed, END)
    known = HealthyRanks()
    if healthy:
        known.learn(Healthy(dict.fromkeys(range(world), OWN_S), {}), {})
    looks = Steadiness(SimpleNamespace(locators=Locators()))  # type: ignore[arg-type]
    blamed = case(named)
    for step in range(NAMED, END, 4):
        newest = [row for row in rows if step - 8 <= row.step < step]
        iteration_s = sorted(row.duration_s for row in newest)[len(newest) // 2]
        look = Look([blamed], (), None, OWN_S, iteration_s)
        seen = looks.look(newest, look, known)
        if any(one.may_be_moved for one in seen.values()):
            return step
    return None


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("work", [lengths, few_long_ones, pauses])
def test_no_node_is_moved_for_uneven_work(work: Work, world: int) -> None:
    for seed in range(40):
        rows = uneven_job(world, work, seed, LOOKED_AGAIN)
        named = surely_named(verdict(world, rows, NAMED))
        again = verdict(world, rows, LOOKED_AGAIN)
        named = [] if again.summary == UNSTEADY else named or surely_named(again)
        if named:
            assert moved_at(world, work, seed, named=named) is None


@pytest.mark.parametrize("healthy", [True, False])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_whoever_is_named_by_mistake_keeps_its_node(world: int, healthy: bool) -> None:
    for rank in range(world):
        assert moved_at(world, turns(world), rank, healthy=healthy, named=[rank]) is None


@pytest.mark.parametrize("healthy", [True, False])
@pytest.mark.parametrize("factor", [1.5, 4.0])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_node_of_a_rank_that_stays_slow_is_moved(world: int, factor: float, healthy: bool) -> None:
    for seed in range(10):
        step = moved_at(world, one_is_slow(factor), seed, healthy=healthy, named=[1])
        assert step is not None
        assert step <= NAMED + 12
