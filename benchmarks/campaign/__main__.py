"""Seeded fault campaigns on real training jobs: what ``make soak`` runs.

    python -m benchmarks.campaign --case slow-1.3x --seeds 20
    python -m benchmarks.campaign --case all --parallel 2

Every seed runs one job under ``keepstep run`` and is judged from what keepstep wrote in the run's folder against what
was injected. ``seeds.jsonl`` in ``--out`` has a line for every seed, failed ones too; seeds that have one are not run
again, so a campaign that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks._intervals import wilson
from benchmarks._report import Line, Report
from benchmarks.campaign.cases import CASES
from benchmarks.campaign.running import REPLAY, run_case, run_replay
from benchmarks.campaign.seeds import NAME, convert, kept

NAMES = (*CASES, REPLAY)
FAMILIES = {"healthy-odd": tuple(name for name in CASES if name.startswith("healthy-odd-"))}
_ROOT = Path(__file__).resolve().parents[2]


def summarise(report: Report, out: Path, name: str) -> None:
    """One line for the case, and one for each of its figures."""
    results = list(kept(out, name).values())
    if not results:
        report.leave_out(name, "no results")
        return
    if name == REPLAY:
        measured = results[0]["measured"]
        rate, fed = measured["alarms_per_100000"], measured["iterations"]
        limit = f"{fed} iterations, block bootstrap of {measured['series']} measured series"
        goal = "< 1 per 100,000 replayed iterations"
        report.add(Line(REPLAY, rate, "per 100,000 iterations", goal, rate < 1, limit=limit))
        return
    case = CASES[name]
    passed = sum(result["passed"] for result in results)
    low, high = wilson(passed, len(results))
    limit = f"Wilson 95 %: {low:.2f} to {high:.2f}; emulated compute"
    report.add(
        Line(name, f"{passed}/{len(results)}", "seeds", case.goal, passed == len(results), limit=limit)
    )
    for figure in case.shown:
        values = [result["measured"].get(figure) for result in results]
        known = [value for value in values if value is not None]
        if known:
            shown = f"median {statistics.median(known):.3g}, max {max(known, key=abs):.3g} (n={len(known)})"
            report.add(Line(f"  {figure}", shown, ""))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add(
        "--case",
        action="append",
        choices=(*NAMES, *FAMILIES, "all"),
        default=[],
        help="may be given several times",
    )
    add("--seeds", type=int, help="seeds 0 to N-1 (default: as many as the goal asks for)")
    add("--out", type=Path, default=_ROOT / "benchmarks" / "results" / "campaign")
    add("--runs", type=Path, default=_ROOT / "runs" / "campaign", help="where the run folders go")
    add("--keep-runs", action="store_true", help="keep the run folders of passed seeds, too")
    add("--again", action="store_true", help="run seeds that have a result already")
    add(
        "--parallel", type=int, default=1, metavar="N", help="jobs at once (their timing disturbs each other)"
    )
    add("--summary-only", action="store_true", help="run nothing, summarise what is there")
    add("--json", type=Path, help="where to write the summary (default: summary.json beside the results)")
    add(
        "--convert",
        type=Path,
        metavar="FOLDER",
        help="run nothing; put results that are one file a seed (FOLDER/seed-NNN.json) into --out, and end",
    )
    arguments = parser.parse_args(argv)
    if not arguments.case and not arguments.convert:
        parser.error("which --case?")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    arguments.out, arguments.runs = arguments.out.resolve(), arguments.runs.resolve()
    if arguments.convert:
        print(f"{convert(arguments.convert, arguments.out)} seeds are lines of {arguments.out / NAME}")
        return 0
    chosen = [name for case in arguments.case for name in FAMILIES.get(case, (case,))]
    wanted = NAMES if "all" in chosen else tuple(dict.fromkeys(chosen))
    report = Report("campaign", quick=False)
    for name in wanted:
        if not arguments.summary_only:
            if name == REPLAY:
                run_replay(arguments)
            else:
                run_case(CASES[name], arguments.seeds or CASES[name].seeds, arguments)
    for name in NAMES if "all" in arguments.case or arguments.summary_only else wanted:
        summarise(report, arguments.out, name)
    report.finish(arguments.json or arguments.out / "summary.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
