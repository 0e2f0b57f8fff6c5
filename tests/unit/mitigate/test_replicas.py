"""What iterations tell of the speed of replicas, and the shares that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from keepstep.core.iteration_table import table_of
from keepstep.core.microbatch_shares import Split
from keepstep.core.summary import GroupInfo, IterationSummary, StreamSummary
from keepstep.mitigate import measure

OPTIMIZER_S, REDUCTION_S = 0.01, 0.03


def waited(group: str, blocked_s: float) -> StreamSummary:
    return StreamSummary(group, 1, -1, 1, 8, 0, 0.0, blocked_s, blocked_s, blocked_s, 0.0)


def pipelines(
    stage_s: Sequence[Sequence[float]], shares: Sequence[int]
) -> tuple[list[IterationSummary], dict[int, Split], dict[str, GroupInfo]]:
    """Replicas of two stages. ``stage_s``: seconds of a micro-batch, by replica and stage; ranks count stages first."""
    groups = {
        "dp0": GroupInfo("dp0", (0, 2)),
        "dp1": GroupInfo("dp1", (1, 3)),
        "pp0": GroupInfo("pp0", (0, 1)),
        "pp1": GroupInfo("pp1", (2, 3)),
    }
    busy = [(share + 1) * max(times) + OPTIMIZER_S for share, times in zip(shares, stage_s, strict=True)]
    duration_s = max(busy) + REDUCTION_S
    rows: list[IterationSummary] = []
    splits: dict[int, Split] = {}
    for replica, (share, times) in enumerate(zip(shares, stage_s, strict=True)):
        for stage, each in enumerate(times):
            rank = 2 * replica + stage
            own_s = share * each + OPTIMIZER_S
            inside_s, outside_s = busy[replica] - own_s, duration_s - busy[replica]
            for step in range(5):
                streams = (waited(f"pp{replica}", inside_s), waited(f"dp{stage}", outside_s))
                rows.append(
                    IterationSummary(
                        *(rank, step, 0.0, duration_s, own_s, inside_s + outside_s),
                        optimizer_s=OPTIMIZER_S,
                        streams=streams,
                    )
                )
            splits[rank] = Split(rank, 0, sum(shares), replica, len(shares), share=share)
    return rows, splits, groups


@pytest.mark.parametrize("shares", [(8, 8), (10, 6), (11, 5)])
@pytest.mark.parametrize("packed", [False, True])
def test_a_pipeline_is_as_fast_as_its_slowest_stage(shares: Sequence[int], packed: bool) -> None:
    rows, splits, groups = pipelines([[0.02, 0.02], [0.02, 0.04]], shares)
    replicas = measure(table_of(rows) if packed else rows, splits, groups)
    assert replicas is not None
    assert replicas.shares == tuple(shares)
    assert replicas.seconds == pytest.approx((0.02, 0.04), rel=1e-5)
    assert replicas.fixed_s == pytest.approx((0.02 + OPTIMIZER_S, 0.04 + OPTIMIZER_S), rel=1e-5)
    assert replicas.shared_s == pytest.approx(REDUCTION_S, rel=1e-5)
    assert replicas.iteration_s(shares) == pytest.approx(rows[0].duration_s, rel=1e-5)
    assert replicas.best() == [11, 5]
    assert replicas.best(multiple_of=2) == [12, 4]
    assert replicas.best(at_most=9) == [9, 7]


def without(splits: Mapping[int, Split], rank: int) -> dict[int, Split]:
    return {other: split for other, split in splits.items() if other != rank}


def test_replicas_are_measured_wholly_or_not_at_all() -> None:
    rows, splits, groups = pipelines([[0.02, 0.02], [0.02, 0.04]], (8, 8))
    assert measure([], splits, groups) is None
    assert measure([row for row in rows if row.rank != 3], splits, groups) is None
    assert measure(rows, without(without(splits, 0), 1), groups) is None


def test_without_its_groups_a_rank_waits_for_nobody_else() -> None:
    rows, splits, _ = pipelines([[0.02, 0.02], [0.02, 0.04]], (8, 8))
    replicas = measure(rows, splits, {})
    assert replicas is not None
    assert replicas.seconds == pytest.approx((0.02, 0.04), rel=1e-5)


def on_device(rows: list[IterationSummary], *, told: bool) -> list[IterationSummary]:
    """The same on a GPU: transfers overlap with computing, the optimizer's time is the host's."""
    return [
        replace(
            row,
            ahead_s=0.1,
            optimizer_s=10 * OPTIMIZER_S,
            streams=tuple(replace(one, blocked_s=one.blocked_s + 0.004) for one in row.streams)
            if told and row.step % 2
            else (),
        )
        for row in rows
    ]


def test_on_a_gpu_transfers_that_overlap_count_as_what_was_waited_at_most() -> None:
    rows, splits, groups = pipelines([[0.02, 0.02], [0.02, 0.04]], (8, 8))
    replicas = measure(on_device(rows, told=True), splits, groups)
    assert replicas is not None
    more_s = OPTIMIZER_S / 8
    assert replicas.seconds == pytest.approx((0.02 + more_s, 0.04 + more_s), rel=1e-5)
    assert replicas.fixed_s[1] == pytest.approx(0.04 - 0.004, rel=1e-4)
    assert replicas.best() == [11, 5]


def test_on_a_gpu_that_told_no_transfers_a_rank_does_what_it_was_seen_to_do() -> None:
    rows, splits, groups = pipelines([[0.02, 0.02], [0.02, 0.04]], (8, 8))
    replicas = measure(on_device(rows, told=False), splits, groups)
    assert replicas is not None
    assert replicas.fixed_s == pytest.approx((0.0, 0.0), abs=1e-6)
    assert replicas.best() == [11, 5]
