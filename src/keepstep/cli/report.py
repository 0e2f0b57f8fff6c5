"""``keepstep report``: the verdicts of a run, one incident or all, as text, JSON or a plot."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from keepstep.cli._parsing import Parser, reach_run
from keepstep.core.errors import RunError, UsageError
from keepstep.core.incident import Incident
from keepstep.core.log_lines import one_line
from keepstep.report.incidents import incident_to_json, read_incidents
from keepstep.report.verdict import render
from keepstep.traces import Run, notices_of, open_run
from keepstep.view.incident_words import for_how_long
from keepstep.view.run_rows import age_s, row_of

_ABOUT = (
    "Print the incidents of a run, newest last. Exit code 0: healthy, 1: something was found, 2: cannot tell."
)


def main(argv: Sequence[str]) -> int:
    """Print the verdicts; 1 when there are any."""
    parser = Parser("report", _ABOUT)
    parser.add_run(elsewhere=True)
    text = "number of one incident; all when left out"
    parser.add_argument("incident", type=int, nargs="?", metavar="INCIDENT", help=text)
    parser.add_json("print JSON, one incident a line")
    text = "draw the step times into FILE (.png or .svg)"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=text)
    text = (
        "write the run's page into one FILE (.html) that any browser opens and that asks nobody for anything"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help=text)
    given = parser.parse(argv)
    run, incident = given.run, given.incident
    reach_run(run)
    opened = open_run(run)
    known = read_incidents(opened.path / "incidents")
    chosen = known if incident is None else [one for one in known if one.number == incident]
    if incident is not None and not chosen:
        numbers = ", ".join(str(one.number) for one in known) or "none"
        raise UsageError(f"{run}: no incident {incident} (incidents of this run: {numbers})")
    if given.json:
        for one in chosen:
            print(incident_to_json(one, indent=0).decode())
    else:
        _print_text(opened, chosen, run, timeline=incident is not None)
    if given.plot is not None:
        _draw(opened, chosen, given.plot)
    if given.html is not None:
        _write_page(opened, run, given.html)
    if chosen or (incident is None and _failure(opened)):
        return 1
    return 2 if _doubt(opened) else 0


def _print_text(run: Run, incidents: list[Incident], name: str, *, timeline: bool) -> None:
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for one in incidents:
        print(render(one, color=color, run=name, timeline=timeline))
        print()
    if not incidents:
        steps = {row.step for row in run.iterations()}
        newest = int((run.status() or {}).get("newest_step", -1))
        span = f"step {newest}" if newest >= 0 else "no finished step yet"
        span = f"{len(steps)} steps ({min(steps)} to {max(steps)})" if steps else span
        failure = _failure(run)
        if failure:
            print(one_line(f"no incident, but the job failed: {failure}; {span}"))
        elif doubt := _doubt(run):
            print(one_line(f"cannot tell: {doubt}"))
        else:
            print(f"healthy: {span}, no incident")


def _failure(run: Run) -> str:
    """How the job failed, perhaps before it was watched; empty when it did not, or a signal ended it."""
    end = run.end() or {}
    code, reason = end.get("exit_code", 0), str(end.get("reason", ""))
    return "" if code == 0 or reason.startswith("signal ") else f"{reason} (exit code {code})"


def _doubt(run: Run) -> str:
    """Why a job without an incident may not be well; empty where it was watched."""
    if run.end() is not None:
        if next(run.iterations(), None) is not None:
            return ""
        why = "; ".join(notices_of(run.status() or {})) or f"see {run.path}/controller.log"
        return f"the job ended and nothing of it was recorded; {why}"
    if (run.status() or {}).get("unwatched_since_unix_s"):
        return f"an operator has it not watched: `keepstep ctl {run.path.name} watch on`"
    now_s = time.time()
    row = row_of(run.path, now_s)
    if row.state != "silent":
        return ""
    return f"no news for {for_how_long(age_s(row, now_s) or 0.0)}: see {run.path}/controller.log"


def _draw(run: Run, incidents: list[Incident], out: Path) -> None:
    from keepstep.report.plot import plot_step_times

    points = ((row.rank, row.step, row.duration_s) for row in run.iterations())
    data = plot_step_times(points, incidents, out, title=run.path.name)
    print(f"wrote {out} and its data {data}", file=sys.stderr)


def _write_page(run: Run, name: str, out: Path) -> None:
    from keepstep.view.run_source import open_source
    from keepstep.view.web.one_file import page_in_one_file

    with contextlib.closing(open_source(run.path)) as source:
        page = page_in_one_file(source, name, run.path)
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{out}: cannot write the page: {error.strerror}; name another file") from error
    print(f"wrote {out} ({len(page) / 1e6:.1f} MB)", file=sys.stderr)
