"""The campaign's judges, given outcomes made by hand: what passes, and what each kind of failure is called."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from benchmarks._intervals import wilson
from benchmarks.campaign.cases import CASES, last_step_ended_by
from benchmarks.campaign.replay import bootstrap
from benchmarks.campaign.trial import Outcome, Plan

from keepstep.faults import parse, sentences


def outcome_of(plan: Plan, *incidents: dict[str, Any], **changes: Any) -> Outcome:
    steps = 60
    made = Outcome(
        exit_code=0,
        wall_s=20.0,
        timed_out=False,
        incidents=list(incidents),
        script={rank: [0.3] * steps for rank in range(plan.nproc)},
        lives={rank: [f"began {rank}", f"done {rank}"] for rank in range(plan.nproc)},
        watched={rank: dict.fromkeys(range(steps), 0.3) for rank in range(plan.nproc)},
        ends={step: 1000.0 + 0.3 * (step + 1) for step in range(steps)},
        faults=[],
        left_over=[],
        notes={},
        console="",
    )
    return replace(made, **changes)


def slow_incident(plan: Plan, **changes: Any) -> dict[str, Any]:
    onset, relief = plan.truth["onset"], plan.truth["relief"]
    return {
        "kind": "slow",
        "onset_step": onset,
        "detected_step": onset + 2,
        "relief_step": relief,
        "closed_unix_s": 1000.0 + 0.3 * (relief + 3) + 0.1,  # while step relief + 3 runs
        "job_slowdown": 1.5,
        "culprits": [{"rank": plan.truth["rank"], "link": None, "slowdown": 2.0, "confidence": "high"}],
        **changes,
    }


def why(case: str, plan: Plan, outcome: Outcome) -> str:
    return "; ".join(CASES[case].judge(plan, outcome).why)


@pytest.mark.parametrize("name", CASES)
def test_plans_depend_on_the_seed_alone_and_their_faults_can_be_read(name: str) -> None:
    for seed in range(6):
        plan = CASES[name].plan(seed)
        assert plan == CASES[name].plan(seed)
        assert not plan.fault or sentences(parse(plan.fault)) == plan.fault


def test_the_right_rank_in_time_passes() -> None:
    plan = CASES["slow-2x"].plan(3)
    verdict = CASES["slow-2x"].judge(plan, outcome_of(plan, slow_incident(plan)))
    assert verdict.why == []
    assert (verdict.measured["onset_late"], verdict.measured["relief_late"]) == (2, 2)
    assert verdict.measured["false_alarms"] == 0


def test_what_makes_a_slow_seed_fail() -> None:
    plan = CASES["slow-2x"].plan(3)
    onset, rank = plan.truth["onset"], plan.truth["rank"]
    wrong = {"culprits": [{"rank": (rank + 1) % 4}]}
    both = {"culprits": [{"rank": rank}, {"rank": (rank + 1) % 4}]}

    def said(*incidents: dict[str, Any], **changes: Any) -> str:
        return why("slow-2x", plan, outcome_of(plan, *incidents, **changes))

    assert f"ranks [{rank}] not named" in said()
    assert f"ranks [{rank}] not named" in said(slow_incident(plan, **wrong))
    assert f"ranks [{rank}] not named" in said(slow_incident(plan, **both))
    assert "onset: seen at" in said(slow_incident(plan, detected_step=onset + 4))
    assert "onset: seen at" in said(slow_incident(plan, detected_step=onset - 1))
    assert "relief: not detected" in said(slow_incident(plan, relief_step=None, closed_unix_s=None))
    assert "relief: seen at" in said(slow_incident(plan, closed_unix_s=1017.9))
    assert "1 incidents too many" in said(slow_incident(plan), slow_incident(plan))
    assert "the job ended with 1" in said(slow_incident(plan), exit_code=1)
    assert "left running: agent" in said(slow_incident(plan), left_over=["agent"])


def test_steps_are_told_by_when_all_ranks_had_ended_them() -> None:
    outcome = outcome_of(CASES["healthy"].plan(0))
    assert last_step_ended_by(outcome, 999.0) is None
    assert last_step_ended_by(outcome, 1000.95) == 2


def test_a_healthy_run_must_be_silent_and_watched() -> None:
    plan = CASES["healthy"].plan(0)
    assert why("healthy", plan, outcome_of(plan)) == ""
    assert "false alarms: hang" in why("healthy", plan, outcome_of(plan, {"kind": "hang"}))
    assert "not watched" in why("healthy", plan, outcome_of(plan, watched={}))


def test_a_hang_is_judged_by_rank_and_time() -> None:
    plan = CASES["hang-backward"].plan(1)
    incident = {"kind": "hang", "detected_unix_s": 501.0, "culprits": [{"rank": plan.truth["rank"]}]}
    faults = [{"did": plan.fault, "unix_s": 500.0}]
    assert why("hang-backward", plan, outcome_of(plan, incident, faults=faults)) == ""
    late = {**incident, "detected_unix_s": 502.0}
    assert "verdict after 2.0 s, budget 1.6 s" in why(
        "hang-backward", plan, outcome_of(plan, late, faults=faults)
    )
    assert "no hang reported" in why("hang-backward", plan, outcome_of(plan, faults=faults))
    other = {**incident, "culprits": [{"rank": (plan.truth["rank"] + 1) % 4}]}
    assert "named" in why("hang-backward", plan, outcome_of(plan, other, faults=faults))


def test_a_crash_is_judged_by_rank_time_and_exit_code() -> None:
    plan = CASES["crash"].plan(0)
    incident = {"kind": "crash", "detected_unix_s": 500.1, "culprits": [{"rank": plan.truth["rank"]}]}
    faults = [{"did": plan.fault, "unix_s": 500.0}]
    assert why("crash", plan, outcome_of(plan, incident, faults=faults, exit_code=137)) == ""
    assert "exit code 0" in why("crash", plan, outcome_of(plan, incident, faults=faults))
    late = {**incident, "detected_unix_s": 501.0}
    assert "budget 0.5 s" in why("crash", plan, outcome_of(plan, late, faults=faults, exit_code=137))


def test_a_slow_link_needs_both_hosts_and_no_rank() -> None:
    plan = CASES["slow-link"].plan(0)
    link = {"ranks": [0, 2], "nodes": list(reversed(plan.truth["hosts"]))}
    incident = slow_incident(replace(plan, truth={**plan.truth, "rank": None}))
    right = {**incident, "culprits": [{"rank": None, "link": link}]}
    assert why("slow-link", plan, outcome_of(plan, right)) == ""
    assert "not named" in why("slow-link", plan, outcome_of(plan, {**incident, "culprits": [{"rank": 1}]}))
    assert "too many" in why(
        "slow-link", plan, outcome_of(plan, right, {**incident, "culprits": [{"rank": 1}]})
    )


def test_a_cut_path_needs_both_hosts_in_time_and_no_rank() -> None:
    plan = CASES["hang8-allreduce"].plan(0)
    culprit = {"link": {"ranks": [0, 2], "nodes": plan.truth["hosts"]}, "stage": "transfer"}
    incident = {"kind": "hang", "detected_unix_s": 501.0, "culprits": [culprit]}
    accused = {"unix_s": 503.0, "culprits": [culprit]}

    def said(incident: dict[str, Any], *before: dict[str, Any]) -> str:
        notes = {"onset_unix_s": 500.0, "accused": [*before, accused]}
        return why("hang8-allreduce", plan, outcome_of(plan, incident, notes=notes))

    assert said(incident) == ""
    assert "budget 1.6 s" in said({**incident, "detected_unix_s": 502.0})
    assert "ranks [3] accused" in said(incident, {"unix_s": 502.0, "culprits": [{"rank": 3}]})
    assert "not named" in said({**incident, "culprits": []})
    elsewhere = {**culprit, "link": {"nodes": ["node-a", "node-c"]}}
    assert "not named" in said({**incident, "culprits": [elsewhere]})
    assert "stage" in said({**incident, "culprits": [{**culprit, "stage": "forward"}]})


def test_iteration_times_are_compared_rank_by_rank() -> None:
    plan = CASES["iteration-time"].plan(0)
    good = outcome_of(plan)
    assert why("iteration-time", plan, good) == ""
    off = {**good.watched, 2: dict.fromkeys(range(60), 0.302)}
    assert "off by +0.67%" in why("iteration-time", plan, replace(good, watched=off))
    missing = {**good.watched, 2: {}}
    assert "ranks missing" in why("iteration-time", plan, replace(good, watched=missing))


def test_a_killed_agent_needs_a_successor() -> None:
    plan = CASES["agent-killed"].plan(0)
    passed = outcome_of(plan, slow_incident(plan), notes={"killed": 7, "successor": 8})
    assert why("agent-killed", plan, passed) == ""
    assert "no new agent" in why("agent-killed", plan, replace(passed, notes={"killed": 7, "successor": 0}))


def test_wilson_interval() -> None:
    assert wilson(20, 20) == pytest.approx((0.8389, 1.0), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(5, 10)
    assert low == pytest.approx(1 - high)


def test_bootstrap_keeps_blocks_of_neighbours() -> None:
    series = [float(value) for value in range(100)]
    made = bootstrap(series, 110, random.Random(1))
    assert len(made) == 110
    assert all(made[i + 1] - made[i] == 1 for i in range(109) if (i + 1) % 25)
