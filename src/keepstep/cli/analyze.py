"""``keepstep analyze``: verdicts on traces that are already there, keepstep's or another tool's."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from keepstep.analyze import Analysis, analyze, analyze_running
from keepstep.cli._parsing import Parser, print_json
from keepstep.cli.why import failure_in, page_of
from keepstep.core.errors import TraceError, UsageError
from keepstep.core.layout import ParallelLayout
from keepstep.core.told import Failure, Words
from keepstep.detect.own_tables import matcher_in_force
from keepstep.report.failure_page import as_json
from keepstep.report.verdict import render
from keepstep.traces.log_text import is_text
from keepstep.wire.address import parse_address

_ABOUT = (
    "Say what went wrong in a job from what it left behind. "
    "Exit code 0: nothing, 1: something, 2: cannot tell."
)


def main(argv: Sequence[str]) -> int:
    """Judge a trace; 1 when something was found."""
    parser = Parser("analyze", _ABOUT)
    text = "a run, flight-recorder dumps, a log, call logs, an operation table or an answer of NCCL's RAS"
    parser.add_argument("path", type=Path, metavar="PATH", nargs="?", help=text)
    text = "ask NCCL's RAS about a running job (localhost:28028 on its nodes), or read an answer of it"
    parser.add_argument("--ras", metavar="HOST:PORT|FILE", help=text)
    text = "parallel sizes of the job, fastest rank first"
    parser.add_argument("--layout", default="", metavar="tp2-pp4-dp8", help=text)
    parser.add_json('print {"incidents": […], "missing": […]} instead of text')
    given = parser.parse(argv)
    if (given.path is None) == (given.ras is None):
        raise UsageError("analyze wants either PATH or --ras HOST:PORT|FILE")
    layout = ParallelLayout.declared(given.layout) if given.layout else None
    if given.ras is not None and ":" in given.ras and not os.path.lexists(given.ras):
        analysis, why = analyze_running(parse_address(given.ras), layout, _wait), None
    elif given.ras is not None:
        analysis, why = analyze(Path(given.ras), layout), None
    else:
        analysis, why = _analyze(given.path, layout)
    if given.json:
        told = {"why": as_json(why[0])} if why else {}
        print_json({"incidents": analysis.incidents, "missing": analysis.missing, **told})
    elif why:
        print(page_of(given.path, *why))
    else:
        _print_text(analysis)
    return 1 if analysis.incidents or why else 0


def _analyze(
    path: Path, layout: ParallelLayout | None
) -> tuple[Analysis, tuple[Failure, list[Words]] | None]:
    """The analysis of a trace, and where that finds nothing the failure that it tells as a log of any launcher."""
    try:
        analysis = analyze(path, layout)
    except TraceError:
        if (why := _why(path)) is None:
            raise
        return Analysis("log", ()), why
    return analysis, None if analysis.incidents else _why(path)


def _why(path: Path) -> tuple[Failure, list[Words]] | None:
    """The failure that a log tells, with its words; None where it tells of none, or is no log."""
    if not path.is_file() or not is_text(path):
        return None
    with contextlib.suppress(TraceError):
        failure, words = failure_in(path, matcher_in_force())
        return (failure, words) if failure.cause_class else None
    return None


def _wait(seconds: float) -> None:
    print(f"asks again in {seconds:.0f} s: counts that move on are no hang", file=sys.stderr)
    time.sleep(seconds)


def _print_text(analysis: Analysis) -> None:
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for incident in analysis.incidents:
        # The last line, which names a command for the run, is left out: a trace is no run.
        print(render(incident, color=color).rsplit("\n", 1)[0])
        print()
    if not analysis.incidents:
        print(f"nothing found ({analysis.source})")
    for line in analysis.missing:
        print(f"missing   {line}")
