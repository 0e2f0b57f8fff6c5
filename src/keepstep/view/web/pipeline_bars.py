"""Forward, backward and waiting of a pipeline's ranks, one step before an onset and one after, from saved rings.

The step after the onset of a hang does not end: it is drawn up to its last call, and what is in flight to the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keepstep.core.errors import KeepstepError, RingError
from keepstep.core.events import Phase
from keepstep.core.incident import Incident
from keepstep.core.layout import ParallelLayout
from keepstep.core.log_lines import one_line
from keepstep.core.summary import IterationSummary
from keepstep.traces import Run, open_run
from keepstep.traces.chrome import Span
from keepstep.traces.ring_spans import read_spans

_MOST_RANKS = 16
_MOST_BARS = 160  # of a rank in one step
_BEYOND = 0.15  # how much longer a step that does not end is drawn than what was seen of it
_STANDING = frozenset({"hang", "desync"})
_IN_FLIGHT = "in_flight"  # among a span's arguments: it has not ended, and its end is when the ring was read
_PHASES = {
    Phase.MODEL.title: "forward",
    Phase.BACKWARD.title: "backward",
    Phase.OPTIMIZER.title: "optimizer",
    Phase.DATA.title: "data",
    Phase.EVALUATION.title: "other",
    Phase.CHECKPOINT.title: "other",
    Phase.HOLD.title: "other",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A block of one rank, in seconds from the step's start."""

    what: str  # forward, backward, optimizer, data, other, wait
    start_s: float
    end_s: float
    name: str


def pipeline_content(path: Path | None, incident: Incident, layout: ParallelLayout | None) -> dict[str, Any]:
    """The two steps of the culprit's pipeline; a ``reason`` where there is nothing to draw."""
    if path is None:
        return {"reason": "the run's folder is not here, and with it its rings"}
    if incident.onset_step is None:
        return {"reason": "this incident has no onset step"}
    try:
        run = open_run(path)
        rings = _read_at_one_time(run)
    except KeepstepError as error:
        return {"reason": one_line(str(error))}
    if not rings:
        return {"reason": "no rings saved yet: they are saved at incidents and at the end of the job"}
    chosen = [rank for rank in _pipeline_of(incident, layout, sorted(rings)) if rank in rings][:_MOST_RANKS]
    spans: dict[int, list[Span]] = {}
    for rank in chosen:
        try:
            spans[rank] = read_spans(rings[rank])
        except RingError:  # noqa: PERF203 - a damaged ring spoils no other
            continue
    if not spans:
        return {"reason": "the rings of this pipeline cannot be read"}
    return two_steps(run.iterations(), incident, spans)


def _read_at_one_time(run: Run) -> dict[int, Path]:
    """The run's rings: those that live where all live on this host, else the saved ones, as live ones are newer."""
    rings = run.rings()
    saved = {rank: run.path / "rings" / f"rank-{rank:05d}.ring" for rank in rings}
    if all(path != saved[rank] for rank, path in rings.items()):
        return rings
    return {rank: saved[rank] if saved[rank].is_file() else path for rank, path in rings.items()}


def _pipeline_of(incident: Incident, layout: ParallelLayout | None, known: Sequence[int]) -> list[int]:
    """The ranks of the first culprit's pipeline, first stage first; else those around it."""
    culprit = next((one for one in incident.culprits if one.rank is not None or one.link is not None), None)
    rank = None
    if culprit is not None:
        rank = culprit.rank if culprit.rank is not None else culprit.link.ranks[0] if culprit.link else None
    if rank is None:
        return list(known)
    if layout is not None and layout.pp > 1 and rank < layout.world_size:
        return list(layout.group_of(rank, "pp"))
    others = sorted(known, key=lambda one: abs(one - rank))[:_MOST_RANKS]
    return sorted(others)


def two_steps(
    rows: Iterable[IterationSummary], incident: Incident, spans: dict[int, list[Span]]
) -> dict[str, Any]:
    """The last healthy step and the first of the new pace that every ring still has; ``rows`` are of all steps."""
    onset = incident.onset_step or 0
    times = _step_times(rows, spans, onset)
    first_us = max(min(span.start_us for span in its) for its in spans.values() if its)
    kept = {step: (start, end) for step, (start, end) in times.items() if start >= first_us / 1e6}
    before = max((step for step in kept if step < onset), default=None)
    until = incident.relief_step if incident.relief_step is not None else onset + 8
    after = min((step for step in kept if onset < step < max(until, onset + 2)), default=None)
    after = onset if after is None and onset in kept else after
    steps = [(word, step) for word, step in (("before", before), ("after", after)) if step is not None]
    if after is None and before is not None and before == onset - 1 and incident.kind in _STANDING:
        kept[onset], spans = _under_way(kept[before][1], spans)
        steps.append(("stuck", onset))
    if not steps:
        return {
            "reason": f"the saved rings hold no whole step beside step {onset}: they keep the newest events only"
        }
    culprits = [one.rank for one in incident.culprits if one.rank is not None]
    return {
        "incident": incident.number,
        "onset_step": onset,
        "culprits": culprits[:_MOST_RANKS],
        "steps": [
            {
                "when": word,
                "step": step,
                "seconds": round(kept[step][1] - kept[step][0], 6),
                "ranks": [
                    {"rank": rank, "bars": [_cell(bar) for bar in bars_in(its, *kept[step])]}
                    for rank, its in spans.items()
                ],
            }
            for word, step in steps
        ],
    }


def _under_way(
    start_s: float, spans: dict[int, list[Span]]
) -> tuple[tuple[float, float], dict[int, list[Span]]]:
    """Start and end of what is drawn of a step that does not end, and the spans, those in flight up to there."""
    seen = [span for its in spans.values() for span in its]
    last_s = max(span.start_us if _IN_FLIGHT in span.args else span.end_us for span in seen) / 1e6
    end_s = start_s + max(last_s - start_s, 1e-3) * (1 + _BEYOND)
    reaching = {
        rank: [replace(span, end_us=end_s * 1e6) if _IN_FLIGHT in span.args else span for span in its]
        for rank, its in spans.items()
    }
    return (start_s, end_s), reaching


def _step_times(
    rows: Iterable[IterationSummary], spans: dict[int, list[Span]], onset: int
) -> dict[int, tuple[float, float]]:
    """Start and end (Unix seconds) of the steps around the onset, over the drawn ranks."""
    found: dict[int, tuple[float, float]] = {}
    for row in rows:
        if row.rank in spans and abs(row.step - onset) <= 64:
            start, end = found.get(row.step, (row.start_s, 0.0))
            found[row.step] = min(start, row.start_s), max(end, row.start_s + row.duration_s)
    return found


def bars_in(spans: Iterable[Span], start_s: float, end_s: float) -> list[Bar]:
    """The blocks of one rank that lie in a stretch of time, cut at its ends; the largest where there are many."""
    found: list[Bar] = []
    for span in spans:
        low, high = max(span.start_us / 1e6, start_s), min(span.end_us / 1e6, end_s)
        if high <= low:
            continue
        if span.track == "phases":
            what = _PHASES.get(span.name)
        else:
            what = "wait" if span.track.startswith(("group ", "point-to-point")) else None
        if what is not None:
            found.append(Bar(what, low - start_s, high - start_s, span.name))
    found.sort(key=lambda bar: bar.start_s - bar.end_s)
    # Phases lie below what waits inside of them.
    return sorted(found[:_MOST_BARS], key=lambda bar: (bar.what == "wait", bar.start_s))


def _cell(bar: Bar) -> list[Any]:
    return [bar.what, round(bar.start_s, 5), round(bar.end_s, 5), bar.name[:60]]
