"""Who is to blame where victims die first, ranks leave with exit code 0, or what the program does differs by rank."""

from __future__ import annotations

from typing import Any

from benchmarks.campaign.blame_draw import NAME, draw
from benchmarks.campaign.case import Case, Verdict, culprit_ranks, left_over
from benchmarks.campaign.trial import Outcome, Plan


def plan_blame(seed: int) -> Plan:
    blame = draw(seed)
    return Plan(
        script="benchmarks/campaign/blame_job.py",
        arguments=("--seed", str(seed), "--notes", "{folder}"),
        truth={"kind": blame.kind, "ranks": blame.ranks, "kinds": blame.rules.incidents},
        nproc=blame.nproc,
        end_after_truth_s=blame.rules.ends_after_s,
        timeout_s=240,
    )


def judge_blame(plan: Plan, outcome: Outcome) -> Verdict:
    """The last incident names the right ranks and is of the right kind; no incident names anybody else."""
    why, true = left_over(outcome), sorted({told["rank"] for told in outcome.truths})
    measured: dict[str, Any] = {"kind": plan.truth["kind"], "true": true, "victims_named": 0}
    if outcome.timed_out:
        why.append("the job did not end in time")
    if true != sorted(plan.truth["ranks"]):
        return Verdict(
            [*why, f"ranks {true} told that they are to blame, drawn {plan.truth['ranks']}"], measured
        )
    victims = sorted({rank for one in outcome.incidents for rank in culprit_ranks(one)} - set(true))
    measured["victims_named"] = len(victims)
    if victims:
        why.append(f"victims {victims} named")
    if not outcome.incidents:
        return Verdict([*why, "silent: no incident"], measured)
    last = outcome.incidents[-1]
    told = min(one["unix_s"] for one in outcome.truths)
    measured |= {
        "incident": last["kind"],
        "incidents": len(outcome.incidents),
        "named": sorted(culprit_ranks(last)),
        "confidence": sorted({one["confidence"] for one in last["culprits"]}),
        "seconds_to_verdict": round(last["detected_unix_s"] - told, 1),
    }
    if measured["named"] != true:
        why.append(f"named {measured['named']}, true {true}")
    if last["kind"] not in plan.truth["kinds"]:
        why.append(f"kind {last['kind']}, true {' or '.join(plan.truth['kinds'])}")
    return Verdict(why, measured)


BLAME = Case(
    NAME,
    80,
    "right rank and kind ≥ 97 %, a victim as culprit 0 (kinds and ranks drawn, 3 and 8 ranks)",
    plan_blame,
    judge_blame,
    ("seconds_to_verdict",),
    share=0.97,
    zero=("victims_named",),
)
