"""Ranks that are slow from the first steps on, and jobs whose first steps are as uneven as healthy ones are."""

from __future__ import annotations

from typing import Any

from benchmarks.campaign.case import Case, Verdict, culprit_ranks, drawn, left_over
from benchmarks.campaign.trial import Outcome, Plan

_SIXTH = 5  # the number of the sixth step
_WITHIN = 5  # iterations after it, or after the onset if that is later
_LAYOUTS = ((4, 1), (2, 1), (8, 1), (2, 2), (2, 4), (4, 2))  # replicas, pipeline stages


def _layout(dp: int, pp: int) -> tuple[str, ...]:
    shape = ("--dp", str(dp), "--pp", str(pp), "--layers", str(max(pp, 2)))
    return (*shape, "--emulate-compute-ms", "40" if dp * pp == 8 else "20")


def plan_early(seed: int) -> Plan:
    chance = drawn("slow-early", seed)
    dp, pp = chance.choice(_LAYOUTS)
    rank, onset, factor = chance.randrange(dp * pp), chance.randint(0, 14), chance.choice((2, 2.5, 4))
    return Plan(
        arguments=(*_layout(dp, pp), "--steps", str(onset + 22), "--seed", str(seed)),
        fault=f"slow rank {rank} by {factor}x at step {onset} for 1000 steps",
        truth={"rank": rank, "onset": onset},
        nproc=dp * pp,
    )


def judge_early(plan: Plan, outcome: Outcome) -> Verdict:
    """The rank alone is named, in time, and no incident names another."""
    why, rank, onset = left_over(outcome), plan.truth["rank"], plan.truth["onset"]
    if outcome.exit_code or outcome.timed_out:
        why.append(f"the job ended with {outcome.exit_code}")
    named = {one for incident in outcome.incidents for one in culprit_ranks(incident)}
    right = [incident for incident in outcome.incidents if culprit_ranks(incident) == [rank]]
    measured: dict[str, Any] = {"kind": f"{plan.nproc} ranks", "others_named": len(named - {rank})}
    if named - {rank}:
        why.append(f"ranks {sorted(named - {rank})} named, true {rank}")
    if not right:
        return Verdict([*why, f"rank {rank} not named"], measured)
    late = right[0]["detected_step"] - max(onset, _SIXTH)
    measured |= {"late": late, "onset_error": right[0]["onset_step"] - onset}
    measured["confidence"] = right[0]["culprits"][0]["confidence"]
    if late > _WITHIN:
        why.append(f"named {late} iterations after step {max(onset, _SIXTH)}")
    return Verdict(why, measured)


def plan_healthy_early(seed: int) -> Plan:
    chance = drawn("healthy-early", seed)
    dp, pp = chance.choice(_LAYOUTS)
    arguments = [*_layout(dp, pp), "--steps", "40", "--seed", str(seed)]
    if chance.random() < 0.5:
        arguments += ["--first-step-seconds", str(chance.choice((2, 5, 10)))]
    if chance.random() < 0.5:
        every = str(chance.choice((3, 5, 8)))
        arguments += ["--checkpoint-every", every, "--checkpoint-seconds", "1"]
    if chance.random() < 0.5:
        arguments += ["--eval-every", str(chance.choice((4, 7, 10))), "--eval-batches", "2"]
    return Plan(arguments=tuple(arguments), nproc=dp * pp, timeout_s=240)


def judge_healthy_early(plan: Plan, outcome: Outcome) -> Verdict:
    """Nobody is named."""
    why = left_over(outcome)
    if outcome.exit_code or outcome.timed_out:
        why.append(f"the job ended with {outcome.exit_code}")
    named = [one for incident in outcome.incidents for one in culprit_ranks(incident)]
    if named:
        why.append(f"ranks {named} named")
    return Verdict(why, {"kind": f"{plan.nproc} ranks", "accused": len(named)})


EARLY = (
    Case(
        "slow-early",
        30,
        "slow from steps 0 to 14: named at most 5 iterations after the sixth step or the onset (Gloo)",
        plan_early,
        judge_early,
        ("late", "onset_error"),
        zero=("others_named",),
    ),
    Case(
        "healthy-early",
        20,
        "0 accused in 20 healthy jobs with long first steps, evaluations and checkpoints (Gloo)",
        plan_healthy_early,
        judge_healthy_early,
        zero=("accused",),
    ),
)
