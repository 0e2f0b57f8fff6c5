"""The campaign on the stand-in GPU: what its seeds draw, and its judge, given outcomes made by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from benchmarks.campaign.__main__ import parse_arguments
from benchmarks.campaign.stand_in import CASE
from benchmarks.campaign.stand_in_draw import HANGS, HEALTHY, KINDS, PAIR, draw
from benchmarks.campaign.trial import Outcome, Plan

SEEDS = range(200)


def seed_of(kind: str) -> int:
    return next(seed for seed in SEEDS if draw(seed).kind == kind)


def culprit(rank: int | None, **changes: Any) -> dict[str, Any]:
    made = {"rank": rank, "link": None, "cause": "compute on the GPU", "confidence": "high", "stage": ""}
    return made | changes


def incident(kind: str, *culprits: dict[str, Any], step: int = 40) -> dict[str, Any]:
    told = {"onset_step": step, "detected_step": step + 2, "detected_unix_s": 103.0, "summary": ""}
    return {"kind": kind, "culprits": list(culprits), **told}


def why(plan: Plan, *incidents: dict[str, Any], periods_ns: tuple[int, ...] = (100,) * 80) -> list[str]:
    outcome = Outcome(
        exit_code=0, wall_s=20.0, timed_out=False, incidents=list(incidents), script={}, lives={}, watched={},
        ends={}, faults=[], left_over=[], notes={"periods_ns": [list(periods_ns)]}, console="",
        truths=[{"unix_s": 100.0}],
    )  # fmt: skip
    return CASE.judge(plan, outcome).why


def test_each_kind_comes_as_often_with_all_layouts_and_numbers_of_ranks() -> None:
    drawn = [draw(seed) for seed in SEEDS]
    assert set(Counter(one.kind for one in drawn).values()) == {11, 12}
    assert {(one.layout, one.ranks) for one in drawn} == {
        (layout, ranks) for layout in ("ddp", "fsdp2", "pipeline") for ranks in (2, 4, 8)
    } - {("pipeline", 2)}
    for one in drawn:
        assert all(fault.rank < one.ranks and fault.peer < one.ranks for fault in one.faults)
        assert one.ranks > 2 or one.kind not in ("skip", "order", "two slow")
    assert [draw(seed) for seed in SEEDS] == drawn


def test_a_job_does_not_tell_what_will_happen() -> None:
    for seed in SEEDS:
        plan = CASE.plan(seed)
        assert not set(plan.truth["kind"].split()) & set(plan.arguments)


@pytest.mark.parametrize("kind", ["slow x2", "two slow"])
def test_slow_ranks_are_right_if_they_alone_are_named_in_time(kind: str) -> None:
    plan = CASE.plan(seed_of(kind))
    step, ranks = plan.truth["step"], plan.truth["culprits"]
    right = incident("slow", *map(culprit, ranks), step=step)
    assert not why(plan, right)
    assert why(plan)
    assert why(plan, incident("slow", *map(culprit, ranks[1:]), step=step))
    other = next(rank for rank in range(8) if rank not in ranks)
    assert why(plan, right, incident("slow", culprit(other, confidence="low")))
    assert why(plan, incident("slow", *map(culprit, ranks), step=step + 1))
    assert why(plan, incident("slow", *(culprit(rank, cause="data loading") for rank in ranks), step=step))
    assert not why(plan, incident("slow", step=10), right)  # nobody was named


def test_a_pair_is_the_network_and_no_rank() -> None:
    plan = CASE.plan(seed_of(PAIR))
    step = plan.truth["step"]
    felt = (100,) * step + (150,) * 20
    unknown = culprit(None, cause="network")
    assert not why(plan, incident("slow", unknown, step=step), periods_ns=felt)
    assert why(plan, incident("slow", culprit(0), step=step), periods_ns=felt)
    assert why(plan, periods_ns=felt)
    assert not why(plan)  # the job was not slower


@pytest.mark.parametrize("kind", HANGS)
def test_who_stops_the_job_is_named_with_its_place(kind: str) -> None:
    plan = CASE.plan(seed_of(kind))
    stage = kind.removeprefix("hang ")
    named = [culprit(rank, cause="its GPU stands still", stage=stage) for rank in plan.truth["culprits"]]
    if kind == "cut pair":
        named = [culprit(None, cause="network")]
    assert not why(plan, incident("hang", *named))
    assert why(plan, incident("hang"))
    assert why(plan, incident("slow", *named))
    assert why(plan, incident("hang", culprit(7 if plan.truth["culprits"] != [7] else 6)))


@pytest.mark.parametrize("kind", HEALTHY)
def test_in_healthy_jobs_nobody_is_named_and_no_hang_told(kind: str) -> None:
    plan = CASE.plan(seed_of(kind))
    assert not why(plan)
    assert not why(plan, incident("slow"))
    assert why(plan, incident("hang"))
    assert why(plan, incident("slow", culprit(1, confidence="low")))


def test_the_backend_has_its_own_case() -> None:
    assert parse_arguments(["--backend", "stand-in-nccl", "--seeds", "3-9", "--jobs", "2"]).case == [
        CASE.name
    ]
    with pytest.raises(SystemExit):
        parse_arguments(["--backend", "stand-in-nccl", "--case", "slow-2x"])
    assert len(KINDS) == 18
