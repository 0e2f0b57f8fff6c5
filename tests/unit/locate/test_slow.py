from __future__ import annotations

import pytest
from tests.unit.locate.synthetic_jobs import Conditions, ddp, dp_pp, dp_tp, fsdp, slow_rank

from keepstep.core.evidence import Evidence
from keepstep.core.summary import HostCause
from keepstep.locate import locate_slow

JOBS = {
    "dp2-pp2": lambda **o: dp_pp(2, 2, **o),
    "dp4-pp4": lambda **o: dp_pp(4, 4, micro=8, own_groups=True, **o),
    "dp2-tp4": lambda **o: dp_tp(2, 4, **o),
    "ddp4": lambda **o: ddp(4, **o),
    "ddp16, waits known": lambda **o: ddp(16, overlap_unknown=False, **o),
    "fsdp4": lambda **o: fsdp(4, **o),
    "dp16-pp4": lambda **o: dp_pp(16, 4, micro=8, **o),
}
CLOCK = {f"n{i}": (3600.0 * (i * 7 % 5), 1e-5 * (i % 3 - 1)) for i in range(32)}


def diagnose(job, conditions, **more):
    before, after, _ = job.healthy_then(conditions)
    return locate_slow(Evidence(job.infos, job.nodes, before=before, after=after, **more))


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("factor", [1.3, 2.0, 4.0])
@pytest.mark.parametrize("rank", [0, 3])
def test_one_slow_rank(name, factor, rank):
    job = JOBS[name](noise=0.03, clock=CLOCK, seed=rank)
    found = diagnose(job, Conditions(slow=slow_rank(rank, factor)))
    assert [c.rank for c in found.culprits] == [rank]
    culprit = found.culprits[0]
    assert (culprit.node, culprit.cause, culprit.confidence) == (job.nodes[rank], "compute", "high")
    assert culprit.stage == "forward and backward"
    assert culprit.slowdown == pytest.approx(factor, rel=0.15)
    assert rank not in found.victims
    assert len(found.victims) == job.world - 1
    assert any(f"rank {rank}: own time" in line for line in found.evidence)
    assert found.missing == ()


@pytest.mark.parametrize("name", ["dp2-pp2", "dp2-tp4", "fsdp4"])
@pytest.mark.parametrize(
    ("phase", "cause"), [("forward", "compute"), ("backward", "compute"), ("data", "data loading")]
)
def test_the_stage_that_grew(name, phase, cause):
    factor = 60.0 if phase == "data" else 3.0
    found = diagnose(JOBS[name](), Conditions(slow=slow_rank(2, factor, (phase,))))
    assert [(c.rank, c.stage, c.cause) for c in found.culprits] == [(2, phase, cause)]


@pytest.mark.parametrize("name", ["dp4-pp4", "ddp16, waits known", "dp16-pp4"])
def test_two_slow_ranks_worst_first(name):
    job = JOBS[name]()
    found = diagnose(job, Conditions(slow=slow_rank(1, 1.6) | slow_rank(6, 3.0)))
    assert [c.rank for c in found.culprits] == [6, 1]


@pytest.mark.parametrize("name", ["dp4-pp4", "dp16-pp4", "ddp16, waits known"])
def test_a_third_of_the_ranks_is_slow(name):
    job = JOBS[name]()
    slow = set(range(0, job.world, 3))
    conditions = Conditions(slow={key: 2.0 for rank in slow for key in slow_rank(rank, 2.0)})
    assert {c.rank for c in diagnose(job, conditions).culprits} == slow


@pytest.mark.parametrize("name", JOBS)
def test_everybody_slower_is_nobody_s_fault(name):
    found = diagnose(JOBS[name](), Conditions(everybody=1.5))
    assert found.culprits == ()
    assert found.victims == ()
    assert "alike" in found.summary
    assert any("all" in line for line in found.evidence)
    assert found.missing


def test_everybody_slower_with_a_host_cause_says_so():
    causes = [HostCause(rank, "run queue", 0.4) for rank in range(4)]
    found = diagnose(JOBS["ddp4"](), Conditions(everybody=1.5), causes=causes)
    assert any("run queue" in line for line in found.evidence)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_is_not_slower_blames_nobody(name):
    found = diagnose(JOBS[name](noise=0.03), Conditions())
    assert found.culprits == ()
    assert "not slower" in found.summary


def test_the_host_cause_is_named():
    causes = [HostCause(1, "cpu quota", 0.45, "throttled 45% of the time"), HostCause(3, "run queue", 0.01)]
    found = diagnose(JOBS["dp2-pp2"](), Conditions(slow=slow_rank(1, 2.0)), causes=causes)
    assert [(c.rank, c.cause) for c in found.culprits] == [(1, "cpu quota")]
    assert "throttled" in found.culprits[0].detail


@pytest.mark.parametrize(
    ("ratio", "cause", "confidence"),
    [(2.0, "cpu quota", "high"), (2.0, "run queue", "medium"), (1.07, "", "medium")],
)
def test_what_a_busy_machine_may_do_is_never_certain(ratio: float, cause: str, confidence: str) -> None:
    causes = [HostCause(1, cause, 0.45)] if cause else []
    found = diagnose(JOBS["ddp4"](), Conditions(slow=slow_rank(1, ratio)), causes=causes)
    assert [(c.rank, c.confidence) for c in found.culprits] == [(1, confidence)]


def test_the_pipeline_stage_is_told():
    found = diagnose(JOBS["dp2-pp2"](), Conditions(slow=slow_rank(3, 2.0)))
    assert "pipeline stage 1" in found.culprits[0].detail


def test_a_silent_rank_is_said_to_be_missing():
    job = JOBS["dp2-pp2"]()
    before, after, _ = job.healthy_then(Conditions(slow=slow_rank(1, 3.0)))
    heard = [s for s in after if s.rank != 1]
    found = locate_slow(Evidence(job.infos, job.nodes, before=before, after=heard))
    assert found.culprits == ()
    assert any("ranks 1" in text for text in found.missing)


def test_slow_from_the_first_iteration():
    job = dp_pp(4, 2)
    _, after, _ = job.healthy_then(Conditions(slow=slow_rank(5, 2.0)))
    found = locate_slow(Evidence(job.infos, job.nodes, after=after))
    assert [(c.rank, c.confidence) for c in found.culprits] == [(5, "medium")]
    assert any("peers are the measure" in text for text in found.missing)


def test_uneven_stages_are_no_stragglers_from_the_first_iteration():
    job = dp_pp(4, 2)
    job.programs = [[(k, *a[:-1], a[-1] * 2) if k == "compute" and rank >= 4 else (k, *a) for k, *a in program]
                    for rank, program in enumerate(job.programs)]  # fmt: skip
    _, after, _ = job.healthy_then(Conditions())
    found = locate_slow(Evidence(job.infos, job.nodes, after=after))
    assert found.culprits == ()
    assert any("healthy time" in text for text in found.missing)


def test_nothing_to_go_by():
    found = locate_slow(Evidence({}, {0: "n0"}, after=()))
    assert found.culprits == ()
    assert found.missing
    job = JOBS["ddp4"]()
    before, after, _ = job.healthy_then(Conditions())
    apart = locate_slow(
        Evidence(
            job.infos,
            job.nodes,
            before=[s for s in before if s.rank < 2],
            after=[s for s in after if s.rank >= 2],
        )
    )
    assert "iterations of the same ranks before and after" in apart.missing


def test_arrival_with_clocks_hours_apart():
    from keepstep.locate import estimate_offsets

    job = dp_tp(2, 4, clock=CLOCK)
    before, after, samples = job.healthy_then(Conditions(slow=slow_rank(5, 2.0)))
    found = locate_slow(Evidence(job.infos, job.nodes, estimate_offsets(samples), before=before, after=after))
    assert [c.rank for c in found.culprits] == [5]
    assert any("after its peers (clocks to" in line for line in found.evidence)
