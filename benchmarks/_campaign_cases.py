"""The cases of the fault campaigns: what each seed injects, and how what keepstep wrote is judged against it.

The compute of the example training is emulated (20 ms a layer forward, 40 ms backward) so that four ranks run steadily
on two cores; processes, sockets, collectives, gradients, faults, agents and controller are real.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks._campaign_trial import Outcome, Plan

RANKS = 4
DP2_PP2 = ("--dp", "2", "--pp", "2", "--layers", "2", "--emulate-compute-ms", "20")
SLOW_STEPS, AFTER_STEPS = 12, 12
DETECTED_WITHIN = 3  # iterations, of onset and of relief
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Verdict:
    """How one seed ended. ``why`` is empty exactly when it passed."""

    why: list[str]
    measured: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A kind of trial. ``goal`` is the issue's wording."""

    name: str
    seeds: int
    goal: str
    plan: Callable[[int], Plan]
    judge: Callable[[Plan, Outcome], Verdict]
    shown: tuple[str, ...] = ()  # figures of ``measured`` to summarise


def _random(case: str, seed: int) -> random.Random:
    return random.Random(f"{case}:{seed}")


# --- slow ranks -----------------------------------------------------------------------------------------------------


def _plan_slow(case: str, factor: str) -> Callable[[int], Plan]:
    def plan(seed: int) -> Plan:
        chance = _random(case, seed)
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
        chance = _random(f"slow8-{what}", seed)
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


def _culprit_ranks(incident: Mapping[str, Any]) -> list[int]:
    return [culprit["rank"] for culprit in incident["culprits"] if culprit.get("rank") is not None]


def _culprit_links(incident: Mapping[str, Any]) -> list[set[str]]:
    return [set(culprit["link"]["nodes"]) for culprit in incident["culprits"] if culprit.get("link")]


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
        if incident["kind"] == "slow" and sorted(_culprit_ranks(incident)) == ranks
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
    return why + _left_over(outcome)


def _left_over(outcome: Outcome) -> list[str]:
    return [f"left running: {line}" for line in outcome.left_over]


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


# --- hangs and crashes ----------------------------------------------------------------------------------------------


def _plan_hang(seed: int) -> Plan:
    chance = _random("hang-backward", seed)
    rank, step = chance.randrange(RANKS), chance.randint(20, 35)
    return Plan(
        arguments=(*DP2_PP2, "--steps", "200", "--seed", str(seed)),
        fault=f"hang rank {rank} at step {step} in backward",
        truth={"rank": rank, "step": step},
        end_on="hang",
        timeout_s=90,
    )


TP2_PP2_DP2 = ("--tp", "2", "--pp", "2", "--dp", "2", "--layers", "2", "--microbatches", "2", "--batch", "4")


def _plan_hang_8(place: str) -> Callable[[int], Plan]:
    """Eight ranks with tensor parallelism, whose pace is the CPU's: only the name and the stage are judged by it."""

    def plan(seed: int) -> Plan:
        chance = _random(f"hang8-{place}", seed)
        rank, step = chance.randrange(8), chance.randint(12, 20)
        fault = {
            "stop": f"stop rank {rank} at step {step}",
            "skip": f"skip in rank {rank} at step {step}",
        }.get(place, f"hang rank {rank} at step {step} in {place}")
        stage = {} if place in ("stop", "skip") else {"stage": place}
        return Plan(
            arguments=(*TP2_PP2_DP2, "--steps", "200", "--seed", str(seed)),
            fault=fault,
            truth={"rank": rank, "step": step, **stage},
            nproc=8,
            end_on="desync" if place == "skip" else "hang",
            timeout_s=120,
        )

    return plan


def judge_hang(plan: Plan, outcome: Outcome) -> Verdict:
    """A hang of the right rank, at most 1 s after twice the longest gap usual.

    The longest gap is taken to be the longest step after the warm-up: what a phase's own longest gap can be at most.
    """
    truth, why = plan.truth, _left_over(outcome)
    measured: dict[str, Any] = {"false_alarms": max(0, len(outcome.incidents) - 1)}
    if outcome.timed_out:
        why.append("no hang reported in time")
    if measured["false_alarms"]:
        why.append(f"{measured['false_alarms']} incidents too many")
    hangs = [incident for incident in outcome.incidents if incident["kind"] == plan.end_on]
    if not hangs:
        return Verdict([*why, "no hang reported"], measured)
    if _culprit_ranks(hangs[0]) != [truth["rank"]]:
        why.append(f"named {_culprit_ranks(hangs[0])}, true {truth['rank']}")
    measured["stage"] = [culprit.get("stage") for culprit in hangs[0]["culprits"]]
    told = str(measured["stage"][0]) if measured["stage"] else ""
    if truth.get("stage", "") not in told:
        why.append(f"stage {told or 'not told'}, true {truth['stage']}")
    struck = [line["unix_s"] for line in outcome.faults if line["did"].startswith(("hang", "stop", "skip"))]
    _judge_hang_time(outcome, hangs[0], struck[0] if struck else None, measured, why)
    return Verdict(why, measured)


def _judge_hang_time(
    outcome: Outcome,
    hang: Mapping[str, Any],
    struck_unix_s: float | None,
    measured: dict[str, Any],
    why: list[str],
) -> None:
    longest_s = max(outcome.script[0][WARM_UP_STEPS:], default=0.0)
    measured["budget_s"] = round(2 * longest_s + 1, 3)
    late_s = None if struck_unix_s is None else round(hang["detected_unix_s"] - struck_unix_s, 3)
    measured["seconds_to_verdict"] = late_s
    if late_s is None or late_s > measured["budget_s"]:
        why.append(f"verdict after {late_s} s, budget {measured['budget_s']} s")


def _plan_crash(seed: int) -> Plan:
    chance = _random("crash", seed)
    rank, step = chance.randrange(RANKS), chance.randint(10, 20)
    kill = seed % 2 == 0
    return Plan(
        arguments=(*DP2_PP2, "--steps", "60", "--seed", str(seed)),
        fault=f"kill rank {rank} at step {step}" if kill else f"raise in rank {rank} at step {step}",
        truth={"rank": rank, "step": step, "exit_code": 128 + 9 if kill else 1},
    )


def _plan_kill_8(seed: int) -> Plan:
    chance = _random("kill8", seed)
    rank, step = chance.randrange(8), chance.randint(12, 20)
    return Plan(
        arguments=(*TP2_PP2_DP2, "--steps", "200", "--seed", str(seed)),
        fault=f"kill rank {rank} at step {step}",
        truth={"rank": rank, "step": step, "exit_code": 128 + 9},
        nproc=8,
        timeout_s=120,
    )


def judge_crash(plan: Plan, outcome: Outcome) -> Verdict:
    """A crash of the right rank, the job's own exit code; a killed process is noticed within 0.5 s."""
    truth, why = plan.truth, _left_over(outcome)
    measured: dict[str, Any] = {"exit_code": outcome.exit_code}
    if outcome.exit_code != truth["exit_code"]:
        why.append(f"exit code {outcome.exit_code}, true {truth['exit_code']}")
    if [incident["kind"] for incident in outcome.incidents] != ["crash"]:
        why.append(f"incidents: {[incident['kind'] for incident in outcome.incidents]}")
        return Verdict(why, measured)
    incident = outcome.incidents[0]
    if _culprit_ranks(incident) != [truth["rank"]]:
        why.append(f"named {_culprit_ranks(incident)}, true {truth['rank']}")
    struck = [line["unix_s"] for line in outcome.faults if line["did"].startswith(("kill", "raise"))]
    measured["seconds_to_verdict"] = round(incident["detected_unix_s"] - struck[0], 3)
    if "kill" in plan.fault and measured["seconds_to_verdict"] > 0.5:
        why.append(f"verdict after {measured['seconds_to_verdict']} s, budget 0.5 s")
    return Verdict(why, measured)


# --- slow links -----------------------------------------------------------------------------------------------------

_HOSTS = ("node-a", "node-b", "node-c", "node-d")


def _plan_link(seed: int) -> Plan:
    chance = _random("slow-link", seed)
    pipeline = seed % 2 == 0
    first = chance.randrange(3)
    pair = (_HOSTS[first], _HOSTS[first + 1])
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
    named = [links for incident in outcome.incidents if (links := _culprit_links(incident))]
    right = [links for links in named if links == [set(truth["hosts"])]]
    measured: dict[str, Any] = {
        "false_alarms": len(outcome.incidents) - min(1, len(right)),
        "layout": "pp4 x dp2" if "--pp" in plan.arguments else "dp8",
        "ranks_named": sorted({rank for incident in outcome.incidents for rank in _culprit_ranks(incident)}),
        "links_named": [sorted(link) for links in named for link in links],
    }
    if not right:
        why.append(f"link {truth['hosts']} not named")
    else:
        incident = next(one for one in outcome.incidents if _culprit_links(one) == [set(truth["hosts"])])
        measured["onset_late"] = _difference(
            incident["detected_step"], outcome.notes.get("onset", truth["onset"])
        )
        measured["job_slowdown"] = incident["job_slowdown"]
    if measured["false_alarms"]:
        why.append(f"{measured['false_alarms']} incidents too many")
    return Verdict(why, measured)


def _plan_cut(case: str, firsts: tuple[int, ...]) -> Callable[[int], Plan]:
    """Data parallelism over four hosts: the path from one of ``firsts`` to the next in the all-reduce's ring is cut."""

    def plan(seed: int) -> Plan:
        chance = _random(case, seed)
        first, onset = chance.choice(firsts), chance.randint(12, 20)
        pair = (_HOSTS[first], _HOSTS[(first + 1) % len(_HOSTS)])
        sizes = ("--layers", "4", "--dim", "128", "--seq", "128", "--emulate-compute-ms", "20")
        return Plan(
            arguments=("--dp", "8", *sizes, "--steps", "200", "--seed", str(seed)),
            truth={"hosts": sorted(pair), "onset": onset, "healthy_rate": "200mbit"},
            nproc=2,
            cut_path=pair,
            end_on="hang",
            end_after_s=10,  # for the probes
            timeout_s=100,
        )

    return plan


def judge_cut(plan: Plan, outcome: Outcome) -> Verdict:
    """A hang of the transfer between the two hosts, in a hang's time; no rank is ever accused of it."""
    truth, why = plan.truth, _left_over(outcome)
    measured: dict[str, Any] = {"false_alarms": max(0, len(outcome.incidents) - 1)}
    if outcome.timed_out:
        why.append("no hang reported in time")
    if measured["false_alarms"]:
        why.append(f"{measured['false_alarms']} incidents too many")
    hangs = [incident for incident in outcome.incidents if incident["kind"] == "hang"]
    if not hangs:
        return Verdict([*why, "no hang reported"], measured)
    accused = outcome.notes.get("accused", [])
    ranks = sorted({rank for one in (*accused, hangs[0]) for rank in _culprit_ranks(one)})
    if ranks:
        why.append(f"ranks {ranks} accused")
    if _culprit_links(hangs[0]) != [set(truth["hosts"])]:
        why.append(f"link {truth['hosts']} not named: {[sorted(link) for link in _culprit_links(hangs[0])]}")
    measured["stage"] = [culprit.get("stage") for culprit in hangs[0]["culprits"]]
    if measured["stage"] != ["transfer"]:
        why.append(f"stage {measured['stage']}, true transfer")
    cut_unix_s = outcome.notes.get("onset_unix_s")
    named = [one["unix_s"] for one in accused if set(truth["hosts"]) in _culprit_links(one)]
    measured["seconds_to_name"] = round(named[0] - cut_unix_s, 3) if named and cut_unix_s else None
    _judge_hang_time(outcome, hangs[0], cut_unix_s, measured, why)
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
            _plan_hang,
            judge_hang,
            ("seconds_to_verdict", "false_alarms"),
        ),
        *(
            Case(
                f"hang8-{place}",
                10,
                "named with rank and stage, hangs within the budget, in 10 of 10 seeds (TP2xPP2xDP2)",
                _plan_hang_8(place),
                judge_hang,
                ("seconds_to_verdict", "false_alarms"),
            )
            for place in ("forward", "backward", "optimizer", "data", "stop", "skip")
        ),
        *(
            Case(
                name,
                10,
                "the two hosts and the transfer named within the budget, no rank accused, in 10 of 10 seeds (DP8 on"
                f" four hosts with their own clocks; {where})",
                _plan_cut(name, firsts),
                judge_cut,
                ("seconds_to_verdict", "seconds_to_name", "false_alarms"),
            )
            for name, firsts, where in (
                ("hang8-allreduce", (1, 2), "both hosts reach the controller"),
                ("hang8-allreduce-control", (0, 3), "one of them is the controller's"),
            )
        ),
        Case(
            "kill8",
            10,
            "named with rank, dead process: <= 0.5 s, in 10 of 10 seeds (TP2xPP2xDP2)",
            _plan_kill_8,
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
        Case("crash", 10, "dead process: <= 0.5 s", _plan_crash, judge_crash, ("seconds_to_verdict",)),
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
