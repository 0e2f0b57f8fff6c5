"""The simulated part of the compound run: each seed healthy, without keepstep, with it, and at the offline optimum."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks._report import Line, Report
from benchmarks._trials import Trials
from benchmarks.compound import job, optimum
from benchmarks.compound import schedule as given

RATIOS: dict[job.Telemetry, float] = {"gloo": 1.58, "nccl": 1.70}
TITLES: dict[job.Telemetry, str] = {"gloo": "simulated", "nccl": "simulated on NCCL and RoCE"}
REDUCTION_GOAL, REDUCTION = "≥ 70 %", 0.70
DETECTED_GOAL = "100 %"
QUICK_ITERATIONS = 240
SIMULATED = "SIMULATION of 256 ranks in virtual time"


def one_seed(
    schedule: given.Schedule, seed: int, exchange_s: float, telemetry: job.Telemetry = "gloo"
) -> dict[str, Any]:
    """The job healthy, without keepstep, with it, and with the offline optimum."""
    healthy, slowed = job.healthy(schedule, seed), job.untreated(schedule, seed)
    log = job.Treated(schedule, seed, exchange_s, telemetry).run()
    plan = optimum.best(schedule, exchange_s)
    ideal = optimum.follow(schedule, plan, seed, exchange_s)
    totals = {
        "healthy": sum(healthy),
        "without": sum(slowed),
        "with": sum(log.seconds),
        "optimum": sum(ideal),
    }
    lost_s = totals["without"] - totals["healthy"]
    return {
        "simulated": True,
        "telemetry": telemetry,
        "iterations": schedule.iterations,
        "exchange_s": exchange_s,
        "per_minute": {name: 60 * schedule.iterations / total_s for name, total_s in totals.items()},
        "ratio": totals["without"] / totals["with"],
        "optimum_ratio": totals["without"] / totals["optimum"],
        "reduction": 1 - (totals["with"] - totals["healthy"]) / lost_s,
        "optimum_reduction": 1 - (totals["optimum"] - totals["healthy"]) / lost_s,
        "slowest": {"without": max(slowed), "healthy": statistics.median(healthy)},
        "events": [
            named(event, log, slowed) for event in schedule.events if event.first < schedule.iterations
        ],
        "incidents": len({told.incident.number for told in log.told}),
        "false": false_names(schedule, log),
        "exchanges": [step for step, _ in log.exchanges],
        "shares": [step for step, _ in log.shares],
        "optimum_bound_s": plan.bound_s,
        "optimum_plan_s": plan.plan_s,
        "optimum_pause_at": plan.pause_at,
    }


def named(event: given.Event, log: job.Log, slowed: Sequence[float]) -> dict[str, Any]:
    """When a verdict named the device or the link of an event, counted from its first slow iteration."""
    found = next((told for told in log.told if told.step >= event.first and _names(event, told)), None)
    began_s = job.BEGIN_S + sum(log.seconds[: event.first])
    orders = [
        step
        for step in [*(one for one, _ in log.shares), *(one for one, _ in log.exchanges)]
        if step > event.first
    ]
    return {
        "number": event.number,
        "kind": event.kind,
        "severity": event.severity,
        "times": round(event.times, 3),
        "detected": found is not None and found.step <= event.last,
        "reaction": None if found is None else found.step - event.first + 1,
        "reaction_s": None if found is None else round(found.now_s - began_s, 2),
        "treated_after": min((step - event.first for step in orders if step <= event.last), default=None),
        "onset": None if found is None else found.incident.onset_step,
    }


def false_names(schedule: given.Schedule, log: job.Log) -> list[str]:
    """Devices and links that a verdict blamed though they were not slow then, nor within 20 iterations before."""
    wrong: set[str] = set()
    for told in log.told:
        near = [one for one in schedule.events if one.first <= told.step and told.incident.onset_step is not None
                and one.first - 5 <= told.incident.onset_step <= one.last + 20]  # fmt: skip
        for culprit in told.incident.culprits:
            if not any(_is_it(one, culprit, told.place_of) for one in near):
                wrong.add(
                    f"incident {told.incident.number}: {culprit.rank if culprit.link is None else culprit.link.nodes}"
                )
    return sorted(wrong)


def _names(event: given.Event, told: job.Told) -> bool:
    return any(_is_it(event, culprit, told.place_of) for culprit in told.incident.culprits)


def _is_it(event: given.Event, culprit: Any, place_of: Sequence[int]) -> bool:
    """Whether this is the device or the link that is slow. Nodes keep their names, ranks move."""
    node = event.stage * given.DP + event.replica
    if event.kind == "link":
        ends = {job.name_of(node), job.name_of(event.to_stage * given.DP + event.to_replica)}
        return culprit.link is not None and set(culprit.link.nodes) == ends
    if culprit.link is not None or culprit.rank is None or culprit.node != job.name_of(node):
        return False
    return event.tp is None or culprit.rank % given.TP == event.tp


def simulate(
    report: Report,
    trials: Trials,
    quick: bool,
    seeds: int,
    exchange_s: float,
    telemetry: job.Telemetry = "gloo",
) -> None:
    """The simulated part, with what agents measure on one backend."""
    title = TITLES[telemetry]
    schedule = given.load()
    if quick:
        schedule = replace(schedule, iterations=QUICK_ITERATIONS)
    name = f"simulated/{schedule.iterations}/{exchange_s:.1f}" + (
        "" if telemetry == "gloo" else f"/{telemetry}"
    )
    found = [
        trials.result(name, seed, lambda seed=seed: one_seed(schedule, seed, exchange_s, telemetry))
        for seed in range(seeds)
    ]
    good = [one for one in found if not one["failed"]]
    failed = [f"seed {one['seed']}: {one['failed']}" for one in found if one["failed"]]
    if not good:
        report.leave_out(title, "; ".join(failed))
        return
    papers = {"healthy": given.PAPER_HEALTHY, "without": given.PAPER_SLOWED, "with": given.PAPER_TREATED}
    said = {
        "healthy": "healthy",
        "without": "without keepstep",
        "with": "with keepstep",
        "optimum": "offline optimum",
    }
    for key, words in said.items():
        values = [one["per_minute"][key] for one in good]
        peers: dict[str, float | int | str] = {"GREYHOUND": papers[key]} if key in papers else {}
        report.add(
            Line(
                f"{title}, iterations a minute: {words}",
                statistics.mean(values),
                "1/min",
                peers=peers,
                limit=spread(values),
            )
        )
    last = f"an exchange of nodes pauses {exchange_s:.1f} s; {SIMULATED}"
    whole = None if quick else True  # the goals are those of the whole schedule
    values = [one["ratio"] for one in good]
    report.add(
        Line(
            *(f"{title}, with ÷ without keepstep", statistics.mean(values), "×"),
            goal=f"≥ {RATIOS[telemetry]:.2f} × without",
            met=whole and not failed and min(values) >= RATIOS[telemetry],
            peers={
                "GREYHOUND": 1.58,
                "offline optimum": statistics.mean(one["optimum_ratio"] for one in good),
            },
            limit="; ".join([spread(values), last, *failed]),
        )
    )
    values = [100 * one["reduction"] for one in good]
    report.add(
        Line(
            *(
                f"{title}, slowdown reduction: of the time lost",
                statistics.mean(values),
                "%",
                REDUCTION_GOAL,
            ),
            met=whole and not failed and min(values) >= 100 * REDUCTION,
            peers={"offline optimum": 100 * statistics.mean(one["optimum_reduction"] for one in good)},
            limit="; ".join([spread(values), last]),
        )
    )
    events = [event for one in good for event in one["events"]]
    reactions = [event["reaction"] for event in events if event["reaction"] is not None]
    seconds = [event["reaction_s"] for event in events if event["reaction_s"] is not None]
    share = 100 * sum(event["detected"] for event in events) / len(events)
    false = sum(len(one["false"]) for one in good)
    report.add(
        Line(
            *(f"{title}, slowdowns whose device or link a verdict named", share, "%", DETECTED_GOAL),
            met=None if quick else share == 100,
            limit=f"{len(events)} in {len(good)} seeds; {false} others blamed; {SIMULATED}",
        )
    )
    if not reactions:
        return
    report.add(
        Line(
            *(f"{title}, from onset to that verdict, mean", statistics.mean(reactions), "iterations"),
            peers={"GREYHOUND, s": 10.56, "keepstep, s": statistics.mean(seconds)},
            limit=f"{min(reactions)} to {max(reactions)}; {SIMULATED}",
        )
    )
    for number in sorted({event["number"] for event in events}):
        these = [event for event in events if event["number"] == number]
        took = [event["reaction"] for event in these if event["reaction"] is not None]
        acted = [event["treated_after"] for event in these if event["treated_after"] is not None]
        first = these[0]
        report.add(
            Line(
                f"{title}, event {number}: {first['severity']} {first['kind']}, named after",
                *(statistics.mean(took) if took else None, "iterations"),
                limit=f"{min(took, default='-')} to {max(took, default='-')}; orders in force after "
                f"{min(acted, default='-')} to {max(acted, default='-')}",
            )
        )


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f} in {len(values)} seeds"
