"""The campaign on the stand-in GPU: what its seeds draw, and its judge, given outcomes made by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.campaign import running
from benchmarks.campaign.__main__ import parse_arguments
from benchmarks.campaign.case import Case
from benchmarks.campaign.seeds import kept
from benchmarks.campaign.stand_in import CASE, FRAMEWORKS_CASE, PORTS_CASE
from benchmarks.campaign.stand_in_draw import (
    CUT,
    HANGS,
    HEALTHY,
    KINDS,
    PAIR,
    Drawn,
    draw,
    draw_frameworks,
    draw_with_ports,
)
from benchmarks.campaign.trial import Outcome, Plan
from benchmarks.stand_in.device import CONTROL_BYTES, Control
from benchmarks.stand_in.ports import PairPorts, missing

SEEDS = range(200)
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "campaign"


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


@pytest.mark.parametrize("case", [CASE, FRAMEWORKS_CASE], ids=lambda case: case.name)
def test_seeds_that_have_a_result_draw_what_they_drew_then(case: Case) -> None:
    for seed, result in kept(RESULTS, case.name).items():
        assert case.plan(seed).truth == result["plan"]["truth"]


def test_frameworks_have_each_kind_and_pairs_exchange_more_than_a_norm() -> None:
    drawn = [draw_frameworks(seed) for seed in SEEDS]
    assert {(one.kind, one.layout) for one in drawn} == {
        (kind, layout) for kind in KINDS for layout in ("megatron", "deepspeed")
    }
    assert {one.ranks for one in drawn if one.layout == "megatron"} == {4, 8}
    for one in drawn:
        fault = one.faults[0]
        if one.kind in (CUT, PAIR) and one.layout == "megatron":
            # Ranks are numbered by tensor-parallel rank, then by replica, then by stage.
            assert (fault.rank ^ fault.peer) in (1, 2, 4)


def test_seeds_whose_framework_is_not_installed_are_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran: list[int] = []

    def run_seed(_: Case, seed: int, *more: Any) -> dict[str, Any]:
        ran.append(seed)
        return {"passed": True, "measured": {}}

    monkeypatch.setattr(running, "run_seed", run_seed)
    case = replace(FRAMEWORKS_CASE, lacks=lambda seed: "deepspeed" if seed % 2 else "")
    words = ["--backend", "stand-in-nccl", "--case", "drawn-frameworks", "--out", str(tmp_path)]
    running.run_case(case, range(6), parse_arguments(words))
    assert ran == [0, 2, 4]
    assert f"{case.name}: 3 seeds are left out, deepspeed is not installed" in capsys.readouterr().out


def test_a_job_does_not_tell_what_will_happen() -> None:
    for plan in [case.plan(seed) for seed in SEEDS for case in (CASE, FRAMEWORKS_CASE)]:
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


def test_where_ports_tell_the_pair_it_has_to_be_named() -> None:
    for seed in range(2):
        plan = replace(CASE.plan(0), **vars_of(draw_with_ports(seed)))
        fault, on_node = draw_with_ports(seed).faults[0], plan.truth["ranks"] // 4
        link = {"ranks": [fault.rank, fault.peer], "nodes": []}
        kind = "hang" if plan.truth["kind"] == CUT else "slow"
        step = plan.truth["step"]
        felt = (100,) * step + (150,) * 20
        right = incident(kind, culprit(None, cause="network", link=link), step=step)
        assert not why(plan, right, periods_ns=felt)
        assert why(plan, incident(kind, culprit(None, cause="network"), step=step), periods_ns=felt)
        link = {"ranks": [fault.rank, (fault.peer + on_node) % plan.truth["ranks"]], "nodes": []}
        assert why(
            plan, incident(kind, culprit(None, cause="network", link=link), step=step), periods_ns=felt
        )


def vars_of(drawn: Drawn) -> dict[str, Any]:
    """What a plan with ports has of this seed, also for those who are not root."""
    plan = CASE.plan(0)
    assert plan.stand_in is not None
    device = replace(plan.stand_in, faults=drawn.faults, nodes=4, with_ports=True)
    truth = {
        "kind": drawn.kind,
        "layout": drawn.layout,
        "ranks": drawn.ranks,
        "culprits": [],
        "step": drawn.step,
    }
    return {"stand_in": device, "truth": truth}


def test_counters_grow_and_those_of_the_pair_count_losses_while_the_fault_is_on(tmp_path: Path) -> None:
    (tmp_path / "control").write_bytes(bytes(CONTROL_BYTES))
    ports = PairPorts(tmp_path, nodes=2, ranks=4, pair=(1, 3))
    control = Control(tmp_path / "control")

    def losses() -> list[int]:
        places = [tmp_path / "sysfs" / f"node-{number}" / "mlx5_0/ports/1" for number in range(2)]
        return [int((place / "hw_counters/packet_seq_err").read_text()) for place in places]

    ports.advance(10.0)
    ports.advance(11.0)
    assert losses() == [0, 0]
    control.cut(1, 3)
    ports.advance(12.0)
    assert min(losses()) > 100
    control.cut(1, 3, on=False)
    before = losses()
    ports.advance(13.0)
    assert losses() == before


def test_the_backend_has_its_own_cases() -> None:
    assert parse_arguments(["--backend", "stand-in-nccl", "--seeds", "3-9", "--jobs", "2"]).case == [
        CASE.name
    ]
    if not missing():
        words = ["--backend", "stand-in-nccl", "--case", "pairs-with-ports"]
        assert parse_arguments(words).case == [PORTS_CASE.name]
    for words in (["--backend", "stand-in-nccl", "--case", "slow-2x"], ["--case", "pairs-with-ports"]):
        with pytest.raises(SystemExit):
            parse_arguments(words)
    assert len(KINDS) == 18
