"""What a seed in Kubernetes has to show, by what was seen of the job and of the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.operate.judge import Losses
from benchmarks.operate.kube_plans import KubePlan

MOST_CONDITION_S = 2.0
MOST_LEFT_S = 2.0
OTHERS = 20


@dataclass(slots=True)
class Seen:
    """What was found when the job was over."""

    phase: str  # of the TrainingJob
    reason: str
    conditions: dict[str, list[str]]  # the operator's, by node
    taints: dict[str, list[str]]
    named: str  # the node that an incident names
    condition_s: (
        float | None
    )  # from the verdict to the condition; of a lost node, from when the cluster takes it for lost; of a
    # slow one, from when the job was measured to be faster with a spare in its place
    left_s: float | None  # from the taint until the job's own pod has ended there, or is told to
    bystander_left: bool  # whether a pod of somebody else there was told to end
    replaced_on: list[str]  # nodes of pods with the victim's index that were made after the fault
    others_on: list[str]  # nodes of pods of others that were made after the taint
    steps_away: int | None  # steps that the training made while the API server was away
    exit_codes: list[int]  # of pods that are still there
    said: list[str]  # what the operator printed
    losses: Losses
    reference: Losses


def faults(plan: KubePlan, node: str, seen: Seen) -> list[str]:
    """Why a seed failed, nothing where it passed. ``node``: the one that was hurt."""
    wrong: list[str] = []

    def want(holds: bool, why: str) -> None:
        if not holds:
            wrong.append(why)

    want(seen.phase == "Succeeded", f"the job is {seen.phase or 'not begun'} ({seen.reason})")
    expected = {node: [plan.condition]} if plan.condition else dict[str, list[str]]()
    want(seen.conditions == expected, f"conditions {seen.conditions}, expected {expected}")
    tainted = {node: [plan.taint]} if plan.taint else dict[str, list[str]]()
    want(seen.taints == tainted, f"taints {seen.taints}, expected {tainted}")
    if plan.condition:
        want(seen.named == node, f"the incident names {seen.named or 'no node'}, not {node}")
        # After a minute without an API server Kubernetes' own programs come back to it seconds later.
        late = seen.condition_s is None or seen.condition_s > MOST_CONDITION_S
        want(not late or plan.api_away, f"condition {seen.condition_s} s after the verdict")
        late = seen.left_s is None or seen.left_s > MOST_LEFT_S
        want(not late or plan.api_away, f"the job's pod left {seen.left_s} s after the taint")
        want(bool(seen.replaced_on), "the victim's pod was not made again")
        want(node not in seen.replaced_on, f"the victim's pod was made again on {node}")
        want(len(seen.others_on) == OTHERS, f"{len(seen.others_on)} of {OTHERS} other pods got a node")
        want(node not in seen.others_on, f"other pods came to {node}")
    want(not seen.bystander_left, "a healthy pod of somebody else was told to end")
    if plan.api_away:
        want(bool(seen.steps_away), "the training stood still while the API server was away")
    last_step = max((step for _, step in seen.losses), default=0)
    every = {place for place in seen.reference if place[1] <= last_step}
    want(seen.losses.keys() == every and last_step > 9, "not every rank made every step")
    other = [place for place, got in seen.losses.items() if got != seen.reference.get(place)]
    first = sorted(other)[:3]
    told = ", ".join(f"rank {rank} step {step}: {sorted(seen.losses[rank, step])}" for rank, step in first)
    want(not other, f"{len(other)} losses differ from those of an undisturbed training: {told}")
    return wrong


def summary(rows: list[dict[str, Any]]) -> str:
    """What the lines of all seeds come to."""
    lines: list[str] = []
    for kind in sorted({row["plan"]["fault"] for row in rows}):
        own = [row for row in rows if row["plan"]["fault"] == kind]
        lines.append(f"{kind}: {sum(row['passed'] for row in own)} of {len(own)} passed")
    for name in ("condition_s", "left_s"):
        for away in (False, True):
            found = [row["found"][name] for row in rows if row["plan"]["api_away"] == away]
            values = sorted(one for one in found if one is not None)
            if values:
                where = f"{name}{', API server away' if away else ''}"
                middle = values[len(values) // 2]
                lines.append(f"{where}: {len(values)} seeds, median {middle}, worst {values[-1]}")
    lines += [f"seed {row['seed']} failed: {'; '.join(row['why'])}" for row in rows if not row["passed"]]
    return "\n".join([*lines, f"{sum(row['passed'] for row in rows)} of {len(rows)} seeds passed"])
