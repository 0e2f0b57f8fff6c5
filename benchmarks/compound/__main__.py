"""Slow computation and communication, some at once: the compound run of GREYHOUND §7.5, with and without keepstep.

    python -m benchmarks.compound [--quick] [--part simulated|real] [--seeds N] [--exchange-s S] [--keep DIR]
        [--json FILE]

**A simulation**: 256 simulated ranks (8 TP, 16 DP, 2 PP) train 1,500 iterations in virtual time. The schedule is
`schedule.json`, written before keepstep was run on it; nothing of keepstep sees it. Real are the controller,
the launchers' core, and the detectors of all ranks; what agents measure is computed. Beside it stands the offline
optimum: it knows the schedule, changes shares at once for nothing, and may move all nodes for one pause.

**Real** (as root): 8 ranks on four hosts, see `_compound_real`: the same schedule, iterations of 0.2 s. Each seed is
three jobs: undisturbed, slowed without keepstep's remedies, slowed with them. ``--keep DIR`` keeps what each of them
has told and taken.

With ``--json FILE.json`` each seed's result is written at once, to FILE-trials.jsonl; the same command, given again at
the same commit of the code, goes on where it was ended.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._report import Line, Report, bench_arguments
from benchmarks.compound import job, optimum, real
from benchmarks.compound import schedule as given
from benchmarks.mitigate.__main__ import Trials

RATIO_GOAL, RATIO = "≥ 1.58 × without", 1.58
REDUCTION_GOAL, REDUCTION = "≥ 70 %", 0.70
DETECTED_GOAL = "100 %"
SEEDS = 5
QUICK_ITERATIONS = 240
SIMULATED = "SIMULATION of 256 ranks in virtual time"


def one_seed(schedule: given.Schedule, seed: int, exchange_s: float) -> dict[str, Any]:
    """The job healthy, without keepstep, with it, and with the offline optimum."""
    healthy, slowed = job.healthy(schedule, seed), job.untreated(schedule, seed)
    log = job.Treated(schedule, seed, exchange_s).run()
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


def simulate(report: Report, trials: Trials, quick: bool, seeds: int, exchange_s: float) -> None:
    """The simulated part."""
    schedule = given.load()
    if quick:
        schedule = replace(schedule, iterations=QUICK_ITERATIONS)
    name = f"simulated/{schedule.iterations}/{exchange_s:.1f}"
    found = [
        trials.result(name, seed, lambda seed=seed: one_seed(schedule, seed, exchange_s))
        for seed in range(seeds)
    ]
    good = [one for one in found if not one["failed"]]
    failed = [f"seed {one['seed']}: {one['failed']}" for one in found if one["failed"]]
    if not good:
        report.leave_out("simulated", "; ".join(failed))
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
                f"simulated, iterations a minute: {words}",
                statistics.mean(values),
                "1/min",
                peers=peers,
                limit=_of(values),
            )
        )
    last = f"an exchange of nodes pauses {exchange_s:.1f} s; {SIMULATED}"
    whole = None if quick else True  # the goals are those of the whole schedule
    values = [one["ratio"] for one in good]
    report.add(
        Line(
            *("simulated, with ÷ without keepstep", statistics.mean(values), "×", RATIO_GOAL),
            met=whole and not failed and min(values) >= RATIO,
            peers={
                "GREYHOUND": 1.58,
                "offline optimum": statistics.mean(one["optimum_ratio"] for one in good),
            },
            limit="; ".join([_of(values), last, *failed]),
        )
    )
    values = [100 * one["reduction"] for one in good]
    report.add(
        Line(
            *(
                "simulated, slowdown reduction: of the time lost",
                statistics.mean(values),
                "%",
                REDUCTION_GOAL,
            ),
            met=whole and not failed and min(values) >= 100 * REDUCTION,
            peers={"offline optimum": 100 * statistics.mean(one["optimum_reduction"] for one in good)},
            limit="; ".join([_of(values), last]),
        )
    )
    events = [event for one in good for event in one["events"]]
    reactions = [event["reaction"] for event in events if event["reaction"] is not None]
    seconds = [event["reaction_s"] for event in events if event["reaction_s"] is not None]
    share = 100 * sum(event["detected"] for event in events) / len(events)
    false = sum(len(one["false"]) for one in good)
    report.add(
        Line(
            *("simulated, slowdowns whose device or link a verdict named", share, "%", DETECTED_GOAL),
            met=None if quick else share == 100,
            limit=f"{len(events)} in {len(good)} seeds; {false} others blamed; {SIMULATED}",
        )
    )
    if not reactions:
        return
    report.add(
        Line(
            *("simulated, from onset to that verdict, mean", statistics.mean(reactions), "iterations"),
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
                f"simulated, event {number}: {first['severity']} {first['kind']}, named after",
                *(statistics.mean(took) if took else None, "iterations"),
                limit=f"{min(took, default='-')} to {max(took, default='-')}; orders in force after "
                f"{min(acted, default='-')} to {max(acted, default='-')}",
            )
        )


def train(report: Report, trials: Trials, seeds: int, keep: Path | None) -> None:
    """The real part."""
    if why := real.missing():
        report.leave_out("real", why)
        return
    schedule = given.load()
    ways = {"healthy": (None, "auto"), "without": (schedule, "off"), "with": (schedule, "auto")}
    rounds: list[dict[str, dict[str, Any]]] = []
    failed: list[str] = []
    for seed in range(seeds):
        found: dict[str, dict[str, Any]] = {}
        for way, (slowed, mitigate) in ways.items():
            folder = keep and keep / f"{way}-{seed}"
            job_of = partial(real.run, slowed, schedule.iterations, mitigate, folder)
            found[way] = trials.result(f"real/{way}", seed, job_of)
        wrong = [f"seed {seed}, {way}: {one['failed']}" for way, one in found.items() if one["failed"]]
        failed += wrong
        if not wrong:
            rounds.append(found)
    if not rounds:
        report.leave_out("real", "; ".join(failed))
        return
    seconds = [{way: one["seconds"] for way, one in found.items()} for found in rounds]
    best_s = [
        real.optimum_s(schedule, each["healthy"] / schedule.iterations, found["without"]["link_s"])
        for each, found in zip(seconds, rounds, strict=True)
    ]
    ideal = [each["without"] / one_s for each, one_s in zip(seconds, best_s, strict=True)]
    told = f"seconds: {seconds}; offline optimum {[round(one) for one in best_s]}; {real.EMULATED}"
    values = [each["without"] / each["with"] for each in seconds]
    report.add(
        Line(
            *("real, with ÷ without keepstep", statistics.mean(values), "×"),
            peers={"GREYHOUND (256 GPUs)": 1.58, "offline optimum": statistics.mean(ideal)},
            limit="; ".join([_of(values), told, *failed]),
        )
    )
    values = [
        100 * (each["without"] - each["with"]) / (each["without"] - each["healthy"]) for each in seconds
    ]
    report.add(
        Line(
            *("real, slowdown reduction: of the time lost", statistics.mean(values), "%", REDUCTION_GOAL),
            met=not failed and min(values) >= 100 * REDUCTION,
            limit="; ".join([_of(values), *failed]),
        )
    )
    reactions = [step for found in rounds for step in found["with"]["reactions"].values()]
    known = [step for step in reactions if step is not None]
    report.add(
        Line(
            "real, slowdowns whose device or link a verdict named",
            *(100 * len(known) / len(reactions), "%", DETECTED_GOAL),
            met=len(known) == len(reactions),
            limit=f"{len(reactions)} in {len(rounds)} seeds; after {min(known, default='-')} to "
            f"{max(known, default='-')} iterations, mean {statistics.mean(known) if known else '-'}",
        )
    )


def _of(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f} in {len(values)} seeds"


def main() -> int:
    """Run the bench."""
    parser = bench_arguments("compound", __doc__ or "")
    parser.add_argument("--part", choices=("simulated", "real"), help="default: all")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help=f"of the jitter ({SEEDS})")
    parser.add_argument(
        "--exchange-s", type=float, default=job.EXCHANGE_S, help="pause of an exchange of nodes"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="what the real jobs have told and taken")
    given_ = parser.parse_args()
    report = Report("compound", quick=given_.quick, packages=("keepstep", "numpy"))
    trials = Trials(given_.json and given_.json.with_name(f"{given_.json.stem}-trials.jsonl"))
    seeds = 1 if given_.quick else given_.seeds
    if given_.part != "real":
        simulate(report, trials, given_.quick, seeds, given_.exchange_s)
    if given_.part == "real" or (given_.part is None and not given_.quick):
        train(report, trials, seeds, given_.keep)
    report.finish(given_.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
