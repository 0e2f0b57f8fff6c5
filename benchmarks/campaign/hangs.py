"""Hangs and crashes of the fault campaigns: what each seed injects, and how the verdict is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.campaign.case import (
    DP2_PP2,
    HOSTS,
    RANKS,
    WARM_UP_STEPS,
    Verdict,
    culprit_links,
    culprit_ranks,
    drawn,
    left_over,
)
from benchmarks.campaign.trial import Outcome, Plan


def plan_hang(seed: int) -> Plan:
    chance = drawn("hang-backward", seed)
    rank, step = chance.randrange(RANKS), chance.randint(20, 35)
    return Plan(
        arguments=(*DP2_PP2, "--steps", "200", "--seed", str(seed)),
        fault=f"hang rank {rank} at step {step} in backward",
        truth={"rank": rank, "step": step},
        end_on="hang",
        timeout_s=90,
    )


TP2_PP2_DP2 = ("--tp", "2", "--pp", "2", "--dp", "2", "--layers", "2", "--microbatches", "2", "--batch", "4")


def plan_hang_8(place: str) -> Callable[[int], Plan]:
    """Eight ranks with tensor parallelism, whose pace is the CPU's: only the name and the stage are judged by it."""

    def plan(seed: int) -> Plan:
        chance = drawn(f"hang8-{place}", seed)
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
    truth, why, measured = plan.truth, *_one_hang(outcome)
    hangs = [incident for incident in outcome.incidents if incident["kind"] == plan.end_on]
    if not hangs:
        return Verdict([*why, "no hang reported"], measured)
    if culprit_ranks(hangs[0]) != [truth["rank"]]:
        why.append(f"named {culprit_ranks(hangs[0])}, true {truth['rank']}")
    measured["stage"] = [culprit.get("stage") for culprit in hangs[0]["culprits"]]
    told = str(measured["stage"][0]) if measured["stage"] else ""
    if truth.get("stage", "") not in told:
        why.append(f"stage {told or 'not told'}, true {truth['stage']}")
    struck = [line["unix_s"] for line in outcome.faults if line["did"].startswith(("hang", "stop", "skip"))]
    _judge_hang_time(outcome, hangs[0], struck[0] if struck else None, measured, why)
    return Verdict(why, measured)


def _one_hang(outcome: Outcome) -> tuple[list[str], dict[str, Any]]:
    """(what went wrong, what was measured) before the hang itself is looked at: it came, and nothing else did."""
    why = left_over(outcome)
    measured: dict[str, Any] = {"false_alarms": max(0, len(outcome.incidents) - 1)}
    if outcome.timed_out:
        why.append("no hang reported in time")
    if measured["false_alarms"]:
        why.append(f"{measured['false_alarms']} incidents too many")
    return why, measured


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


def plan_crash(seed: int) -> Plan:
    chance = drawn("crash", seed)
    rank, step = chance.randrange(RANKS), chance.randint(10, 20)
    kill = seed % 2 == 0
    return Plan(
        arguments=(*DP2_PP2, "--steps", "60", "--seed", str(seed)),
        fault=f"kill rank {rank} at step {step}" if kill else f"raise in rank {rank} at step {step}",
        truth={"rank": rank, "step": step, "exit_code": 128 + 9 if kill else 1},
    )


def plan_kill_8(seed: int) -> Plan:
    chance = drawn("kill8", seed)
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
    truth, why = plan.truth, left_over(outcome)
    measured: dict[str, Any] = {"exit_code": outcome.exit_code}
    if outcome.exit_code != truth["exit_code"]:
        why.append(f"exit code {outcome.exit_code}, true {truth['exit_code']}")
    if [incident["kind"] for incident in outcome.incidents] != ["crash"]:
        why.append(f"incidents: {[incident['kind'] for incident in outcome.incidents]}")
        return Verdict(why, measured)
    incident = outcome.incidents[0]
    if culprit_ranks(incident) != [truth["rank"]]:
        why.append(f"named {culprit_ranks(incident)}, true {truth['rank']}")
    struck = [line["unix_s"] for line in outcome.faults if line["did"].startswith(("kill", "raise"))]
    measured["seconds_to_verdict"] = round(incident["detected_unix_s"] - struck[0], 3)
    if "kill" in plan.fault and measured["seconds_to_verdict"] > 0.5:
        why.append(f"verdict after {measured['seconds_to_verdict']} s, budget 0.5 s")
    return Verdict(why, measured)


def plan_cut(seed: int) -> Plan:
    """Data parallelism over four hosts: the path from one host to the next in the all-reduce's ring is cut."""
    chance = drawn("hang8-allreduce", seed)
    first, onset = chance.randrange(len(HOSTS)), chance.randint(12, 20)
    pair = (HOSTS[first], HOSTS[(first + 1) % len(HOSTS)])
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


def judge_cut(plan: Plan, outcome: Outcome) -> Verdict:
    """A hang of the transfer between the two hosts, in a hang's time; no rank is ever accused of it."""
    truth, why, measured = plan.truth, *_one_hang(outcome)
    hangs = [incident for incident in outcome.incidents if incident["kind"] == "hang"]
    if not hangs:
        return Verdict([*why, "no hang reported"], measured)
    accused = outcome.notes.get("accused", [])
    ranks = sorted({rank for one in (*accused, hangs[0]) for rank in culprit_ranks(one)})
    if ranks:
        why.append(f"ranks {ranks} accused")
    if culprit_links(hangs[0]) != [set(truth["hosts"])]:
        why.append(f"link {truth['hosts']} not named: {[sorted(link) for link in culprit_links(hangs[0])]}")
    measured["stage"] = [culprit.get("stage") for culprit in hangs[0]["culprits"]]
    if measured["stage"] != ["transfer"]:
        why.append(f"stage {measured['stage']}, true transfer")
    cut_unix_s = outcome.notes.get("onset_unix_s")
    named = [one["unix_s"] for one in accused if set(truth["hosts"]) in culprit_links(one)]
    measured["seconds_to_name"] = round(named[0] - cut_unix_s, 3) if named and cut_unix_s else None
    _judge_hang_time(outcome, hangs[0], cut_unix_s, measured, why)
    return Verdict(why, measured)
