"""Runs the seeds of a campaign that have no result yet, some at once, and keeps what becomes of them."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.campaign.case import Case
from benchmarks.campaign.replay import replay
from benchmarks.campaign.seeds import keep, kept
from benchmarks.campaign.trial import Outcome, run_trial
from benchmarks.campaign.why_trial import run_why

REPLAY = "replay-false-alarms"


def run_seed(case: Case, seed: int, out: Path, runs: Path, keep_runs: bool) -> dict[str, Any]:
    """Run one seed and keep its result; the run's folder is kept when it failed, or when asked for."""
    plan = case.plan(seed)
    folder = runs / case.name / f"seed-{seed:03d}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        outcome = run_trial(plan, folder) if plan.why is None else run_why(plan, plan.why, folder)
        verdict = case.judge(plan, outcome)
        result = _result(outcome, verdict.why, verdict.measured)
    except Exception as error:  # a seed that breaks is a failed seed, and the campaign goes on
        result = {"passed": False, "why": [f"{type(error).__name__}: {error}"], "measured": {}}
    result = {"case": case.name, "seed": seed, **result, "plan": asdict(plan)}
    keep(out, result)
    if result["passed"] and not keep_runs:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _result(outcome: Outcome, why: list[str], measured: dict[str, Any]) -> dict[str, Any]:
    return {
        "passed": not why,
        "why": why,
        "measured": measured,
        "exit_code": outcome.exit_code,
        "wall_s": outcome.wall_s,
        "incidents": outcome.incidents,
        "faults": outcome.faults,
        "notes": outcome.notes,
        "script": outcome.script,
        "lives": outcome.lives,
        "truths": outcome.truths,
        "watched": {rank: [steps[step] for step in sorted(steps)] for rank, steps in outcome.watched.items()},
        "console": outcome.console if why else "",
    }


def run_case(case: Case, seeds: Iterable[int], arguments: argparse.Namespace) -> None:
    """Run the seeds of a case that have no result yet."""
    done = {} if arguments.again else kept(arguments.out, case.name)
    todo = _without_lacking(case, [seed for seed in seeds if seed not in done])
    left_out = skipped(case, todo)
    for reason, which in left_out.items():
        print(f"{case.name}: {len(which)} seeds are skipped: {reason}", flush=True)
    todo = [seed for seed in todo if not any(seed in which for which in left_out.values())]

    def one(seed: int) -> None:
        result = run_seed(case, seed, arguments.out, arguments.runs, arguments.keep_runs)
        state = "passed" if result["passed"] else "FAILED: " + "; ".join(result["why"])
        figures = ", ".join(f"{name} {result['measured'].get(name)}" for name in case.shown)
        print(f"{case.name} seed {seed}: {state} ({figures}; {result.get('wall_s')} s)", flush=True)

    with ThreadPoolExecutor(arguments.parallel) as pool:
        # jobs that run together start together: one that starts later would slow the others for seconds
        for first in range(0, len(todo), arguments.parallel):
            list(pool.map(one, todo[first : first + arguments.parallel]))


def skipped(case: Case, seeds: Iterable[int]) -> dict[str, list[int]]:
    """The seeds that cannot be run here, by the reason."""
    found: dict[str, list[int]] = {}
    for seed in seeds if case.skipped else ():
        assert case.skipped is not None
        if reason := case.skipped(seed):
            found.setdefault(reason, []).append(seed)
    return found


def _without_lacking(case: Case, seeds: Sequence[int]) -> list[int]:
    """The seeds whose packages are installed; the others are told."""
    lacking = {seed: case.lacks(seed) if case.lacks else "" for seed in seeds}
    for package in sorted(set(lacking.values()) - {""}):
        count = sum(one == package for one in lacking.values())
        why = f"{package} is not installed (make frameworks)"
        print(f"{case.name}: {count} seeds are left out, {why}", flush=True)
    return [seed for seed in seeds if not lacking[seed]]


def run_replay(arguments: argparse.Namespace) -> None:
    if arguments.again or not kept(arguments.out, REPLAY):
        healthy = kept(arguments.out, "healthy").values()
        result = {"case": REPLAY, "seed": 0, **replay(healthy, 0)}
        if result["measured"]:
            keep(arguments.out, result)
        else:
            print(f"{REPLAY}: {result['why'][0]}", file=sys.stderr)
