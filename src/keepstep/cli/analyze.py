"""``keepstep analyze``: verdicts on traces that are already there, keepstep's or another tool's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from keepstep.analyze import Analysis
from keepstep.analyze import analyze as judge
from keepstep.core.layout import ParallelLayout
from keepstep.report.verdict import render


def analyze(
    path: Annotated[
        Path,
        typer.Argument(help="A run, flight-recorder dumps, a training log, call logs or an operation table."),
    ],
    layout: Annotated[
        str, typer.Option("--layout", help="Parallel sizes of the job, fastest rank first: tp2-pp4-dp8.")
    ] = "",
    json: Annotated[
        bool, typer.Option("--json", help='Print {"incidents": […], "missing": […]} instead of text.')
    ] = False,
) -> int:
    """Say what went wrong in a job from what it left behind. Exit code 0: nothing, 1: something, 2: cannot tell."""
    analysis = judge(path, ParallelLayout.declared(layout) if layout else None)
    if json:
        content = {"incidents": analysis.incidents, "missing": analysis.missing}
        sys.stdout.write(msgspec.json.encode(content).decode() + "\n")
    else:
        _print_text(analysis)
    return 1 if analysis.incidents else 0


def _print_text(analysis: Analysis) -> None:
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for incident in analysis.incidents:
        # There is no run to ask further: the line that says how is left out.
        print(render(incident, color=color).rsplit("\n", 1)[0])
        print()
    if not analysis.incidents:
        print(f"nothing found ({analysis.source})")
    for line in analysis.missing:
        print(f"missing   {line}")
