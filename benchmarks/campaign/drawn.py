"""Hangs and pauses of one rank, in layouts and at places that the seed draws; on Gloo, or on what stands for NCCL."""

from __future__ import annotations

from typing import Any

from benchmarks.campaign.case import Case, Verdict, culprit_ranks, left_over, named_for_sure
from benchmarks.campaign.drawn_draw import HANG, HANGS, HEALTHY, draw
from benchmarks.campaign.trial import Outcome, Plan

_SCRIPT = "benchmarks/campaign/drawn_job.py"
_STAGES = ("forward", "backward", "data", "optimizer")
# The whole time in which a hang is to be told: with a rank that may wait unseen keepstep is patient for 30 s.
_WITHIN_S = 40.0


def _plan(name: str, seed: int, **more: Any) -> Plan:
    drawn = draw(name, seed)
    return Plan(
        script=_SCRIPT,
        arguments=("--case", name, "--seed", str(seed), "--notes", "{folder}"),
        truth={"kind": drawn.kind, "layout": drawn.layout, "rank": drawn.rank, "step": drawn.step},
        nproc=drawn.nproc,
        timeout_s=180,
        **more,
    )


def plan_hang(seed: int) -> Plan:
    kinds = " or ".join(HANGS[draw(HANG, seed).kind])
    return _plan(HANG, seed, end_on=kinds, end_after_s=5, end_after_truth_s=_WITHIN_S)


def judge_hang(plan: Plan, outcome: Outcome) -> Verdict:
    """The last incident names the right rank, its kind and its place; nobody else is ever named for sure."""
    why, truth = left_over(outcome), plan.truth
    measured: dict[str, Any] = {
        "kind": f"{truth['kind']}, {truth['layout']}",
        "ranks": plan.nproc,
        "wrong_for_sure": 0,
    }
    if not outcome.truths:
        return Verdict([*why, "nobody got stuck"], measured)
    wrong = [one for one in outcome.incidents if set(culprit_ranks(one)) - {truth["rank"]}]
    measured["wrong_for_sure"] = sum(named_for_sure(one) for one in wrong)
    if measured["wrong_for_sure"]:
        why.append("another rank named for sure")
    found = [one for one in outcome.incidents if one["kind"] in HANGS[truth["kind"]]]
    if len(outcome.incidents) != 1 or not found:
        why.append(f"incidents: {[one['kind'] for one in outcome.incidents]}")
    if not found:
        return Verdict(why, measured)
    first = found[0]
    named = culprit_ranks(first)
    measured |= {
        "named": named,
        "confidence": sorted({one["confidence"] for one in first["culprits"]}),
        "stage": [one["stage"] for one in first["culprits"]],
        "seconds_to_verdict": round(first["detected_unix_s"] - outcome.truths[0]["unix_s"], 1),
    }
    if named != [truth["rank"]]:
        why.append(f"named {named}, true {truth['rank']}")
    elif truth["kind"] in _STAGES and truth["kind"] not in measured["stage"][0]:
        why.append(f"stage {measured['stage'][0]}, true {truth['kind']}")
    return Verdict(why, measured)


def plan_healthy(seed: int) -> Plan:
    return _plan(HEALTHY, seed)


def judge_healthy(plan: Plan, outcome: Outcome) -> Verdict:
    """The job ends by itself, and no hang is told."""
    why = left_over(outcome)
    if outcome.timed_out or outcome.exit_code:
        why.append("the job did not end" if outcome.timed_out else f"exit code {outcome.exit_code}")
    if not outcome.truths:
        why.append("nobody paused")
    hangs = [one["kind"] for one in outcome.incidents if one["kind"] != "slow"]
    if hangs:
        why.append(f"incidents: {hangs}")
    kind = f"{plan.truth['kind']}, {plan.truth['layout']}"
    return Verdict(why, {"kind": kind, "ranks": plan.nproc, "hangs": len(hangs)})


DRAWN = (
    Case(
        HANG,
        60,
        "right rank and kind ≥ 97 %, wrong with confidence high 0 (layout, ranks, place and step drawn)",
        plan_hang,
        judge_hang,
        ("seconds_to_verdict",),
        share=0.97,
        zero=("wrong_for_sure",),
    ),
    Case(
        HEALTHY,
        30,
        "no hang told: a checkpoint, an evaluation or a first step of 6 s more on rank 0",
        plan_healthy,
        judge_healthy,
        zero=("hangs",),
    ),
)
