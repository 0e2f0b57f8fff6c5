"""Ranks that turn slow while unequal shares hide it from the pace: who is named, and who is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.control.incidents.slow_evidence import Healthy
from keepstep.control.remedies.device_speeds import HealthyRanks, SlowRanks
from keepstep.control.remedies.moves import Look
from keepstep.core.microbatch_shares import Split

REPLICAS = 4  # of two stages each: ranks 0 to 3 are the first stage, 4 to 7 the second
SPLITS = {rank: Split(rank, 0, 32, rank % REPLICAS, REPLICAS) for rank in range(8)}
STAGES = {rank: rank // REPLICAS for rank in range(8)}
NODE_OF = {rank: f"gpu-{rank}" for rank in range(8)}


def look(**slow: float) -> Look:
    """A micro-batch takes 10 ms in the first stage, 20 in the second; ``r5=2.0``: rank 5 takes twice as long."""
    seconds = {rank: (0.01, 0.02)[STAGES[rank]] * slow.get(f"r{rank}", 1.0) for rank in range(8)}
    return Look((), (), None, 0.1, 0.2, SPLITS, seconds, STAGES)


def named(looks: list[Look], blamed: frozenset[str] = frozenset()) -> list[list[int | None]]:
    ranks = SlowRanks()
    found = [ranks.found(one, 10 * step, NODE_OF, blamed) for step, one in enumerate(looks)]
    return [[one.rank for one in culprits] for culprits in found]


def test_who_is_slow_in_two_looks_one_after_the_other_is_named() -> None:
    assert named([look(), look(r5=2.0), look(r5=2.0)]) == [[], [], [5]]
    assert named([look(r5=2.0), look(), look(r5=2.0)]) == [[], [], []]


def test_it_is_told_since_when_and_how_slow_compared_with_its_own_stage() -> None:
    ranks = SlowRanks()
    for step in (40, 50):
        culprits = ranks.found(look(r5=2.0), step, NODE_OF, ())
    (culprit,) = culprits
    assert (culprit.rank, culprit.node, culprit.slowdown, culprit.cause) == (5, "gpu-5", 2.0, "compute")
    assert ranks.since[5] == 40


def test_a_stage_that_has_more_to_do_is_not_slow() -> None:
    assert named([look(), look()]) == [[], []]


def test_who_does_not_hold_up_its_replica_is_not_named() -> None:
    assert named([look(r1=1.5, r5=2.0)] * 2)[1] == [5]  # rank 1 waits for rank 5 whatever it does


def test_little_is_nothing() -> None:
    assert named([look(r5=1.15)] * 2)[1] == []


def test_nobody_on_a_node_that_is_blamed_already() -> None:
    assert named([look(r5=2.0, r6=3.0)] * 2, frozenset({"gpu-6"}))[1] == [5]


def test_without_a_pipeline_all_ranks_are_one_stage() -> None:
    splits = {rank: Split(rank, 0, 32, rank, REPLICAS) for rank in range(REPLICAS)}
    seconds = dict.fromkeys(range(REPLICAS), 0.01) | {2: 0.03}
    one = Look((), (), None, 0.1, 0.2, splits, seconds, None)
    assert named([one, one])[1] == [2]


def test_what_ranks_took_before_grows_with_their_share() -> None:
    ranks = HealthyRanks()
    assert ranks.own_s(SPLITS) == {}
    ranks.learn(Healthy({0: 0.08, 9: 0.3}, STAGES), {0: replace(SPLITS[0], share=8)})
    assert ranks.stages == STAGES
    assert ranks.own_s({0: replace(SPLITS[0], share=12)}) == pytest.approx({0: 0.12, 9: 0.3})
