"""Ranks that are slow from the first steps on: compared with their peers, from the sixth step to the thirtieth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from keepstep.control.cluster import Cluster
from keepstep.control.incidents.early_slowness import (
    EarlySlowness,
    known_stages,
    only_sure,
    slow_since,
)
from keepstep.control.incidents.locators import Locators
from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Culprit, Diagnosis, Link
from keepstep.core.summary import GroupInfo, IterationSummary, StreamSummary
from keepstep.wire.messages import Heartbeat, RankBeat

Own = Callable[[int, int], float]  # the own time of a rank in a step


def heartbeat(node: int, ranks: range, step: int, own: Own) -> Heartbeat:
    beats = tuple(RankBeat(rank, step, 0, 1, 1.0, own(rank, step)) for rank in ranks)
    return Heartbeat(node, step, float(step), beats)


def play(own: Own, steps: int = 60) -> list[tuple[int, int]]:
    """The steps of two nodes with two ranks each: when which rank was looked at."""
    cluster = Cluster()
    cluster.resize(4)
    early = EarlySlowness(cluster)
    looked: list[tuple[int, int]] = []
    for step in range(-1, steps):
        for number in (0, 1):
            node = cluster.node(number, f"node-{number}")
            cluster.heard(node, heartbeat(number, range(2 * number, 2 * number + 2), step, own), float(step))
            if (found := early.look(float(step))) is not None:
                looked.append((found.step, found.rank))
    return looked


def test_a_rank_that_stands_out_is_looked_at_from_the_sixth_step_on_and_no_more_later() -> None:
    looked = play(lambda rank, step: 0.8 if rank == 3 else 0.4)
    assert looked[0] == (4, 3)  # node 0 has told step 5, node 1 is yet to
    assert all(rank == 3 for _, rank in looked)
    assert len(looked) <= 8
    assert looked[-1][0] <= 30


def test_a_rank_that_turns_slow_before_its_pace_is_known_is_looked_at() -> None:
    first, _ = play(lambda rank, step: 0.8 if rank == 1 and step >= 12 else 0.4)[0]
    assert 12 <= first <= 14


@pytest.mark.parametrize(
    "own",
    [
        lambda rank, step: 0.4,
        lambda rank, step: 0.4 + 0.03 * rank,
        lambda rank, step: 0.9 if rank == 0 and step < 4 else 0.4,
        lambda rank, step: 0.02 if rank else 0.1,
        lambda rank, step: 0.9 if rank == 2 and step > 40 else 0.4,
    ],
    ids=["alike", "nearly alike", "a long start", "hardly any", "later"],
)
def test_nobody_else_is_looked_at(own: Own) -> None:
    assert play(own) == []


def test_a_rank_that_is_slower_by_less_is_looked_at_a_few_times() -> None:
    assert [rank for _, rank in play(lambda rank, step: 0.52 if rank == 3 else 0.4)] == []
    assert [rank for _, rank in play(lambda rank, step: 1.3 if rank == 3 else 1.0)] == [3, 3, 3]


def test_a_rank_that_stands_out_in_its_group_is_looked_at() -> None:
    cluster = Cluster()
    cluster.resize(8)
    cluster.learn_groups(
        [GroupInfo(f"dp-{stage}", tuple(range(4 * stage, 4 * stage + 4))) for stage in (0, 1)]
    )
    early, looked = EarlySlowness(cluster), list[int]()
    for step in range(12):
        node = cluster.node(0, "node-0")
        own: Own = lambda rank, step: 0.9 if rank == 0 or rank >= 4 else 0.6  # noqa: E731
        cluster.heard(node, heartbeat(0, range(8), step, own), float(step))
        found = early.look(float(step))
        looked += [found.rank] if found is not None else []
    assert looked
    assert set(looked) == {0}


def test_stages_that_a_look_has_shown_are_what_is_compared_next() -> None:
    """Two replicas of two stages: no process group but the whole job has three ranks or more."""
    cluster = Cluster()
    cluster.resize(4)
    early, looked = EarlySlowness(cluster), list[int]()
    for step in range(20):
        node = cluster.node(0, "node-0")
        own: Own = lambda rank, step: {0: 0.6 if step < 12 else 0.8}.get(rank, 0.8 if rank % 2 else 0.6)  # noqa: E731
        cluster.heard(node, heartbeat(0, range(4), step, own), float(step))
        if (found := early.look(float(step))) is not None:
            looked.append(found.rank)
            early.learn_stages({rank: rank % 2 for rank in range(4)})
    assert looked[:2] == [1, 0]


def rows(own: Own, steps: int = 12, ranks: int = 4, *, ahead_s: float = -1.0) -> list[IterationSummary]:
    return [
        IterationSummary(rank, step, float(step), 1.0, own(rank, step), 0.1, ahead_s=ahead_s)
        for step in range(steps)
        for rank in range(ranks)
    ]


def test_the_onset_is_the_first_of_the_slow_steps() -> None:
    assert slow_since(rows(lambda rank, step: 0.8 if rank == 2 else 0.4), 2, {}) == 0
    assert slow_since(rows(lambda rank, step: 0.8 if rank == 2 and step >= 7 else 0.4), 2, {}) == 7
    assert slow_since(rows(lambda rank, step: 0.8 if rank == 2 and step >= 10 else 0.4), 2, {}) is None
    assert slow_since(rows(lambda rank, step: 0.8 if rank == 2 and step != 8 else 0.4), 2, {}) == 9
    assert slow_since(rows(lambda rank, step: 0.4), 2, {}) is None
    assert slow_since([], 2, {}) is None


def test_steps_that_not_all_ranks_have_told_do_not_count() -> None:
    told = rows(lambda rank, step: 0.8 if rank == 2 else 0.4)
    alone = [IterationSummary(2, step, float(step), 1.0, 0.1, 0.1) for step in (12, 13)]
    assert slow_since([*told, *alone], 2, {}) == 0


def test_only_ranks_of_the_same_pipeline_stage_are_peers() -> None:
    """The second stage has more to do than the first: rank 0, slow in the first, takes as long as the second."""
    own: Own = lambda rank, step: 1.5 if rank == 0 or rank >= 4 else 1.0  # noqa: E731
    told = rows(own, ranks=8)
    assert slow_since(told, 0, {}) is None
    assert slow_since(told, 0, {rank: rank // 4 for rank in range(8)}) == 0


def test_only_ranks_that_were_slow_for_long_enough_stay_named() -> None:
    told = rows(lambda rank, step: {2: 0.8, 1: 0.5}.get(rank, 0.4))
    culprits = (
        Culprit(rank=2, slowdown=2.0),
        Culprit(rank=1, slowdown=1.25),
        Culprit(link=Link((0, 1), ("a", "b"))),
    )
    sure = only_sure(Diagnosis("slow", culprits), told, {})
    assert [one.rank for one in sure.culprits] == [2]


def test_where_nothing_is_told_of_messages_ranks_may_have_unlike_work() -> None:
    alike = rows(lambda rank, step: 0.4)
    assert known_stages(Locators(), Evidence({}, {}, after=alike)) is None
    streams = (StreamSummary("0", int(Op.ALLREDUCE), -1, 1, 8, 1, 0.0, 0.1, 0.1, 0.1, 0.1),)
    told = [replace(row, streams=streams) for row in alike]
    assert known_stages(Locators(), Evidence({}, {}, after=told)) == {}


def test_the_times_of_a_gpu_name_a_rank_that_is_less_slow() -> None:
    mild: Own = lambda rank, step: 1.3 if rank == 2 else 1.0  # noqa: E731
    well_ahead = rows(mild, ahead_s=0.9)
    assert slow_since(well_ahead, 2, {}) == 0


def test_a_gpu_that_waits_for_its_host_is_measured_as_hosts_are() -> None:
    mild: Own = lambda rank, step: 1.3 if rank == 2 else 1.0  # noqa: E731
    assert slow_since(rows(mild), 2, {}) is None
    assert slow_since(rows(mild, ahead_s=0.1), 2, {}) is None
    assert slow_since([*rows(mild, ahead_s=0.9), *rows(mild, steps=4)], 2, {}) is None
    assert slow_since(rows(lambda rank, step: 1.5 if rank == 2 else 1.0, ahead_s=0.1), 2, {}) == 0


def test_a_rank_that_is_less_slow_has_to_be_so_for_longer_and_at_a_cost() -> None:
    for since, onset in ((8, 8), (9, None)):
        own: Own = lambda rank, step, since=since: 1.3 if rank == 2 and step >= since else 1.0  # noqa: E731
        assert slow_since(rows(own, ahead_s=0.9), 2, {}) == onset
    hardly: Own = lambda rank, step: 0.52 if rank == 2 else 0.4  # noqa: E731
    assert slow_since(rows(hardly, ahead_s=0.9), 2, {}) is None
