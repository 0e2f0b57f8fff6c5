"""Jobs rebuilt after public failure reports, each judged by what is true of it.

    python -m benchmarks.field [--cases 11,12] [--jobs N] [--part traces] [--json FILE]

Each ``train.py`` of the samples' folder ``field_cases`` runs under ``keepstep run`` as a user would start it, in a
folder of its own: nothing is injected, and nothing but ``truth.json`` says what is right. A job that goes on after its
limit is ended with SIGTERM. With ``--part traces`` the recorded cases (flight-recorder dumps, training logs) are judged
instead, by ``keepstep analyze``.

With ``--json FILE.json`` each result is written at once, to FILE-trials.jsonl, with the verdicts; the same command,
given again at the same commit of the code, goes on where it was ended. What a judge cannot decide is "noted".
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._intervals import wilson
from benchmarks._report import Line, Report, bench_arguments
from benchmarks._trials import Trials
from benchmarks.field.beside import untold
from benchmarks.field.judge import Seen, in_a_line, judge, last_line
from benchmarks.field.running import ROOT, give_up, missing, run_case, scrubbed
from benchmarks.field.truth import Truth, read

CONSOLE = 4000  # characters of the console's end that are kept
QUICK = "04,11,12,19,55"  # a kind each
GOAL = 0.95
SHOWN = ("name", "status", "why", "failed", "wall_s")
PACKAGES = ("keepstep", "torch", "transformers", "accelerate", "lightning")

Result = dict[str, Any]


def chosen(truths: Sequence[Truth], names: str, part: str) -> list[Truth]:
    """The cases of ``--cases`` (by number or name), or all of a part: ``jobs``, or the recorded ``traces``.

    Raises:
        ValueError: there is no such case.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        return [truth for truth in truths if truth.analyze == (part == "traces")]
    unknown = [name for name in wanted if not any(name in (truth.number, truth.name) for truth in truths)]
    if unknown:
        raise ValueError(f"no case {', '.join(unknown)}")
    return [truth for truth in truths if truth.number in wanted or truth.name in wanted]


def result_of(truth: Truth, seen: Seen, wall_s: float, hidden: Sequence[Path]) -> Result:
    """What is kept of a case: the judgement and what it was made of."""
    judged = judge(truth, seen)
    folder, samples = hidden
    told: Result = {
        "status": judged.status,
        "why": judged.why,
        "harmed": judged.harmed,
        "wrong_with_high": judged.wrong_with_high,
        "note": truth.note,
        "saw": [in_a_line(incident) for incident in seen.incidents] or [last_line(seen.run_text)],
        "exit_code": seen.exit_code,
        "cut_off": seen.cut_off,
        "ended": seen.ended,
        "restarts": seen.restarts,
        "wall_s": round(wall_s, 1),
        "load": round(os.getloadavg()[0], 1),
        "verdicts": seen.texts[-1:] if truth.analyze else list(seen.texts),
        "incidents": list(seen.incidents),
        "console": seen.run_text[-CONSOLE:],
    }
    return json.loads(scrubbed(json.dumps(told, ensure_ascii=False), folder, samples))


def summarise(report: Report, results: Sequence[tuple[Truth, Result]]) -> None:
    """The share that was right, who was harmed or wrongly named, and a line for each case."""
    judged = [result for _, result in results if result.get("status") in ("right", "wrong")]
    broken = [result for _, result in results if result["failed"]]
    right = sum(result["status"] == "right" for result in judged)
    total = len(judged) + len(broken)
    low, high = wilson(right, total)
    share = f"Wilson 95 %: {low:.2f} to {high:.2f}"
    report.add(Line("right", f"{right}/{total}", "cases", "≥ 95 % right", right >= GOAL * total, limit=share))
    for name, field in (("harmed", "harmed"), ("wrong culprit of confidence high", "wrong_with_high")):
        count = sum(bool(result.get(field)) for _, result in results)
        report.add(Line(name, count, "cases", "0", count == 0))
    for truth, result in results:
        if result["failed"]:
            report.add(Line(f"  {truth.name}", "wrong", "", limit=f"the bench: {result['failed']}"))
            continue
        said = "; ".join(result["why"])
        if truth.note:
            said = "; ".join(
                filter(None, (said, f"to be read: {truth.note}", f"seen: {', '.join(result['saw'])}"))
            )
        report.add(Line(f"  {truth.name}", result["status"], "", limit=said or None))


def summarise_beside(report: Report, folders: Sequence[Path]) -> None:
    """Whether our verdicts tell all that torchfrtrace finds on the same dumps."""
    total, left, read = 0, list[str](), 0
    for folder in sorted(folders):
        count, untold_here, failed = untold(folder)
        name = folder.parent.name if folder.name == "dumps" else folder.name
        total, read = total + count, read + (not failed)
        left += [f"{name}: {one}" for one in untold_here]
        if failed:
            report.leave_out(f"torchfrtrace on {name}", scrubbed(failed, folder, folder.parent.parent))
    told, limit = f"{total - len(left)}/{total}", f"of {len(folders)} sets of dumps, {read} read by it"
    report.add(
        Line("findings of torchfrtrace told", told, "", "all", not left, limit="; ".join([limit, *left]))
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_arguments("field", __doc__ or "")
    parser.add_argument("--cases", default="", metavar="11,12", help="only these, by number or name")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cases at a time (1)")
    parser.add_argument(
        "--part", choices=("jobs", "traces"), default="jobs", help="jobs that run, or recorded traces"
    )
    text = "give each job so many times its limit: on a machine that is busy beside"
    parser.add_argument("--stretch", type=float, default=1.0, metavar="FACTOR", help=text)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "field", help="where the run folders go")
    given = parser.parse_args(argv)
    report = Report("field", packages=PACKAGES, quick=given.quick)
    if given.samples is None or not (given.samples / "field_cases").is_dir():
        report.leave_out(
            "all cases", "--samples (or $KEEPSTEP_SAMPLES) names no folder with field_cases in it"
        )
        report.finish(given.json)
        return 0
    cases: Path = (given.samples / "field_cases").resolve()
    runs: Path = given.runs.resolve()
    try:
        truths = chosen(read(cases), given.cases or (QUICK if given.quick else ""), given.part)
    except ValueError as error:
        parser.error(str(error))
    trials = Trials(given.json and given.json.with_name(f"{given.json.stem}-trials.jsonl"), SHOWN)

    def measured(truth: Truth) -> tuple[Truth, Result]:
        def measure() -> Result:
            began_s = time.monotonic()
            seen = run_case(truth, cases / truth.name, runs / truth.name, given.stretch)
            return result_of(
                truth, seen, time.monotonic() - began_s, (runs / truth.name, given.samples.resolve())
            )

        return truth, trials.result(truth.name, 0, measure)

    able = [truth for truth in truths if not missing(truth)]
    for truth in truths:
        if why := missing(truth):
            report.leave_out(truth.name, why)
    with ThreadPoolExecutor(max(given.jobs, 1)) as pool:
        try:
            results = list(pool.map(measured, able))
        except BaseException:
            give_up()
            raise
    summarise(report, results)
    if given.part == "traces" and not given.cases:
        recorded = given.samples / "flight_recorder"
        summarise_beside(
            report, [*cases.glob("F*/dumps"), *(recorded.iterdir() if recorded.is_dir() else ())]
        )
    report.finish(given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
