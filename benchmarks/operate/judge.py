"""What a seed has to show, by what was seen of the job and of Slurm; the plan only says what to expect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.operate.plans import Plan

MOST_AGAIN_S = 3.0
MOST_REASON_S = 2.0

Losses = dict[tuple[int, int], set[str]]  # of a rank and step, all that it ever had


@dataclass(slots=True)
class Seen:
    """What was found when the job was over."""

    slurm_exit: str  # "CODE:SIGNAL"
    ends: list[dict[str, Any]]  # each end.json, the oldest first
    starts_again: int  # Slurm's Restarts=
    excluded: str  # ExcNodeList
    reasons: dict[str, str]  # of sinfo -R, without what Slurm itself says of nodes that do not answer
    named_node: str  # that an incident names as lost or slow
    reason_s: float | None  # from its verdict, of a slow node the proof of it, to the reason at Slurm
    proven_s: float | None  # from the line about a slow node's replacement to the proof that it was the node
    replaced: bool
    again_s: float | None  # from the line about the replacement to the first new step
    queued_on: list[str]  # nodes on which the queued jobs ran
    losses: Losses
    reference: Losses


def faults(plan: Plan, node: str, seen: Seen) -> list[str]:
    """Why a seed failed, nothing where it passed. ``node``: the one that was hurt."""
    last = seen.ends[-1] if seen.ends else {}
    wrong: list[str] = []

    def want(holds: bool, why: str) -> None:
        if not holds:
            wrong.append(why)

    code = last.get("exit_code")
    want(seen.slurm_exit == f"{code}:0", f"Slurm reports {seen.slurm_exit}, end.json {code}")
    category = "training" if plan.fault == "python-error" else "finished"
    want(last.get("category") == category, f"ended as {last.get('category')}, not {category}")
    if plan.fault == "python-error":
        want(code == 1, f"exit code {code} of a Python error")
    want(seen.starts_again == int(plan.is_requeued), f"Slurm started the job again {seen.starts_again} times")
    if plan.is_requeued:
        first = seen.ends[0].get("exit_code") if len(seen.ends) > 1 else None
        want(first == 75, f"the first end has {first}, not 75")
        want(seen.excluded == node, f"the job keeps off {seen.excluded}, not {node}")
    drained = {node} if plan.is_drained else set[str]()
    want(set(seen.reasons) == drained, f"drained: {sorted(seen.reasons)}, expected {sorted(drained)}")
    if plan.fault in ("node-lost", "slow-node"):
        want(seen.named_node == node, f"the incident names {seen.named_node or 'no node'}, not {node}")
    if plan.fault == "node-lost" or plan.is_replaced:
        late = seen.reason_s is None or seen.reason_s > MOST_REASON_S
        want(not late, f"reason {seen.reason_s} s after the verdict")
    if drained:
        want(len(seen.queued_on) == 20, f"{len(seen.queued_on)} of 20 queued jobs ran")
        want(node not in seen.queued_on, f"queued jobs ran on {node}")
    if plan.is_replaced:
        want(seen.replaced, "no replacement was told")
        want(
            seen.again_s is not None and seen.again_s <= MOST_AGAIN_S,
            f"first step {seen.again_s} s after the replacement was told",
        )
    if plan.fault != "python-error":
        last_step = max((step for _, step in seen.losses), default=0)
        every = {place for place in seen.reference if place[1] <= last_step}
        want(seen.losses.keys() == every and last_step > 9, "not every rank made every step")
    other = [place for place, got in seen.losses.items() if got != seen.reference.get(place)]
    want(not other, f"{len(other)} losses differ from those of an undisturbed training")
    return wrong
