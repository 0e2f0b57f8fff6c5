"""What seeds of ``benchmarks.operate`` draw, and how they are judged."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from benchmarks.operate import kube_judge, kube_plans
from benchmarks.operate.judge import Seen, faults
from benchmarks.operate.kube_plans import KubePlan
from benchmarks.operate.kube_plans import plan_of as kube_plan_of
from benchmarks.operate.plans import FAULTS, plan_of

PLAN = replace(plan_of(7), fault="node-lost", spare=True, user="root")
LOSSES = {(rank, step): {"0x1p0"} for rank in range(2) for step in range(20)}
GOOD = Seen(
    slurm_exit="0:0",
    ends=[{"exit_code": 0, "category": "finished"}],
    starts_again=0,
    excluded="(null)",
    reasons={"n1": "[node_problem] keepstep run=1 incident=0001 node lost"},
    named_node="n1",
    reason_s=1.0,
    proven_s=None,
    replaced=True,
    again_s=2.0,
    queued_on=["n2"] * 20,
    losses=LOSSES,
    reference=LOSSES,
)


def test_twenty_of_120_seeds_are_healthy_and_every_fault_is_drawn() -> None:
    drawn = Counter(plan_of(seed).fault for seed in range(120))
    assert drawn["healthy"] == 20
    assert set(drawn) == {"healthy", *FAULTS}


def test_a_lost_node_passes_only_where_all_is_as_promised() -> None:
    assert faults(PLAN, "n1", GOOD) == []
    other = {**LOSSES, (1, 0): {"0x1p0", "0x1p2"}}
    for worse in (
        replace(GOOD, slurm_exit="75:0"),
        replace(GOOD, reasons={}),
        replace(GOOD, reason_s=2.5),
        replace(GOOD, again_s=3.1),
        replace(GOOD, queued_on=["n2"] * 19 + ["n1"]),
        replace(GOOD, losses=other),
        replace(GOOD, starts_again=1),
    ):
        assert len(faults(PLAN, "n1", worse)) == 1


def test_a_healthy_run_drains_nothing_and_a_requeued_one_keeps_off_the_lost_node() -> None:
    healthy = replace(PLAN, fault="healthy")
    assert faults(healthy, "n1", GOOD) == ["drained: ['n1'], expected []"]
    requeued = replace(PLAN, spare=False, user="nobody")
    ends = [{"exit_code": 75, "category": "infrastructure"}, *GOOD.ends]
    seen = replace(GOOD, ends=ends, starts_again=1, excluded="n1", reasons={}, replaced=False)
    assert faults(requeued, "n1", seen) == []
    assert faults(requeued, "n1", replace(seen, excluded="(null)")) != []


KUBE_PLAN = KubePlan(
    seed=1, fault="hardware", spare=True, nodes=2, ranks=1, victim=1, at_step=9, api_away=False
)
KUBE_GOOD = kube_judge.Seen(
    phase="Succeeded",
    reason="Finished",
    conditions={"n2": ["KeepstepHardware"]},
    taints={"n2": ["keepstep.dev/hardware"]},
    named="n2",
    condition_s=1.0,
    left_s=-0.5,
    bystander_left=False,
    replaced_on=["n0"],
    others_on=["n0"] * 20,
    steps_away=None,
    exit_codes=[0, 0],
    said=[],
    losses=LOSSES,
    reference=LOSSES,
)


def test_of_eighty_kubernetes_seeds_ten_are_healthy_and_only_who_has_a_spare_is_without_an_api() -> None:
    plans = [kube_plan_of(seed) for seed in range(80)]
    drawn = Counter(plan.fault for plan in plans)
    assert drawn["healthy"] == 10
    assert set(drawn) == {"healthy", *kube_plans.FAULTS}
    assert all(plan.spare for plan in plans if plan.api_away)
    assert sum(bool(plan.taint) for plan in plans) >= 20
    assert not any(plan.condition for plan in plans if plan.fault == "slow-node" and not plan.spare)


def test_broken_hardware_passes_only_where_all_is_as_promised() -> None:
    assert kube_judge.faults(KUBE_PLAN, "n2", KUBE_GOOD) == []
    for worse in (
        replace(KUBE_GOOD, phase="Failed"),
        replace(KUBE_GOOD, conditions={}),
        replace(KUBE_GOOD, taints={"n1": ["keepstep.dev/hardware"], **KUBE_GOOD.taints}),
        replace(KUBE_GOOD, named=""),
        replace(KUBE_GOOD, condition_s=2.1),
        replace(KUBE_GOOD, left_s=None),
        replace(KUBE_GOOD, bystander_left=True),
        replace(KUBE_GOOD, replaced_on=[]),
        replace(KUBE_GOOD, replaced_on=["n2"]),
        replace(KUBE_GOOD, others_on=["n0"] * 19 + ["n2"]),
        replace(KUBE_GOOD, losses={**LOSSES, (1, 0): {"0x1p0", "0x1p2"}}),
    ):
        assert len(kube_judge.faults(KUBE_PLAN, "n2", worse)) == 1


def test_a_healthy_job_marks_no_node_and_one_without_an_api_server_trains_on() -> None:
    healthy = replace(KUBE_PLAN, fault="healthy")
    assert len(kube_judge.faults(healthy, "n2", KUBE_GOOD)) == 2
    away = replace(KUBE_PLAN, api_away=True)
    late = replace(KUBE_GOOD, condition_s=63.0, left_s=9.0, steps_away=17)
    assert kube_judge.faults(away, "n2", late) == []
    assert len(kube_judge.faults(away, "n2", replace(late, steps_away=0))) == 1
