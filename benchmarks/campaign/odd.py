"""Healthy jobs that look odd: one rank does something long by itself. Nothing of them may be ended.

The jobs are plain PyTorch (``odd_job.py``), started as users start theirs; the seed draws who does it, when, for how
many ranks, and in which operation the others wait.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.campaign.case import Verdict, drawn, left_over
from benchmarks.campaign.trial import Outcome, Plan

SECONDS = {"evaluate": 50, "upload": 50, "answer": 50, "roll-out": 40, "stop": 6, "export": 45}


def plan_odd(what: str) -> Callable[[int], Plan]:
    """``what``: of `SECONDS`."""

    def plan(seed: int) -> Plan:
        chance = drawn(f"healthy-odd-{what}", seed)
        nproc = chance.randint(2, 4)
        rank, step = chance.randrange(nproc), chance.randint(20, 60)
        wait = chance.choice(("barrier", "broadcast", "gradients"))
        after = chance.randint(20, 40)
        return Plan(
            script="benchmarks/campaign/odd_job.py",
            flags=("--max-restarts", "2"),
            arguments=(
                *("--what", what, "--rank", str(rank), "--step", str(step), "--seconds", str(SECONDS[what])),
                *("--wait", wait, "--steps", str(step + 1 + after), "--lives", "{folder}/lives-{rank}"),
            ),
            stop=(rank, step, SECONDS[what]) if what == "stop" else None,
            truth={"what": what, "rank": rank, "step": step, "wait": wait},
            nproc=nproc,
        )

    return plan


def judge_odd(plan: Plan, outcome: Outcome) -> Verdict:
    """Each rank has begun once and come to its end, and the job's exit code is 0."""
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
    blamed = sum(bool(incident["culprits"]) for incident in outcome.incidents)
    return Verdict(why, {"ended": ended, "incidents": len(outcome.incidents), "blamed": blamed})
