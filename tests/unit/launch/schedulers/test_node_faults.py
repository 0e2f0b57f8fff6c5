"""Which nodes are proven bad by an incident, and how many may be taken from other jobs."""

from __future__ import annotations

from dataclasses import replace

from keepstep.core.incident import REPLACEMENT, Action, Culprit, Event, FailureCause, Incident, SpokenLine
from keepstep.launch.schedulers.node_faults import DrainBudget, NodeFault, faults_of

XID = "NVRM: Xid (PCI:0000:9b:00): 95, pid=4711, name=python3, Uncontained ECC error"
CRASH = Incident(7, "crash", 3, 3, None, None, (), (), (), ())
HELPED = Action(REPLACEMENT, before_iteration_s=0.3, measured_iteration_s=0.1)
ECC = FailureCause("node", "gpu-ecc", "GPU memory error", "high", first=SpokenLine(XID, None, "n2", "kernel"))


def found(incident: Incident, *members: str) -> list[tuple[str, str, str]]:
    return [(one.node, one.kind, one.text) for one in faults_of(incident, members)]


def test_the_kernels_word_of_broken_hardware_is_a_fault() -> None:
    crash = replace(CRASH, culprits=(Culprit(rank=5, node="n2"),), cause=ECC)
    assert found(crash) == [("n2", "hardware", "rank=5 GPU memory error")]


def test_a_ranks_word_is_none() -> None:
    words = replace(ECC, first=SpokenLine(XID, 5, "n2", "stderr.0.log"))
    assert found(replace(CRASH, culprits=(Culprit(rank=5, node="n2"),), cause=words)) == []


def test_what_the_kernel_says_of_memory_or_of_an_application_is_none() -> None:
    for line in (
        "Out of memory: Killed process 4711 (python3) total-vm:81920kB",
        "NVRM: Xid (PCI:0000:9b:00): 31, pid=4711, name=python3, Ch 00000008, MMU Fault",
    ):
        cause = replace(ECC, first=SpokenLine(line, None, "n2", "kernel"))
        assert found(replace(CRASH, culprits=(Culprit(rank=5, node="n2"),), cause=cause)) == []
    unsure = replace(ECC, confidence="medium")
    assert found(replace(CRASH, culprits=(Culprit(rank=5, node="n2"),), cause=unsure)) == []


def test_a_lost_node_is_one_and_a_dead_rank_is_none() -> None:
    lost = Culprit(node="n2", confidence="medium", cause="node lost")
    assert found(replace(CRASH, culprits=(lost,))) == [("n2", "lost", "node lost")]
    assert found(replace(CRASH, culprits=(Culprit(rank=5, node="n2", cause="exit code 1"),))) == []


def test_a_slow_node_is_one_once_the_job_is_faster_with_a_spare_in_its_place() -> None:
    culprit = Culprit(rank=27, node="n2", slowdown=2.04, confidence="high")
    slow = replace(CRASH, kind="slow", culprits=(culprit,), actions=(HELPED,))
    assert found(slow, "n0", "n3") == [("n2", "slow", "rank=27 slow x2.0")]
    all_ranks = replace(slow, culprits=(culprit, replace(culprit, rank=26)))
    assert found(all_ranks, "n0", "n3") == found(slow, "n0", "n3"), "one fault, however many ranks it has"
    assert found(slow, "n0", "n2") == [], "it still plays its ranks, as where fewer micro-batches cured it"
    assert found(replace(slow, actions=()), "n0", "n3") == [], "it left for another reason"
    assert found(slow) == [], "who plays ranks is not known"
    assert found(replace(slow, culprits=(replace(culprit, confidence="medium"),)), "n0") == []


def test_a_slowness_that_goes_on_with_a_spare_is_no_fault_of_the_node() -> None:
    culprit = Culprit(rank=27, node="n2", slowdown=2.04, confidence="high")
    slow = replace(CRASH, kind="slow", culprits=(culprit,), actions=(HELPED,))
    for actions in (
        (replace(HELPED, measured_iteration_s=None),),  # not measured yet
        (replace(HELPED, measured_iteration_s=0.29),),
        (replace(HELPED, name="S2, micro-batches"),),
        (HELPED, replace(HELPED, detail="another node", measured_iteration_s=None)),
    ):
        assert found(replace(slow, actions=actions), "n0", "n3") == []


def test_a_node_that_a_validation_has_cleared_is_none() -> None:
    culprit = Culprit(rank=27, node="n2", slowdown=2.04, confidence="high")
    slow = replace(CRASH, kind="slow", culprits=(culprit,), actions=(HELPED,))
    tested = "validation (ranks 26-27 held 1.2 s): "
    for detail, faults in (
        (f"{tested}2 devices and 0 links are alike", 0),
        (f"{tested}rank 27 fp32 0.9 TFLOP/s against 1.8 of its peers", 1),
        (f"{tested}no figures came", 1),
        ("validation not done: one is under way already", 1),
    ):
        events = (Event("validation", 1.0, 41, detail),)
        assert len(found(replace(slow, events=events), "n0", "n3")) == faults, detail


def test_a_reason_is_one_line_that_names_run_and_incident() -> None:
    fault = NodeFault("n2", "hardware", 7, 'rank=5 "GPU"\nmemory \x1b[31merror')
    assert fault.reason("12") == (
        "[node_problem] keepstep run=12 incident=0007 rank=5 'GPU'\\nmemory \\x1b[31merror"
    )
    assert len(replace(fault, text="x" * 999).reason("12")) == 200


def test_a_tenth_of_the_nodes_within_an_hour_and_one_at_least() -> None:
    one = DrainBudget(8)
    assert [one.take(0.0), one.take(3599.0), one.take(3600.0)] == [True, False, True]
    assert sum(DrainBudget(64).take(0.0) for _ in range(1)) == 1
    again = DrainBudget(8, one.taken_s)
    assert [again.take(7199.0), again.take(7200.0)] == [False, True], "as if it had gone on"
    many = DrainBudget(64)
    assert sum(many.take(float(second)) for second in range(20)) == 6
