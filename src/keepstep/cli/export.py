"""``keepstep export``: a run's events as a Chrome trace."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from keepstep.cli._parsing import Parser
from keepstep.core.errors import RingError, RunError
from keepstep.core.incident import Incident
from keepstep.core.log_lines import one_line
from keepstep.report.incidents import read_incidents
from keepstep.report.wording import done
from keepstep.traces import Run, open_run, write_chrome_trace
from keepstep.traces.chrome import Span
from keepstep.traces.job_counters import StepTimes
from keepstep.traces.ring_spans import read_spans

_LAST_S = 1e11  # a later time is no time of a run

_ABOUT = (
    "Write the recorded operations and phases of all ranks, the job's pace, what was lost and waited, and marks of "
    "its incidents; open the file at https://ui.perfetto.dev."
)


def main(argv: Sequence[str]) -> int:
    """Write the trace."""
    parser = Parser("export", _ABOUT)
    parser.add_run()
    text = "file to write, e.g. trace.json.gz"
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=text)
    given = parser.parse(argv)
    run, output = given.run, given.output
    opened = open_run(run)
    rings = opened.rings()
    if not rings:
        raise RunError(
            f"{run}: no rings saved yet; they are saved at incidents that are told, and at the end of the job"
        )
    ranks: dict[int, list[Span]] = {}
    left_out: list[str] = []
    for rank, path in rings.items():
        try:
            ranks[rank] = read_spans(path)
        except RingError as error:  # noqa: PERF203 - a damaged ring spoils no other
            left_out.append(f"rank {rank} left out: {error}")
    if not ranks:
        raise RunError(f"{run}: none of its rings can be read: {left_out[0]}")
    times = StepTimes()
    for row in opened.iterations():
        times.add(row)
    marks: list[tuple[float, str]] = []
    try:
        marks = sorted(_marks(opened, times.starts()))
    except RunError as error:
        left_out.append(f"marks of incidents left out: {error}")
    try:
        count = write_chrome_trace(output, ranks, marks, times.counters())
    except OSError as error:
        raise RunError(
            f"{output}: cannot write the trace: {error.strerror}; name another file with -o"
        ) from error
    for line in left_out:
        print(f"keepstep: {one_line(line)}", file=sys.stderr)
    print(f"wrote {output}: {count} bars of {len(ranks)} ranks", file=sys.stderr)
    return 0


def _marks(run: Run, starts: Mapping[int, float]) -> Iterator[tuple[float, str]]:
    """The onset of each incident, when it was noticed and told, what was done about it, and its end.

    Onset and end stand at the start of their step on the clock of the lowest rank, where that is known.
    """
    for incident in read_incidents(run.path / "incidents"):
        ends = {"onset": incident.onset_step, "relief": incident.relief_step}
        for word, unix_s, text in _moments(incident):
            step = ends.get(word)
            start_s = starts.get(step) if step is not None else None
            at_s = unix_s if start_s is None else start_s
            if at_s is not None and abs(at_s) < _LAST_S:
                told = f"incident {incident.number:04d} {incident.kind}: {word}{f': {text}' if text else ''}"
                yield at_s * 1e6, one_line(told)


def _moments(incident: Incident) -> Iterator[tuple[str, float | None, str]]:
    """What happened, when (Unix seconds, None: not known) and in more words."""
    yield "onset", incident.onset_unix_s, ""
    for event in incident.events:
        yield event.what, event.unix_s, event.detail
    for action in incident.actions:
        yield "action", action.begun_unix_s, done(action)
    if incident.status != "open":
        yield "relief" if incident.status == "relieved" else "end", incident.closed_unix_s, ""
