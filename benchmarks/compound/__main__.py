"""Slow computation and communication, some at once: the compound run of GREYHOUND §7.5, with and without keepstep.

    python -m benchmarks.compound [--quick] [--part simulated|real] [--seeds N] [--exchange-s S] [--keep DIR]
        [--json FILE]

**A simulation**: 256 simulated ranks (8 TP, 16 DP, 2 PP) train 1,500 iterations in virtual time. The schedule is
`schedule.json`, written before keepstep was run on it; nothing of keepstep sees it. Real are the controller,
the launchers' core, and the detectors of all ranks; what agents measure is computed. Beside it stands the offline
optimum: it knows the schedule, changes shares at once for nothing, and may move all nodes for one pause.

**Real** (as root): 8 ranks on four hosts, see `real.py`: the same schedule, iterations of 0.2 s. Each seed is
three jobs: undisturbed, slowed without keepstep's remedies, slowed with them. ``--keep DIR`` keeps what each of them
has told and taken.

With ``--json FILE.json`` each seed's result is written at once, to FILE-trials.jsonl; the same command, given again at
the same commit of the code, goes on where it was ended.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._report import Line, Report, bench_arguments
from benchmarks._trials import Trials
from benchmarks.compound import job, real
from benchmarks.compound import schedule as given
from benchmarks.compound.simulated import DETECTED_GOAL, REDUCTION, REDUCTION_GOAL, TITLES, simulate, spread

SEEDS = 5


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
            limit="; ".join([spread(values), told, *failed]),
        )
    )
    values = [
        100 * (each["without"] - each["with"]) / (each["without"] - each["healthy"]) for each in seconds
    ]
    report.add(
        Line(
            *("real, slowdown reduction: of the time lost", statistics.mean(values), "%", REDUCTION_GOAL),
            met=not failed and min(values) >= 100 * REDUCTION,
            limit="; ".join([spread(values), *failed]),
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


def main() -> int:
    """Run the bench."""
    parser = bench_arguments("compound", __doc__ or "")
    parser.add_argument("--part", choices=("simulated", "real"), help="default: all")
    parser.add_argument("--telemetry", choices=("gloo", "nccl"), help="of the simulated part; default: each")
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
        for telemetry in TITLES:
            if given_.telemetry in (None, telemetry):
                simulate(report, trials, given_.quick, seeds, given_.exchange_s, telemetry)
    if given_.part == "real" or (given_.part is None and not given_.quick):
        train(report, trials, seeds, given_.keep)
    report.finish(given_.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
