"""``keepstep analyze``: verdicts on traces that are already there, keepstep's or another tool's."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from keepstep.analyze import Analysis, analyze, analyze_running
from keepstep.cli._parsing import Parser, print_json
from keepstep.core.errors import UsageError
from keepstep.core.layout import ParallelLayout
from keepstep.report.verdict import render
from keepstep.wire.address import parse_address

_ABOUT = (
    "Say what went wrong in a job from what it left behind. "
    "Exit code 0: nothing, 1: something, 2: cannot tell."
)


def main(argv: Sequence[str]) -> int:
    """Judge a trace; 1 when something was found."""
    parser = Parser("analyze", _ABOUT)
    text = "a run, flight-recorder dumps, a training log, call logs, an operation table or an answer of NCCL's RAS"
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
        analysis = analyze_running(parse_address(given.ras), layout, _wait)
    else:
        analysis = analyze(Path(given.ras or given.path), layout)
    if given.json:
        print_json({"incidents": analysis.incidents, "missing": analysis.missing})
    else:
        _print_text(analysis)
    return 1 if analysis.incidents else 0


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
