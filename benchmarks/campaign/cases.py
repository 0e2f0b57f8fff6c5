"""The cases of the fault campaigns: what each seed injects, and how what keepstep wrote is judged against it.

The compute of the example training is emulated (20 ms a layer forward, 40 ms backward) so that four ranks run steadily
on two cores; processes, sockets, collectives, gradients, faults, agents and controller are real.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.campaign.blame import BLAME
from benchmarks.campaign.case import (
    DP2_PP2,
    HOSTS,
    RANKS,
    WARM_UP_STEPS,
    Case,
    Verdict,
    culprit_links,
    culprit_ranks,
    drawn,
    left_over,
)
from benchmarks.campaign.drawn import DRAWN
from benchmarks.campaign.early import EARLY
from benchmarks.campaign.hangs import (
    judge_crash,
    judge_cut,
    judge_hang,
    plan_crash,
    plan_cut,
    plan_hang,
    plan_hang_8,
    plan_kill_8,
)
from benchmarks.campaign.odd import ODD
from benchmarks.campaign.stuck import STUCK
from benchmarks.campaign.trial import Outcome, Plan
from benchmarks.campaign.why_live import WHY

SLOW_STEPS, AFTER_STEPS = 12, 12
DETECTED_WITHIN = 3  # iterations, of onset and of relief


# --- slow ranks -----------------------------------------------------------------------------------------------------


def _plan_slow(case: str, factor: str) -> Callable[[int], Plan]:
    def plan(seed: int) -> Plan:
        chance = drawn(case, seed)
        rank, onset = chance.randrange(RANKS), chance.randint(18, 28)
        relief = onset + SLOW_STEPS
        return Plan(
            arguments=(*DP2_PP2, "--steps", str(relief + AFTER_STEPS), "--seed", str(seed)),
            fault=f"slow rank {rank} by {factor}x at step {onset} for {SLOW_STEPS} steps",
            truth={"rank": rank, "onset": onset, "relief": relief, "factor": float(factor)},
        )

    return plan


def _plan_slow_8(what: str) -> Callable[[int], Plan]:
    """Eight ranks, PP2xDP4 and PP4xDP2 in turn, a layer a stage: a rank, two, or one block of four is slow."""

    def plan(seed: int) -> Plan:
        chance = drawn(f"slow8-{what}", seed)
        pp, dp = (2, 4) if seed % 2 == 0 else (4, 2)
        onset = chance.randint(18, 24)
        relief = onset + SLOW_STEPS
        ranks = sorted(chance.sample(range(8), 2 if what == "two" else 1))
        when = f"at step {onset} for {SLOW_STEPS} steps"
        truth: dict[str, Any] = {"ranks": ranks, "onset": onset, "relief": relief}
        if what == "block":
            truth |= {"stage": chance.choice(("forward", "backward")), "microbatch": chance.randrange(4)}
            seconds = chance.choice((0.25, 0.35, 0.5))  # more than any bubble of these steps absorbs
            faults = [
                f"delay rank {ranks[0]} by {seconds} s in {truth['stage']} {truth['microbatch']} {when}"
            ]
        else:
            faults = [f"slow rank {rank} by 2x {when}" for rank in ranks]
            truth["stage"] = "forward and backward"
        layout = ("--pp", str(pp), "--dp", str(dp), "--layers", str(pp), "--emulate-compute-ms", "20")
        return Plan(
            arguments=(*layout, "--steps", str(relief + AFTER_STEPS), "--seed", str(seed)),
            fault="; ".join(faults),
            truth=truth,
            nproc=8,
        )

    return plan


def last_step_ended_by(outcome: Outcome, unix_s: float) -> int | None:
    """The newest step that all ranks had finished at that time, by keepstep's own record of them."""
    ended = [step for step, end in outcome.ends.items() if end <= unix_s]
    return max(ended, default=None)


def _within(name: str, found: int | None, true: int, why: list[str]) -> int | None:
    if found is None:
        why.append(f"{name}: not detected")
        return None
    late = found - true
    if not 0 <= late <= DETECTED_WITHIN:
        why.append(f"{name}: seen at step {found}, true {true}")
    return late


def judge_slow(plan: Plan, outcome: Outcome) -> Verdict:
    """One slow incident, the right ranks alone, onset and relief each detected within 3 iterations, nothing else."""
    truth, why = plan.truth, _job_went_well(outcome)
    ranks = sorted(truth.get("ranks", [truth.get("rank")]))
    slow = [
        incident
        for incident in outcome.incidents
        if incident["kind"] == "slow" and sorted(culprit_ranks(incident)) == ranks
    ]
    measured: dict[str, Any] = {"false_alarms": len(outcome.incidents) - min(1, len(slow))}
    if measured["false_alarms"]:
        why.append(f"{measured['false_alarms']} incidents too many")
    if not slow:
        why.append(f"ranks {ranks} not named")
        return Verdict(why, measured)
    incident = slow[0]
    measured["stage"] = [culprit.get("stage") for culprit in incident["culprits"]]
    if "stage" in truth and measured["stage"] != [truth["stage"]] * len(ranks):
        why.append(f"stage {measured['stage']}, true {truth['stage']}")
    if "microbatch" in truth:
        measured["detail"] = incident["culprits"][0].get("detail", "")
        if f"of micro-batch {truth['microbatch']}:" not in measured["detail"]:
            why.append(f"micro-batch {truth['microbatch']} not told: {measured['detail']}")
    measured["onset_late"] = _within("onset", incident["detected_step"], truth["onset"], why)
    closed = incident.get("closed_unix_s")
    seen = None if closed is None or incident["relief_step"] is None else last_step_ended_by(outcome, closed)
    measured["relief_late"] = _within("relief", seen, truth["relief"], why)
    measured |= {
        "onset_error": _difference(incident["onset_step"], truth["onset"]),
        "relief_error": _difference(incident["relief_step"], truth["relief"]),
        "job_slowdown": incident["job_slowdown"],
        "rank_slowdown": incident["culprits"][0].get("slowdown"),
        "confidence": incident["culprits"][0].get("confidence"),
    }
    return Verdict(why, measured)


def _difference(found: int | None, true: int) -> int | None:
    return None if found is None else found - true


def _job_went_well(outcome: Outcome) -> list[str]:
    why: list[str] = []
    if outcome.timed_out:
        why.append("the job did not end in time")
    elif outcome.exit_code:
        why.append(f"the job ended with {outcome.exit_code}")
    return why + left_over(outcome)


# --- healthy runs and pauses ----------------------------------------------------------------------------------------


def _plan_healthy(seed: int) -> Plan:
    return Plan(arguments=(*DP2_PP2, "--steps", "100", "--seed", str(seed)))


def judge_healthy(plan: Plan, outcome: Outcome) -> Verdict:
    """No incident at all."""
    why = _job_went_well(outcome)
    if outcome.incidents:
        kinds = ", ".join(str(incident["kind"]) for incident in outcome.incidents)
        why.append(f"false alarms: {kinds}")
    steps = [len(series) for series in outcome.watched.values()]
    if len(steps) < RANKS or min(steps) < 0.95 * len(outcome.script.get(0, ())):
        why.append(f"not watched all the way: {steps} iterations of {len(outcome.script.get(0, ()))}")
    return Verdict(why, {"false_alarms": len(outcome.incidents)})


def _plan_pauses(seed: int) -> Plan:
    pauses = (
        "--eval-every",
        "20",
        "--eval-batches",
        "4",
        "--checkpoint-every",
        "25",
        "--checkpoint-seconds",
        "5",
    )
    kind = ("--checkpoint-format", ("torch", "dcp")[seed % 2])
    arguments = (*DP2_PP2, "--steps", "70", "--first-step-seconds", "60", *pauses, *kind, "--seed", str(seed))
    return Plan(arguments=arguments, timeout_s=240)


# --- slow links -----------------------------------------------------------------------------------------------------


def _plan_link(seed: int) -> Plan:
    chance = drawn("slow-link", seed)
    pipeline = seed % 2 == 0
    first = chance.randrange(3)
    pair = (HOSTS[first], HOSTS[first + 1])
    onset = chance.randint(18, 24)
    layout = ("--pp", "4", "--dp", "2") if pipeline else ("--dp", "8")
    sizes = ("--layers", "4", "--dim", "128", "--seq", "128", "--emulate-compute-ms", "20")
    return Plan(
        arguments=(*layout, *sizes, "--steps", str(onset + 24), "--seed", str(seed)),
        truth={"hosts": sorted(pair), "onset": onset, "relief": onset + 12, "healthy_rate": "200mbit"},
        nproc=2,
        slow_link=(*pair, "20mbit"),
        timeout_s=240,
    )


def judge_link(plan: Plan, outcome: Outcome) -> Verdict:
    """A slow link between the two hosts, both named, and no slow rank."""
    why = _job_went_well(outcome)
    truth = plan.truth
    named = [links for incident in outcome.incidents if (links := culprit_links(incident))]
    right = [links for links in named if links == [set(truth["hosts"])]]
    measured: dict[str, Any] = {
        "false_alarms": len(outcome.incidents) - min(1, len(right)),
        "layout": "pp4 x dp2" if "--pp" in plan.arguments else "dp8",
        "ranks_named": sorted({rank for incident in outcome.incidents for rank in culprit_ranks(incident)}),
        "links_named": [sorted(link) for links in named for link in links],
    }
    if not right:
        why.append(f"link {truth['hosts']} not named")
    else:
        incident = next(one for one in outcome.incidents if culprit_links(one) == [set(truth["hosts"])])
        measured["onset_late"] = _difference(
            incident["detected_step"], outcome.notes.get("onset", truth["onset"])
        )
        measured["job_slowdown"] = incident["job_slowdown"]
    if measured["false_alarms"]:
        why.append(f"{measured['false_alarms']} incidents too many")
    return Verdict(why, measured)


# --- iteration times ------------------------------------------------------------------------------------------------

_LAYOUTS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("DDP", 4, ("--dp", "4")),
    ("FSDP2", 4, ("--dp", "4", "--dp-kind", "fsdp")),
    ("PP", 4, ("--dp", "1", "--pp", "4")),
    ("TP x PP x DP", 8, ("--tp", "2", "--pp", "2", "--dp", "2")),
    ("gradient accumulation", 4, ("--dp", "4", "--accumulate", "3")),
    ("evaluation every 5 steps", 4, ("--dp", "2", "--pp", "2", "--eval-every", "5")),
)
ITERATION_TIME_WITHIN = 0.005


def _plan_iteration_time(seed: int) -> Plan:
    name, nproc, layout = _LAYOUTS[seed % len(_LAYOUTS)]
    arguments = (*layout, "--layers", "4", "--emulate-compute-ms", "20", "--steps", "60", "--seed", str(seed))
    return Plan(arguments=arguments, nproc=nproc, truth={"layout": name}, timeout_s=200)


def judge_iteration_time(plan: Plan, outcome: Outcome) -> Verdict:
    """Mean iteration time after the warm-up within 0.5 % of the script's own clock, on every rank.

    An iteration ends with the optimizer, the script's step a little later, so that what comes after the optimizer is
    in the next iteration; after the last step there is none, which is therefore left out on both sides.
    """
    why = _job_went_well(outcome)
    errors: dict[int, float] = {}
    single: list[float] = []
    for rank, own in outcome.script.items():
        ours = outcome.watched.get(rank, {})
        steps = [step for step in range(WARM_UP_STEPS, len(own) - 1) if step in ours]
        if len(steps) < 0.9 * (len(own) - WARM_UP_STEPS):
            why.append(f"rank {rank}: {len(steps)} of {len(own) - WARM_UP_STEPS} iterations")
            continue
        errors[rank] = sum(ours[step] for step in steps) / sum(own[step] for step in steps) - 1
        single += [abs(ours[step] / own[step] - 1) for step in steps]
    if len(errors) < plan.nproc:
        return Verdict([*why, "ranks missing"], {"layout": plan.truth["layout"]})
    worst = max(errors.values(), key=abs)
    if abs(worst) > ITERATION_TIME_WITHIN:
        why.append(f"iteration time off by {worst:+.2%}")
    measured = {
        "layout": plan.truth["layout"],
        "worst_rank_error": round(worst, 5),
        "median_step_error": round(statistics.median(single), 5),
        "p95_step_error": round(statistics.quantiles(single, n=20)[-1], 5),
        "false_alarms": len(outcome.incidents),
    }
    return Verdict(why, measured)


# --- our own processes die ------------------------------------------------------------------------------------------


def _plan_killed(program: str) -> Callable[[int], Plan]:
    def plan(seed: int) -> Plan:
        slow = _plan_slow(f"{program}-killed", "2")(seed)
        onset = int(slow.truth["onset"]) + 15  # time for the successor to learn what is usual
        relief = onset + SLOW_STEPS
        return Plan(
            arguments=(*DP2_PP2, "--steps", str(relief + AFTER_STEPS), "--seed", str(seed)),
            fault=f"slow rank {slow.truth['rank']} by 2x at step {onset} for {SLOW_STEPS} steps",
            truth={**slow.truth, "onset": onset, "relief": relief, "kill_step": 12},
            kill=program,
        )

    return plan


def judge_killed(plan: Plan, outcome: Outcome) -> Verdict:
    """Training goes on, a successor appears, and the slow rank that follows is judged as ever."""
    verdict = judge_slow(plan, outcome)
    why = list(verdict.why)
    if not outcome.notes.get("killed"):
        why.append(f"no {plan.kill} was found to kill")
    if not outcome.notes.get("successor"):
        why.append(f"no new {plan.kill} appeared")
    return Verdict(why, {**verdict.measured, "successor": bool(outcome.notes.get("successor"))})


_SLOW_GOAL = "detection within 3 iterations of onset and of relief, right rank in 20 of 20 seeds"
_SLOW_SHOWN = ("onset_late", "relief_late", "false_alarms")

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("slow-1.3x", 20, _SLOW_GOAL, _plan_slow("slow-1.3x", "1.3"), judge_slow, _SLOW_SHOWN),
        Case("slow-2x", 20, _SLOW_GOAL, _plan_slow("slow-2x", "2"), judge_slow, _SLOW_SHOWN),
        Case("slow-4x", 20, _SLOW_GOAL, _plan_slow("slow-4x", "4"), judge_slow, _SLOW_SHOWN),
        Case(
            "healthy",
            10,
            "0 false alarms in 10 healthy runs of 100 steps",
            _plan_healthy,
            judge_healthy,
            ("false_alarms",),
        ),
        Case(
            "hang-backward",
            10,
            "a rank asleep in backward reported as a hang within the budget",
            plan_hang,
            judge_hang,
            ("seconds_to_verdict", "false_alarms"),
        ),
        *(
            Case(
                f"hang8-{place}",
                10,
                "named with rank and stage, hangs within the budget, in 10 of 10 seeds (TP2xPP2xDP2)",
                plan_hang_8(place),
                judge_hang,
                ("seconds_to_verdict", "false_alarms"),
            )
            for place in ("forward", "backward", "optimizer", "data", "stop", "skip")
        ),
        Case(
            "hang8-allreduce",
            10,
            "the two hosts and the transfer named within the budget, no rank accused, in 10 of 10 seeds (DP8 on four"
            " hosts with their own clocks, one of them the controller's)",
            plan_cut,
            judge_cut,
            ("seconds_to_verdict", "seconds_to_name", "false_alarms"),
        ),
        Case(
            "kill8",
            10,
            "named with rank, dead process: <= 0.5 s, in 10 of 10 seeds (TP2xPP2xDP2)",
            plan_kill_8,
            judge_crash,
            ("seconds_to_verdict",),
        ),
        *(
            Case(
                f"slow8-{what}",
                10,
                "named with rank and stage in 10 of 10 seeds (PP2xDP4 and PP4xDP2, no layout declared)",
                _plan_slow_8(what),
                judge_slow,
                _SLOW_SHOWN,
            )
            for what in ("rank", "two", "block")
        ),
        Case(
            "pauses",
            4,
            "no hang reported for evaluation every 20 steps, a 5 s checkpoint and a 60 s first step",
            _plan_pauses,
            judge_healthy,
            ("false_alarms",),
        ),
        *EARLY,
        ODD,
        STUCK,
        BLAME,
        *WHY,
        *DRAWN,
        Case("crash", 10, "dead process: <= 0.5 s", plan_crash, judge_crash, ("seconds_to_verdict",)),
        Case(
            "slow-link",
            10,
            "one pair throttled to a tenth: a slow link with the two nodes named, not a slow rank,"
            " with host clocks hours apart",
            _plan_link,
            judge_link,
            ("onset_late", "false_alarms"),
        ),
        Case(
            "iteration-time",
            len(_LAYOUTS),
            "iteration time within 0.5 % of the script's own clock",
            _plan_iteration_time,
            judge_iteration_time,
            ("worst_rank_error", "p95_step_error"),
        ),
        Case(
            "agent-killed",
            5,
            "training goes on, a new agent attaches and resumes",
            _plan_killed("agent"),
            judge_killed,
            _SLOW_SHOWN,
        ),
        Case(
            "controller-killed",
            5,
            "training goes on, a new one rebuilds its state",
            _plan_killed("control"),
            judge_killed,
            _SLOW_SHOWN,
        ),
    )
}
