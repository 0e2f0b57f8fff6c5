"""``keepstep analyze``: verdicts on traces that are already there, keepstep's or another tool's."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from keepstep.analyze import Analysis, analyze
from keepstep.cli._parsing import Parser, print_json
from keepstep.core.layout import ParallelLayout
from keepstep.report.verdict import render

_ABOUT = (
    "Say what went wrong in a job from what it left behind. "
    "Exit code 0: nothing, 1: something, 2: cannot tell."
)


def main(argv: Sequence[str]) -> int:
    """Judge a trace; 1 when something was found."""
    parser = Parser("analyze", _ABOUT)
    text = "a run, flight-recorder dumps, a training log, call logs or an operation table"
    parser.add_argument("path", type=Path, metavar="PATH", help=text)
    text = "parallel sizes of the job, fastest rank first"
    parser.add_argument("--layout", default="", metavar="tp2-pp4-dp8", help=text)
    parser.add_json('print {"incidents": […], "missing": […]} instead of text')
    given = parser.parse(argv)
    analysis = analyze(given.path, ParallelLayout.declared(given.layout) if given.layout else None)
    if given.json:
        print_json({"incidents": analysis.incidents, "missing": analysis.missing})
    else:
        _print_text(analysis)
    return 1 if analysis.incidents else 0


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
