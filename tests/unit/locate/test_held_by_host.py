"""Own times without waits that no compute stream shows, as hosts waited for their GPUs meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.summary import GroupInfo, IterationSummary, StreamSummary
from keepstep.locate import locate_slow, without_hidden_waits

PAIRS = {"nccl-a": (0, 1), "nccl-b": (2, 3)}
ALL = (0, 1, 2, 3)


def iteration(
    rank: int, own_s: float, blocked_s: float, streams: Sequence[tuple[str, float, int]], ahead_s: float = 0.1
) -> IterationSummary:
    """``streams``: by group, seconds in reduce-scatters and how many."""
    parts = tuple(
        StreamSummary(name, int(Op.REDUCE_SCATTER), -1, count, 1 << 20, 1, 0.0, busy, busy, busy, busy)
        for name, busy, count in streams
    )
    return IterationSummary(rank, 7, 0.0, own_s + blocked_s, own_s, blocked_s, ahead_s=ahead_s, streams=parts)


def own_times(
    rows: Sequence[IterationSummary],
    groups: dict[str, tuple[int, ...]] = PAIRS,
    stages: dict[int, int] | None = None,
    healthy: dict[int, float] | None = None,
) -> list[Any]:
    known = {name: GroupInfo(name, members, "nccl") for name, members in groups.items()}
    found = without_hidden_waits(Evidence(known, {}, after=rows), stages or {}, healthy)
    return [pytest.approx(one.self_s, abs=1e-6) for one in found]


def job(ahead_s: float = 0.1) -> list[IterationSummary]:
    """Rank 3 takes 0.9 s more than the others; 2 waits for it hidden, 0 and 1 are blocked by other waits."""
    return [
        iteration(0, 0.3, 0.9, [("nccl-a", 0.0, 1)], ahead_s),
        iteration(1, 0.3, 0.9, [("nccl-a", 0.0, 1)], ahead_s),
        iteration(2, 1.1, 0.1, [("nccl-b", 0.8, 1)], ahead_s),
        iteration(3, 1.2, 0.0, [("nccl-b", 0.0, 1)], ahead_s),
    ]


def test_what_a_rank_waited_hidden_is_not_its_own_time() -> None:
    assert own_times(job()) == [0.3, 0.3, 0.4, 1.2]


def test_no_own_time_becomes_shorter_than_it_was_before_or_than_that_of_the_fastest_peer() -> None:
    rows = [*job()[:2], iteration(2, 1.0, 0.0, [("nccl-b", 0.9, 1)]), job()[3]]
    assert own_times(rows) == [0.3, 0.3, 0.3, 1.2]
    stages = {0: 0, 1: 0, 2: 1, 3: 1}
    assert own_times(rows, stages=stages) == [0.3, 0.3, 1.0, 1.2]
    assert own_times(rows, stages=stages, healthy={2: 0.25, 3: 0.25}) == [0.3, 0.3, 0.25, 1.2]
    assert own_times(rows, stages=stages, healthy={2: 0.35}) == [0.3, 0.3, 0.35, 1.2]


def test_where_the_hosts_times_count_they_stay_as_they_are() -> None:
    assert own_times(job(ahead_s=-1.0)) == [0.3, 0.3, 1.1, 1.2]


def test_a_collective_that_not_all_members_tell_of_shows_nothing() -> None:
    assert own_times(job()[:3]) == [0.3, 0.3, 1.1]
    assert own_times(job(), groups={}) == [0.3, 0.3, 1.1, 1.2]


def test_lags_in_overlapped_buckets_are_made_good_by_one_wait_at_the_end() -> None:
    """Ranks come to ten buckets ever earlier than rank 3, compute meanwhile, and wait for the last one alone."""
    own_s = [1.0, 1.3, 1.3, 1.5]
    rows = [
        iteration(rank, own, 1.5 - own, [("nccl-all", sum((1.5 - own) * at / 10 for at in range(1, 11)), 10)])
        for rank, own in enumerate(own_s)
    ]
    assert own_times(rows, {"nccl-all": ALL}) == own_s


def test_ranks_of_which_no_collective_is_told_stay_as_they_are() -> None:
    assert own_times([iteration(rank, 0.3 + rank, 0.1, []) for rank in ALL]) == [0.3, 1.3, 2.3, 3.3]
    assert own_times([]) == []


def test_who_waits_longer_than_it_has_grown_is_not_named_beside_the_slowest() -> None:
    """Rank 1 takes 0.4 s more; 2 waits for messages and, in part hidden, in a reduce-scatter with 3."""
    then = [iteration(rank, 0.4, 0.1, [("nccl-a" if rank < 2 else "nccl-b", 0.05, 1)]) for rank in ALL] * 5
    now = [
        iteration(0, 0.4, 0.5, [("nccl-a", 0.45, 1)]),
        iteration(1, 0.8, 0.1, [("nccl-a", 0.05, 1)]),
        iteration(2, 0.48, 0.42, [("nccl-b", 0.15, 1)]),
        iteration(3, 0.4, 0.5, [("nccl-b", 0.05, 1)]),
    ]
    before = [replace(one, step=2 + at // len(ALL)) for at, one in enumerate(then)]
    after = [replace(one, step=7 + at) for at in range(4) for one in now]
    groups = {name: GroupInfo(name, members, "nccl") for name, members in PAIRS.items()}
    found = locate_slow(Evidence(groups, {}, before=before, after=after, onset_step=7))
    assert [one.rank for one in found.culprits] == [1]
