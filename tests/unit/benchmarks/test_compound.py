"""The compound run's simulation: its quick mode, and the offline optimum that keepstep is compared with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks._report import Report
from benchmarks._trials import Trials
from benchmarks.compound import job, optimum
from benchmarks.compound import schedule as given
from benchmarks.compound.simulated import simulate

SCHEDULE = given.load()


@pytest.mark.long
def test_the_quick_mode_runs_and_nobody_is_better_than_the_optimum() -> None:
    report = Report("compound", quick=True, packages=())
    simulate(report, Trials(None), True, 1, job.EXCHANGE_S)
    lines = {line.name.removeprefix("simulated, "): line for line in report.lines}
    per_minute = [
        lines[f"iterations a minute: {who}"].value
        for who in ("without keepstep", "with keepstep", "offline optimum", "healthy")
    ]
    assert per_minute == sorted(per_minute)  # type: ignore[type-var]
    assert lines["slowdowns whose device or link a verdict named"].value == 100
    assert all("SIMULATION" in (lines[name].limit or "") for name in lines if lines[name].goal)


def test_the_optimum_is_as_good_as_any_plan_can_be() -> None:
    plan = optimum.best(SCHEDULE, job.EXCHANGE_S)
    assert plan.plan_s == pytest.approx(plan.bound_s)
    assert all(sum(shares) == job.COUNT for shares in plan.shares)


def test_no_other_shares_are_better_than_the_optimums() -> None:
    one_slow = replace(SCHEDULE, iterations=1, events=(replace(SCHEDULE.events[1], first=0),))
    cluster = job.Cluster(one_slow, 0, jitter=0.0)
    plan = optimum.best(one_slow, job.EXCHANGE_S)
    cluster.shares = list(plan.shares[0])
    (best_s,) = cluster.iterations_s(0, 1)
    assert best_s == pytest.approx(plan.plan_s)
    slow = one_slow.events[0].replica
    for less in range(3, given.MICRO_BATCHES):
        rest, more = divmod(job.COUNT - less, given.DP - 1)
        others = [rest + 1] * more + [rest] * (given.DP - 1 - more)
        cluster.shares = [*others[:slow], less, *others[slow:]]
        assert cluster.iterations_s(0, 1)[0] >= best_s * (1 - 1e-9)


def test_the_schedule_is_the_papers_and_slows_the_job_as_much() -> None:
    kinds = sorted((one.kind, one.severity) for one in SCHEDULE.events)
    computing = 3 * [("compute", "weak")] + 5 * [("compute", "medium")] + 2 * [("compute", "severe")]
    assert kinds == sorted([*computing, *2 * [("link", "medium")]])
    healthy, slowed = sum(job.healthy(SCHEDULE, 1001)), sum(job.untreated(SCHEDULE, 1001))
    assert slowed / healthy == pytest.approx(given.PAPER_HEALTHY / given.PAPER_SLOWED, rel=0.005)


def test_a_slowdown_stays_with_its_node() -> None:
    link = SCHEDULE.events[3]
    place_of = list(range(job.NODES))
    here = link.stage * given.DP + link.replica
    place_of[here], place_of[0] = 0, here
    assert {place_of[0], place_of[here]} == {0, here}
    (moved,) = given.faults([link], place_of)
    assert moved.rank == 0
    cluster = job.Cluster(SCHEDULE, 0, jitter=0.0)
    before = cluster.iterations_s(link.last, link.last + 1)[0]
    cluster.exchange(place_of)
    assert cluster.iterations_s(link.last, link.last + 1)[0] < before
