"""Seeded fault campaigns on real training jobs: what ``make soak`` runs.

    python -m benchmarks.campaign --case slow-1.3x --seeds 20
    python -m benchmarks.campaign --case all --parallel 2
    python -m benchmarks.campaign --case blame --seeds 100-179
    python -m benchmarks.campaign --backend gloo-as-nccl --case hang-backward
    python -m benchmarks.campaign --backend stand-in-nccl --seeds 0-99 --jobs 2

With `--backend gloo-as-nccl` the probe takes the job's Gloo groups for NCCL's (`as_nccl.py`), and the results are those
of a case of that name: `hang-backward, gloo-as-nccl`. `--backend stand-in-nccl` has cases of its own, on the CUDA build
of torch and a stand-in for the GPU (`make cuda` first, or STAND_IN_VENV): `drawn`; `drawn-frameworks`, whose layouts
are megatron-core's and DeepSpeed's (`make frameworks`; without one its seeds are left out); `pairs-with-ports` (needs
root).

Every seed runs one job under ``keepstep run`` and is judged from what keepstep wrote in the run's folder against what
was injected. ``seeds.jsonl`` in ``--out`` has a line for every seed, failed ones too; seeds that have one are not run
again, so a campaign that was interrupted goes on where it stopped. Seeds from 100 on are counted apart: they were not
looked at while what they test was built.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._intervals import wilson
from benchmarks._report import Line, Report
from benchmarks.campaign.case import Case, on_backend
from benchmarks.campaign.cases import CASES
from benchmarks.campaign.running import REPLAY, run_case, run_replay, skipped
from benchmarks.campaign.seeds import NAME, convert, kept
from benchmarks.campaign.stand_in import CASE as STAND_IN_CASE
from benchmarks.campaign.stand_in import FRAMEWORKS_CASE, PORTS_CASE, STAND_IN_NCCL
from benchmarks.stand_in.ports import missing

NAMES = (*CASES, REPLAY)
AS_NCCL = "gloo-as-nccl"
BACKENDS = ("gloo", AS_NCCL, STAND_IN_NCCL)
ALL_CASES = {
    **CASES,
    **{one.name: one for one in (on_backend(case, AS_NCCL) for case in CASES.values())},
    STAND_IN_CASE.name: STAND_IN_CASE,
    FRAMEWORKS_CASE.name: FRAMEWORKS_CASE,
    PORTS_CASE.name: PORTS_CASE,
}
OF_STAND_IN = {
    "drawn": STAND_IN_CASE.name,
    "drawn-frameworks": FRAMEWORKS_CASE.name,
    "pairs-with-ports": PORTS_CASE.name,
}
FRESH = 100  # seeds from here on are not looked at while what they test is built
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
    known = [result for result in results if result["seed"] < FRESH]
    fresh = [result for result in results if result["seed"] >= FRESH]
    for part, which in ((known, ""), (fresh, f", seeds from {FRESH} on")):
        if part:
            _summarise_seeds(report, ALL_CASES[name], part, which)


def _summarise_seeds(report: Report, case: Case, results: Sequence[Mapping[str, Any]], which: str) -> None:
    passed = sum(result["passed"] for result in results)
    low, high = wilson(passed, len(results))
    limit = f"Wilson 95 %: {low:.2f} to {high:.2f}; emulated compute"
    met = passed >= case.share * len(results)
    report.add(Line(case.name + which, f"{passed}/{len(results)}", "seeds", case.goal, met, limit=limit))
    failed = Counter(result["measured"].get("kind", "") for result in results if not result["passed"])
    if told := ", ".join(f"{kind} {count}" for kind, count in sorted(failed.items()) if kind):
        report.add(Line("  failed", told, ""))
    for figure in case.zero:
        total = sum(result["measured"].get(figure) or 0 for result in results)
        report.add(Line(f"  {figure}", total, "in all seeds", "0", total == 0))
    for figure in case.counted:
        known = [value for one in results if (value := one["measured"].get(figure)) is not None]
        if known:
            report.add(Line(f"  {figure}", f"{sum(known)}/{len(known)}", "seeds"))
    for figure in case.shown:
        values = [result["measured"].get(figure) for result in results]
        known = [value for value in values if value is not None]
        if known:
            shown = f"median {statistics.median(known):.3g}, max {max(known, key=abs):.3g} (n={len(known)})"
            report.add(Line(f"  {figure}", shown, ""))


def seeds_of(text: str) -> range:
    """``20``: seeds 0 to 19; ``100-179``: these, the last one too.

    Raises:
        ValueError: it is neither.
    """
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(int(first))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add(
        "--case",
        action="append",
        choices=(*NAMES, *OF_STAND_IN, "all"),
        default=[],
        help="may be given several times",
    )
    text = "gloo-as-nccl: the probe takes Gloo's groups for NCCL's; stand-in-nccl: on the stand-in GPU (default: gloo)"
    add("--backend", choices=BACKENDS, default="gloo", help=text)
    text = "seeds 0 to N-1, or FIRST to LAST (default: as many as the goal asks for)"
    add("--seeds", type=seeds_of, metavar="N|FIRST-LAST", help=text)
    add("--out", type=Path, default=_ROOT / "benchmarks" / "results" / "campaign")
    add("--runs", type=Path, default=_ROOT / "runs" / "campaign", help="where the run folders go")
    add("--keep-runs", action="store_true", help="keep the run folders of passed seeds, too")
    add("--again", action="store_true", help="run seeds that have a result already")
    add(
        "--parallel",
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="jobs at once (their timing disturbs each other)",
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
    if arguments.backend == STAND_IN_NCCL:
        arguments.case = arguments.case or ["drawn"]
    known = OF_STAND_IN if arguments.backend == STAND_IN_NCCL else (*NAMES, "all")
    if unknown := [name for name in arguments.case if name not in known]:
        parser.error(f"{unknown[0]} is no case of {arguments.backend}: {', '.join(known)}")
    if arguments.backend == STAND_IN_NCCL:
        if "pairs-with-ports" in arguments.case and (lacking := missing()):
            parser.error(f"pairs-with-ports cannot run here: {lacking}")
        arguments.case = [OF_STAND_IN[name] for name in arguments.case]
    if not arguments.case and not arguments.convert:
        parser.error("which --case?")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    arguments.out, arguments.runs = arguments.out.resolve(), arguments.runs.resolve()
    if arguments.convert:
        print(f"{convert(arguments.convert, arguments.out)} seeds are lines of {arguments.out / NAME}")
        return 0
    wanted = NAMES if "all" in arguments.case else tuple(dict.fromkeys(arguments.case))
    if arguments.backend == AS_NCCL:
        wanted = tuple(on_backend(CASES[name], AS_NCCL).name for name in wanted if name in CASES)
    report = Report("campaign", quick=False)
    for name in wanted:
        if not arguments.summary_only:
            if name == REPLAY:
                run_replay(arguments)
            else:
                case = ALL_CASES[name]
                seeds = range(case.seeds) if arguments.seeds is None else arguments.seeds
                run_case(case, seeds, arguments)
                for reason, which in skipped(case, seeds).items():
                    report.leave_out(f"{name}: {len(which)} of {len(seeds)} seeds", reason)
    shown = wanted
    if "all" in arguments.case or arguments.summary_only:
        own = NAMES if arguments.backend == "gloo" else ()
        shown = [name for name in (*ALL_CASES, REPLAY) if name in own or kept(arguments.out, name)]
    for name in shown:
        summarise(report, arguments.out, name)
    report.finish(arguments.json or arguments.out / "summary.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
