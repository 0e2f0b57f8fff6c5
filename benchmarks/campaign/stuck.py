"""True hangs are ended: the right process, after the patience that holds for it, never before."""

from __future__ import annotations

from typing import Any

from benchmarks.campaign.case import Case, Verdict, culprit_ranks, left_over
from benchmarks.campaign.stuck_draw import NAME, PATIENCE_S, draw
from benchmarks.campaign.trial import Outcome, Plan

# Most seconds beyond the patience. It begins with the verdict, which comes after 30 s where a rank has shown pauses and
# after 60 s at the set-up; on a busy machine a proof takes longer. What it took is among the figures.
LATE_S = 120.0
_TOGETHER_S = 0.5  # deaths nearer to each other than this have no order: lives are looked at in turn
_END_HUNG = "end the hung process"  # name of the action


def plan_stuck(seed: int) -> Plan:
    stuck = draw(seed)
    return Plan(
        script="benchmarks/campaign/stuck_job.py",
        flags=("--max-restarts", "1", "--on-hang", "restart", "--hang-patience", f"{PATIENCE_S:g}"),
        arguments=("--seed", str(seed), "--notes", "{folder}"),
        truth={"kind": stuck.kind, "rank": stuck.rank, "step": stuck.step, "patience_s": stuck.patience_s},
        nproc=stuck.nproc,
        timeout_s=stuck.patience_s + 300,
    )


def judge_stuck(plan: Plan, outcome: Outcome) -> Verdict:
    """The process that is stuck was gone first, in time, and the job went on or ended."""
    why = left_over(outcome)
    measured: dict[str, Any] = {"kind": plan.truth["kind"], "went_on": outcome.exit_code == 0}
    if outcome.timed_out:
        why.append("the job neither went on nor ended")
    if not outcome.truths:
        return Verdict([*why, "nobody got stuck"], measured)
    told = outcome.truths[0]
    gone: dict[int, float] = outcome.notes.get("gone", {})
    ended = _first_gone(outcome, gone, told["rank"])
    measured["ended_after_s"] = None if ended is None else round(ended - told["unix_s"], 1)
    hangs = [incident for incident in outcome.incidents if incident["kind"] in ("hang", "desync")]
    measured["named"] = culprit_ranks(hangs[0]) if hangs else []
    measured["seconds_to_verdict"] = round(hangs[0]["detected_unix_s"] - told["unix_s"], 1) if hangs else None
    if ended is None:
        why.append(f"the process of rank {told['rank']} was not ended")
        return Verdict(why, measured)
    why += _wrongly_gone(outcome, gone, told["rank"], ended)
    patience_s = plan.truth["patience_s"]
    if measured["ended_after_s"] < patience_s:
        why.append(f"ended after {measured['ended_after_s']} s, before the patience of {patience_s:g} s")
    elif measured["ended_after_s"] > patience_s + LATE_S:
        why.append(f"ended after {measured['ended_after_s']} s, patience {patience_s:g} s")
    return Verdict(why, measured)


def _pid_of(lives: list[str]) -> int | None:
    """The process of a rank in the first incarnation."""
    began = [line for line in lives if line.startswith("began")]
    return int(began[0].split()[1]) if began else None


def _first_gone(outcome: Outcome, gone: dict[int, float], rank: int) -> float | None:
    pid = _pid_of(outcome.lives.get(rank, []))
    return None if pid is None else gone.get(pid)


def _wrongly_gone(outcome: Outcome, gone: dict[int, float], rank: int, ended: float) -> list[str]:
    """Ranks whose process was gone before that which was stuck, and before keepstep ordered the end of that one.

    A process that is killed closes its connections before it is gone, on a busy machine seconds before.
    """
    orders: list[float] = [
        action["begun_unix_s"]
        for incident in outcome.incidents
        for action in incident.get("actions", ())
        if action["name"] == _END_HUNG and action["detail"].startswith(f"rank {rank},")
    ]
    first = min([ended - _TOGETHER_S, *orders])
    times: dict[int, Any] = {
        other: _first_gone(outcome, gone, other) for other in outcome.lives if other != rank
    }
    return [
        f"the process of rank {other} was gone {ended - at:.1f} s before"
        for other, at in sorted(times.items())
        if at is not None and at < first
    ]


STUCK = Case(
    NAME,
    40,
    "all ended, after the patience that the docs state (20 s; spinning ten times that; stopped 60 s), never before",
    plan_stuck,
    judge_stuck,
    ("ended_after_s", "seconds_to_verdict"),
)
