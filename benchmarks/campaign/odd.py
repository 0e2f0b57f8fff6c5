"""Healthy jobs that look odd: one rank does something long by itself. Nothing of them may be ended.

The jobs are plain PyTorch, or what users train with, started as users start theirs; the seed draws what is done, by
whom, when, for how long, and in which operation the others wait. What is silent lasts at most 50 s, what moves at most
150 s; with the patience that the jobs are given, 60 s, neither is a hang.
"""

from __future__ import annotations

from benchmarks.campaign.case import Case, Verdict, left_over, named_for_sure
from benchmarks.campaign.odd_draw import FRAMEWORKS, NAME, Odd, draw
from benchmarks.campaign.trial import Outcome, Plan

FLAGS = ("--max-restarts", "2", "--on-hang", "restart", "--hang-patience", "60")


def plan_odd(seed: int) -> Plan:
    odd = draw(seed)
    return Plan(
        script=f"benchmarks/campaign/{FRAMEWORKS.get(odd.kind, ('odd_job.py',))[0]}",
        flags=FLAGS,
        arguments=("--seed", str(seed), "--notes", "{folder}"),
        stop=(odd.rank, odd.step, odd.seconds) if odd.kind == "stop" else None,
        truth=_told(odd),
        nproc=odd.nproc,
        timeout_s=odd.seconds + 240,
    )


def _told(odd: Odd) -> dict[str, object]:
    return {
        "kind": odd.kind,
        "way": odd.way,
        "rank": odd.rank,
        "step": odd.step,
        "seconds": odd.seconds,
        "wait": odd.wait,
    }


def judge_odd(plan: Plan, outcome: Outcome) -> Verdict:
    """Each rank has begun once and come to its end, nobody is named for sure, and the job's exit code is 0."""
    why = left_over(outcome)
    if outcome.timed_out or outcome.exit_code != 0:
        why.append("the job did not end" if outcome.timed_out else f"exit code {outcome.exit_code}")
    ended = 0
    for rank in range(plan.nproc):
        lives = outcome.lives.get(rank, [])
        began = [line for line in lives if line.startswith("began")]
        done = [line for line in lives if line.startswith("done")]
        ended += max(len(began) - len(done), 0)
        if len(began) != 1 or len(done) != 1:
            why.append(f"rank {rank} began {len(began)} times and was done {len(done)} times")
    if plan.stop and not outcome.notes.get("stopped"):
        why.append("nobody was stopped")
    sure = [incident for incident in outcome.incidents if named_for_sure(incident)]
    why += [f"{incident['kind']} with a culprit of confidence high" for incident in sure]
    measured = {
        "kind": plan.truth["kind"],
        "way": plan.truth["way"],
        "ended": ended,
        "named_for_sure": len(sure),
        "incidents": len(outcome.incidents),
        "blamed": sum(bool(incident["culprits"]) for incident in outcome.incidents),
    }
    return Verdict(why, measured)


ODD = Case(
    NAME,
    60,
    "0 processes ended, 0 incidents of confidence high with a culprit, exit code 0 (one rank by itself, silent for up"
    " to 50 s or moving for up to 150 s; patience 60 s)",
    plan_odd,
    judge_odd,
    ("incidents", "blamed"),
    zero=("ended", "named_for_sure"),
)
