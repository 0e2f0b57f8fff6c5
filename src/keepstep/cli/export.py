"""``keepstep export``: a run's events as a Chrome trace."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from keepstep.cli._parsing import Parser
from keepstep.core.errors import RingError, RunError
from keepstep.core.log_lines import one_line
from keepstep.report.incidents import read_incidents
from keepstep.ring import RingReader
from keepstep.traces import Run, open_run, write_chrome_trace
from keepstep.traces.chrome import Span, spans_of

_ABOUT = "Write the recorded operations and phases of all ranks; open the file at https://ui.perfetto.dev."


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
            ranks[rank] = _read(path)
        except RingError as error:  # noqa: PERF203 - a damaged ring spoils no other
            left_out.append(f"rank {rank} left out: {error}")
    if not ranks:
        raise RunError(f"{run}: none of its rings can be read: {left_out[0]}")
    marks: list[tuple[float, str]] = []
    try:
        marks = list(_marks(opened))
    except RunError as error:
        left_out.append(f"marks of incidents left out: {error}")
    try:
        count = write_chrome_trace(output, ranks, marks)
    except OSError as error:
        raise RunError(
            f"{output}: cannot write the trace: {error.strerror}; name another file with -o"
        ) from error
    for line in left_out:
        print(f"keepstep: {one_line(line)}", file=sys.stderr)
    print(f"wrote {output}: {count} bars of {len(ranks)} ranks", file=sys.stderr)
    return 0


def _read(path: Path) -> list[Span]:
    """The bars of a ring. Raises RingError."""
    reader = RingReader(str(path))
    header, records = reader.header, reader.snapshot()
    last_ns = int(max(records["start_ns"].max(), records["end_ns"].max())) if len(records) else 0
    now_ns = time.monotonic_ns() if path.is_relative_to("/proc") else last_ns
    shift_ns = header.realtime_ns - header.monotonic_ns
    return list(spans_of(records, reader.groups(), shift_ns=shift_ns, now_ns=now_ns))


def _marks(run: Run) -> Iterator[tuple[float, str]]:
    """The onset and relief of each incident, at the start of that step on the clock of rank 0."""
    starts = {row.step: row.start_s for row in run.iterations() if row.rank == 0}
    for incident in read_incidents(run.path / "incidents"):
        for step, word in ((incident.onset_step, "onset"), (incident.relief_step, "relief")):
            if step is not None and step in starts:
                yield starts[step] * 1e6, f"incident {incident.number:04d} {incident.kind}: {word}"
