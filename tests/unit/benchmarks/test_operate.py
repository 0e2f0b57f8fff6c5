"""What seeds of ``benchmarks.operate`` draw, and how they are judged."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from benchmarks.operate.judge import Seen, faults
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
