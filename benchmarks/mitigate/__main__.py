"""Remedies for slow jobs: S2 (fewer micro-batches for who is slow), its solver beside MIP solvers; S3 and S4 (moves).

    python -m benchmarks.mitigate [--quick] [--part solver|job|moves] [--seeds N] [--json FILE]

The solver: 16 to 16,384 groups, a tenth of them slow; every answer is proved optimal by counting. Beside it cvxpy with
HiGHS, GLPK_MI and SCIP, those that are installed (pip install cvxpy highspy cvxopt pyscipopt), and the objective of
GREYHOUND's equation 1; each is given 30 s, and no larger case once it needed more.

The jobs: `keepstep run` with a Session on Gloo, compute emulated by sleeping (micro-batches of 40 ms, of 120 ms for 8
ranks, real work within them). After 60 iterations one rank of a replica, or of several, turns slow; nothing is told
to keepstep. Iterations after the new shares came into force are compared with the best that any shares can do,
computed from the emulated times alone, so that all that the machine and keepstep take counts against us. The layouts
are DP4 and DP2×PP2, and those of GREYHOUND's figures 14 (2, 4 and 8 replicas, weak to severe) and 15 (1 to 4 slow
ones of 4). Losses are compared with those of the same training undisturbed.

The moves, S3 and S4 (as root): see `moves.py`. Iterations before, during and after, and for S3 after it was
taken back; the pause is from the last step before the job is formed anew until the first that is new.

With ``--json FILE.json`` each result is written at once, to FILE-trials.jsonl; the same command, given again at the
same commit of the code, goes on where it was ended.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks._report import Line, Report, bench_arguments
from benchmarks._trials import Trials
from benchmarks.mitigate import moves, solver, trial

GOALS_S = {512: ("≤ 2 ms", 0.002), 16384: ("≤ 20 ms", 0.020)}
OPTIMAL_GOAL = "always optimal"
RATIO_GOAL, RATIO = "within 5 % of the best possible", 1.05
LOSS_GOAL = "equal to the undisturbed run's to rounding"
SEEDS = 3
PAUSE_GOAL = "pause ≤ 5 s"
PAPER_S = {16: 0.01, 64: 0.01, 512: 35.93}  # table 5
PAPER_SPEEDUP = {trial.Case(4, 1, 1, trial.MEDIUM): 1.59}  # figure 15, left: the best of theirs
EMULATED = "compute emulated by sleeping, Gloo on one machine"


def solve(report: Report, trials: Trials, quick: bool) -> None:
    """The solver part."""
    peers: dict[int, dict[str, float | int | str]] = {groups: {} for groups in solver.SIZES}
    better: list[str] = []
    answers = {
        groups: trials.result(
            *(f"solver/keepstep/{groups}", 0),
            lambda groups=groups: solver.ours(groups, 200 if groups <= 512 and not quick else 20),
        )
        for groups in solver.SIZES
    }
    for name in solver.SOLVERS:
        if why := solver.missing(name):
            report.leave_out(name, why)
            continue
        for groups in solver.SIZES if not quick else solver.QUICK_SIZES:
            found = trials.result(
                f"solver/{name}/{groups}", 0, lambda name=name, groups=groups: solver.other(name, groups)
            )
            if found["failed"]:
                peers[groups][name] = found["failed"]
                break
            ours = answers[groups]["slowest"]
            away = f"{100 * (found['slowest'] / ours - 1):+.2f} %"
            peers[groups][name] = f"{found['took_s']:.3g} s, slowest group {away}"
            if found["slowest"] < ours * (1 - 1e-9):
                better.append(f"{name}, {groups} groups: {away}")
    for groups, found in answers.items():
        if groups in PAPER_S:
            peers[groups]["GREYHOUND table 5"] = f"{PAPER_S[groups]} s"
        goal, goal_s = GOALS_S.get(groups, (None, None))
        median_ms = 1000 * found["median_s"]
        limit = f"the longest of {found['cases']} cases; median {median_ms:.3g} ms; peers: the first case"
        report.add(
            Line(
                *(f"solver, {groups} groups", round(1000 * found["took_s"], 4), "ms", goal),
                met=None if goal_s is None else found["took_s"] <= goal_s,
                peers=peers[groups],
                limit=limit,
            )
        )
    cases = sum(found["cases"] for found in answers.values())
    wrong = sum(len(found["wrong"]) for found in answers.values())
    report.add(
        Line(
            *("solver, answers proved optimal", f"{cases - wrong}/{cases}", "cases", OPTIMAL_GOAL),
            met=not wrong and not better,
            limit="; ".join(["by counting what is done sooner", *better]),
        )
    )


def drive(report: Report, trials: Trials, quick: bool, seeds: int) -> None:
    """The real jobs."""
    found: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    cases = trial.QUICK_CASES if quick else trial.CASES
    for case in {(case.replicas, case.stages): case for case in cases}.values():
        name = f"alone/DP{case.replicas}×PP{case.stages}"
        alone.append(trials.result(name, 0, lambda case=case: trial.alone(case)))
    for case in cases:
        of_case = [
            trials.result(f"job/{case.name}", seed, lambda case=case, seed=seed: trial.run(case, seed))
            for seed in range(seeds)
        ]
        report.add(_line(case, of_case))
        found += of_case
    without = [one["alone_s"] / one["bound_s"] - 1 for one in alone if not one["failed"]]
    watched = [one["before_s"] / one["before_bound_s"] - 1 for one in found if "before_s" in one]
    for beyond, who in ((without, "with torchrun, without keepstep"), (watched, "with keepstep")):
        if beyond:
            report.add(
                Line(
                    f"undisturbed, {who}: beyond the emulated compute, median of {len(beyond)} jobs",
                    *(100 * statistics.median(beyond), "%"),
                    limit=f"{100 * min(beyond):.1f} to {100 * max(beyond):.1f} %; {EMULATED}",
                )
            )
    losses = [one["loss_error"] for one in found if "loss_error" in one]
    if losses:
        compared = sum(one.get("losses", 0) for one in found)
        report.add(
            Line(
                *("losses, largest relative difference", max(losses), "", LOSS_GOAL),
                met=max(losses) <= trial.ROUNDING,
                limit=f"{compared} iterations of {len(losses)} jobs, float64",
            )
        )


def move(report: Report, trials: Trials, seeds: int) -> None:
    """The moves."""
    if why := moves.missing():
        report.leave_out("moves", why)
        return
    cases = {
        "S3, a slow link of a data-parallel pair": moves.exchange,
        "S4, a slow node, with a spare": moves.replacement,
    }
    for name, run in cases.items():
        found = [trials.result(name, seed, lambda run=run, seed=seed: run(seed)) for seed in range(seeds)]
        good = [one for one in found if not one["failed"]]
        failed = [f"seed {one['seed']}: {one['failed']}" for one in found if one["failed"]]
        paces = [
            f"{key.removesuffix('_s').replace('_', ' ')} {_ms(statistics.median(one[key] for one in good))}"
            for key in ("before_s", "during_s", "after_s", "after_revert_s")
            if good and key in good[0]
        ]
        pauses = sorted(pause for one in good for pause in one["pauses_s"])
        told = [f"ms an iteration: {', '.join(paces)}", moves.EMULATED, *failed]
        if good:
            again = [count for one in good for count in one["made_again"]]
            told.insert(
                1, f"{pauses[0]:.2f} to {pauses[-1]:.2f} s; {min(again)} to {max(again)} steps made again"
            )
            moved = [one["slow_until_moved_s"] for one in good]
            told.insert(2, f"slow for {min(moved):.1f} to {max(moved):.1f} s until then")
            compared = sum(one["compared"] for one in good)
            told.insert(3, f"{compared} values bit-equal to an undisturbed run's")
        report.add(
            Line(
                f"{name}: pause, median of {len(pauses)}, {len(good)} of {len(found)} jobs went well",
                *(statistics.median(pauses) if pauses else None, "s", PAUSE_GOAL),
                met=not failed and pauses[-1] <= moves.PAUSE_GOAL_S,
                limit="; ".join(told),
            )
        )


def _line(case: trial.Case, found: list[dict[str, Any]]) -> Line:
    good = [one for one in found if not one["failed"]]
    failed = [f"seed {one['seed']}: {one['failed']}" for one in found if one["failed"]]
    name = f"{case.name}: after S2, × the best possible"
    if not good:
        return Line(name, None, "", RATIO_GOAL, met=False, limit="; ".join(failed))

    def mean(key: str) -> float | None:
        values = [one[key] for one in good if one[key] is not None]
        return statistics.mean(values) if values else None

    slowed_s, after_s = mean("slowed_s"), mean("after_s")
    steps = [one["in_force_steps"] for one in good if one["in_force_steps"] is not None]
    if not good[0]["worth"]:
        name = f"{case.name}: no shares are better, × the best possible"
    said = [
        f"ms an iteration: before {_ms(mean('before_s'))}, slowed {_ms(slowed_s)}, after {_ms(after_s)},"
        f" best possible {_ms(mean('bound_s'))}",
        f"in force after {min(steps)} to {max(steps)} steps" if steps else "shares stayed equal",
        f"{min(one['ratio'] for one in good):.3f} to {max(one['ratio'] for one in good):.3f} in {len(good)} jobs",
        EMULATED,
        *failed,
    ]
    peers: dict[str, float | int | str] = {}
    if slowed_s and after_s and steps:
        peers["slowed ÷ after"] = round(slowed_s / after_s, 2)
    if case in PAPER_SPEEDUP:
        peers["GREYHOUND, slowed ÷ after (8 GPUs)"] = PAPER_SPEEDUP[case]
    return Line(
        *(name, statistics.median(one["ratio"] for one in good), "", RATIO_GOAL),
        met=not failed and all(one["ratio"] <= RATIO for one in good),
        peers=peers,
        limit="; ".join(said),
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def main() -> int:
    """Run the bench."""
    parser = bench_arguments("mitigate", __doc__ or "")
    parser.add_argument("--part", choices=("solver", "job", "moves"), help="default: all")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help=f"jobs for each case ({SEEDS})")
    given = parser.parse_args()
    packages = ("keepstep", "torch", "numpy", "cvxpy", "highspy", "cvxopt", "pyscipopt")
    report = Report("mitigate", quick=given.quick, packages=packages)
    trials = Trials(given.json and given.json.with_name(f"{given.json.stem}-trials.jsonl"))
    seeds = 1 if given.quick else given.seeds
    if given.part in (None, "solver"):
        solve(report, trials, given.quick)
    if given.part in (None, "job"):
        drive(report, trials, given.quick, seeds)
    if given.part == "moves" or (given.part is None and not given.quick):
        move(report, trials, seeds)
    report.finish(given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
