"""Slow ranks whose iterations were measured on their GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Diagnosis
from keepstep.core.summary import GroupInfo, HostCause, IterationSummary, StreamSummary
from keepstep.locate import locate_slow, waits_recorded
from keepstep.locate._growth import peer_base
from keepstep.locate._profile import profile
from keepstep.locate.infer import InferredLayout

RANKS = 4
GROUPS = {
    "0": GroupInfo("0", tuple(range(RANKS)), "cuda:nccl"),
    "nccl-1": GroupInfo("nccl-1", tuple(range(RANKS)), "nccl"),
}
NODES = {rank: f"node-{rank // 2}" for rank in range(RANKS)}
OWN_S, TRANSFER_S = 0.1, 0.01


def job(
    slow: Mapping[int, float] = {},
    *,
    ahead_s: float = 0.5,
    ahead_later_s: float | None = None,
    data: bool = False,
    transfer: float = 1.0,
    witness: bool = True,
    steps: range = range(20),
    onset: int = 10,
) -> list[IterationSummary]:
    """Ranks compute and all-reduce; from ``onset`` on some are slower by a factor, and so are transfers."""
    rows: list[IterationSummary] = []
    for step in steps:
        late = step >= onset
        own = [OWN_S * (slow.get(rank, 1.0) if late else 1.0) for rank in range(RANKS)]
        shortest = TRANSFER_S * (transfer if late else 1.0)
        duration = max(own) + shortest
        for rank in range(RANKS):
            busy = duration - own[rank]
            stream = StreamSummary(
                "nccl-1", int(Op.ALLREDUCE), -1, 1, 1 << 20, step + 1, own[rank], duration, busy, busy, busy
            )
            rows.append(
                IterationSummary(
                    rank,
                    step,
                    float(step),
                    duration,
                    own[rank],
                    busy,
                    data_s=own[rank] - OWN_S if data else 0.0,
                    ahead_s=ahead_s
                    if ahead_later_s is None or not late or rank not in slow
                    else ahead_later_s,
                    streams=(stream,) if witness else (),
                )
            )
    return rows


def diagnose(rows: list[IterationSummary], *causes: HostCause, onset: int = 10) -> Diagnosis:
    before = [row for row in rows if row.step < onset]
    after = [row for row in rows if row.step >= onset]
    evidence = Evidence(GROUPS, NODES, None, causes=causes, before=before, after=after, onset_step=onset)
    assert waits_recorded(evidence)
    return locate_slow(evidence)


@pytest.mark.parametrize("factor", [1.3, 2.0, 4.0])
def test_a_slow_gpu(factor: float) -> None:
    (culprit,) = diagnose(job({2: factor})).culprits
    assert (culprit.rank, culprit.stage, culprit.cause) == (2, "", "compute on the GPU")
    assert (culprit.slowdown, culprit.confidence) == (factor, "high")


def test_two_slow_gpus() -> None:
    named = diagnose(job({1: 1.5, 2: 1.6})).culprits
    assert {one.rank for one in named} == {1, 2}


def test_whose_host_waited_for_its_gpu_while_a_collective_went_on_has_not_computed() -> None:
    """The stream of rank 1 was empty, not blocked, while rank 2 was awaited: its own time grew, but so did its wait."""
    rows = [
        replace(row, self_s=row.duration_s - TRANSFER_S, blocked_s=TRANSFER_S) if row.rank == 1 else row
        for row in job({2: 2.0})
    ]
    (culprit,) = diagnose(rows).culprits
    assert (culprit.rank, culprit.confidence) == (2, "high")


def test_without_the_second_witness_nobody_is_blamed_for_sure() -> None:
    (culprit,) = diagnose(job({2: 2.0}, witness=False)).culprits
    assert (culprit.rank, culprit.confidence) == (2, "medium")


def test_a_gpu_that_waits_for_its_host_is_slow_for_what_the_host_does() -> None:
    (culprit,) = diagnose(job({2: 2.0}, ahead_later_s=0.09, data=True)).culprits
    assert (culprit.rank, culprit.stage, culprit.cause) == (2, "data", "data loading")
    assert "its GPU waits for the host" in culprit.detail


def test_a_host_that_waits_for_its_gpu_in_each_step_is_not_slow() -> None:
    """As with `.item()`: the host is ahead by nearly all that the GPU does."""
    (culprit,) = diagnose(job({2: 2.0}, ahead_s=0.09, ahead_later_s=0.19)).culprits
    assert (culprit.rank, culprit.cause) == (2, "compute on the GPU")
    (culprit,) = diagnose(job({2: 2.0}, ahead_s=0.09, ahead_later_s=0.09)).culprits
    assert (culprit.rank, culprit.cause) == (2, "work on the host")


def test_a_slow_gpu_is_told_beside_a_host_that_is_ahead_by_less_at_times() -> None:
    """Seen with two CPUs for eight ranks: the host was ahead by 0.16 to 0.54 s, then by 0.32 to 0.87 s."""

    def named(*later_s: float) -> tuple[int | None, str]:
        ahead_s = (0.02, 0.04, 0.09, 0.04, 0.03, 0.09, 0.04, 0.02, 0.04, 0.03, *later_s)
        rows = [replace(row, ahead_s=ahead_s[row.step]) for row in job({2: 2.0}, steps=range(13))]
        (culprit,) = diagnose(rows).culprits
        return culprit.rank, culprit.cause

    assert named(0.04, 0.17, 0.03) == (2, "compute on the GPU")
    assert named(0.04, 0.09, 0.03) == (2, "work on the host")


def test_a_busy_host_that_is_ahead_is_no_cause() -> None:
    starved = HostCause(2, "run queue", 0.9)
    (culprit,) = diagnose(job({2: 2.0}), starved).culprits
    assert (culprit.cause, culprit.detail) == ("compute on the GPU", "")
    (culprit,) = diagnose(job({2: 2.0}, ahead_later_s=0.09), starved).culprits
    assert (culprit.cause, culprit.confidence) == ("run queue", "medium")
    (culprit,) = diagnose(job({2: 2.0}), HostCause(2, "GPU clock", 0.5)).culprits
    assert culprit.cause == "GPU clock"


def test_the_network_is_told_by_the_shortest_kernels() -> None:
    found = diagnose(job(transfer=6.0))
    (culprit,) = found.culprits
    assert (culprit.rank, culprit.cause) == (None, "network")
    assert "transfers on nccl-1" in found.summary


def test_a_communicator_is_shown_as_the_group_that_it_serves() -> None:
    before, after = ([row for row in job(transfer=6.0) if (row.step >= 10) == late] for late in (False, True))
    groups = {name: replace(group, serves="7") for name, group in GROUPS.items()}
    found = locate_slow(Evidence(groups, NODES, None, before=before, after=after, onset_step=10))
    assert found.summary == "transfers on 7 ALLREDUCE are slow"


def test_the_network_is_named_where_it_is_not_known_which_path() -> None:
    rows, nodes = job(transfer=6.0), {rank: f"node-{rank}" for rank in NODES}
    before, after = [row for row in rows if row.step < 10], [row for row in rows if row.step >= 10]
    found = locate_slow(Evidence(GROUPS, nodes, None, before=before, after=after, onset_step=10))
    (culprit,) = found.culprits
    assert (culprit.rank, culprit.link, culprit.cause, culprit.confidence) == (
        None,
        None,
        "network",
        "medium",
    )
    assert "which pair of" in found.missing[0]


def test_nobody_is_named_among_healthy_ranks() -> None:
    assert not diagnose(job()).culprits


def test_a_gpu_that_is_slow_from_the_start() -> None:
    rows = job({2: 2.0}, onset=0)
    evidence = Evidence(GROUPS, NODES, None, before=[], after=rows, onset_step=0)
    (culprit,) = locate_slow(evidence).culprits
    assert (culprit.rank, culprit.cause, culprit.confidence) == (2, "compute on the GPU", "medium")


def test_a_gpu_for_which_nobody_waits_longer_slows_nobody_down() -> None:
    """Rank 0 is by far the slowest and becomes slower; so does rank 1, which has waited for it all the same."""
    rows: list[IterationSummary] = []
    for step in range(20):
        own = (0.144, 0.037) if step < 10 else (0.158, 0.051)
        rows += [
            IterationSummary(rank, step, float(step), own[0], own[rank], own[0] - own[rank], ahead_s=0.5)
            for rank in (0, 1)
        ]
    nodes = {0: "node-0", 1: "node-0"}
    before, after = [row for row in rows if row.step < 10], [row for row in rows if row.step >= 10]
    groups = {"0": GroupInfo("0", (0, 1), "cuda:nccl")}
    found = locate_slow(Evidence(groups, nodes, None, before=before, after=after, onset_step=10))
    assert not found.culprits


def test_a_rank_whose_pipeline_stage_is_not_known_is_not_compared() -> None:
    """Messages between ranks 0 and 3 are not told, so that only 1 and 2 have known stages."""
    ranks, own_s = (0, 1, 2, 3), {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.2}
    layout = InferredLayout({}, {1: 0, 2: 1}, 2)
    now = profile([IterationSummary(rank, 5, 0.0, 0.3, own_s[rank], 0.1, ahead_s=0.1) for rank in ranks])
    assert peer_base(now, layout).tolist() == pytest.approx([0.1, 0.1, 0.1, 0.2])
