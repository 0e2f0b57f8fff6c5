"""A writer of Chrome Trace Event JSON (gzipped), which Perfetto opens: the pid is the rank, bars are strictly nested.

The format is that of the public document "Trace Event Format". Used are events ``X`` (complete), ``M`` (metadata),
``i`` (instant) and ``C`` (counter).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from keepstep.core.events import Device, Flag, Kind, Life, Op, Phase
from keepstep.core.group_names import shown_name
from keepstep.core.summary import GroupInfo
from keepstep.traces.job_counters import Counter

_OPS = {int(op): op.name for op in Op}
_LIVES = {int(op): op.name for op in Life}
_DEVICES = {
    int(Device.ITERATION): ("iterations", "iteration"),
    int(Device.WAIT): ("waits for communication", "wait"),
    int(Device.BLIND): ("iterations", "iteration with graphs"),
}
_JOB = 1 << 24  # the pid of what is of the job: no rank has it
_PHASES = {int(phase): phase.title for phase in Phase}


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of the trace, with times in microseconds. Bars of one ``track`` stand together."""

    track: str
    name: str
    start_us: float
    end_us: float
    args: dict[str, Any]


def write_chrome_trace(
    out: Path,
    ranks: Mapping[int, Iterable[Span]],
    instants: Iterable[tuple[float, str]] = (),
    counters: Sequence[Counter] = (),
) -> int:
    """Write the spans of each rank to ``out``, gzipped whatever its name; returns the number of bars.

    ``instants``: marks for the whole job, such as the onset of an incident, as (microseconds, text). ``counters``: the
    job's, above all ranks.
    """
    encoder = msgspec.json.Encoder()
    count = 0
    with gzip.open(out, "wb", compresslevel=5) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = b""
        for event in _events(ranks, instants, counters):
            file.write(separator + encoder.encode(event))
            separator = b",\n"
            count += event["ph"] == "X"
        file.write(b"\n]}\n")
    return count


def spans_of(records: Any, groups: list[GroupInfo], *, shift_ns: int, now_ns: int) -> Iterator[Span]:
    """The spans of ring records, which are a numpy array of ``keepstep.ring.RECORD``.

    ``shift_ns`` is added to every time: the trace's clock less the node's monotonic clock. An operation in flight ends
    at ``now_ns`` (on the clock of the records) and is marked so.
    """
    for row in records:
        kind, op = int(row["kind"]), int(row["op"])
        start_ns, end_ns = int(row["start_ns"]), int(row["end_ns"])
        args: dict[str, Any] = {}
        if kind == Kind.PHASE:
            track, name = "phases", _PHASES.get(op, f"phase {op}")
        elif kind == Kind.COMMUNICATOR:
            track, name = "communicators", _LIVES.get(op, f"call {op}")
        elif kind == Kind.DEVICE:
            track, name = _DEVICES.get(op, ("measured", f"kind {op}"))
        else:
            group = int(row["group"])
            known = shown_name(groups[group].name) if 0 <= group < len(groups) else str(group)
            name = _OPS.get(op, f"op {op}")
            peer = int(row["peer"])
            track = f"group {known}" if kind == Kind.COLLECTIVE else "point-to-point"
            args = {"group": known, "seq": int(row["seq"]), "bytes": int(row["bytes"])}
            if kind == Kind.P2P:
                args["peer"] = peer
                name = f"{name} {'to' if op == Op.SEND else 'from'} {peer}"
        if int(row["flags"]) & Flag.TIMED:  # the bar is the GPU's work, not the call that enqueued it
            track += " on the GPU"
            args["called_us_before"] = (max(int(row["wait_ns"]), start_ns) - start_ns) / 1e3
            start_ns = max(int(row["wait_ns"]), start_ns)
        if end_ns == 0:
            end_ns, args["in_flight"] = max(now_ns, start_ns), True
        yield Span(track, name, (start_ns + shift_ns) / 1e3, (end_ns + shift_ns) / 1e3, args)


def _events(
    ranks: Mapping[int, Iterable[Span]], instants: Iterable[tuple[float, str]], counters: Sequence[Counter]
) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": _JOB, "name": "process_name", "args": {"name": "job"}}
    yield {"ph": "M", "pid": _JOB, "name": "process_sort_index", "args": {"sort_index": -1}}
    for time_us, text in instants:
        yield {"ph": "i", "s": "g", "pid": _JOB, "tid": 0, "ts": time_us, "name": text}
    for counter in counters:
        for time_us, value in counter.points:
            args = {counter.unit: value}
            yield {"ph": "C", "pid": _JOB, "tid": 0, "ts": time_us, "name": counter.name, "args": args}
    for rank in sorted(ranks):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        yield from _rank_events(rank, ranks[rank])


def _rank_events(rank: int, spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    tracks: dict[str, list[Span]] = {}
    for span in spans:
        tracks.setdefault(span.track, []).append(span)
    tid = 0
    for track in sorted(tracks, key=lambda name: (name != "phases", name)):
        lanes: list[list[float]] = []  # the ends of bars that are open in each lane, innermost last
        for span in sorted(tracks[track], key=lambda s: (s.start_us, -s.end_us)):
            lane = _place(lanes, span)
            yield {
                "ph": "X",
                "pid": rank,
                "tid": tid + lane,
                "ts": span.start_us,
                "dur": max(span.end_us - span.start_us, 0.0),
                "name": span.name,
                "cat": span.track,
                "args": span.args,
            }
        for lane in range(len(lanes)):
            label = track if lane == 0 else f"{track} (+{lane})"
            yield {"ph": "M", "pid": rank, "tid": tid + lane, "name": "thread_name", "args": {"name": label}}
        tid += max(len(lanes), 1)


def _place(lanes: list[list[float]], span: Span) -> int:
    """The number of the first lane in which the bar overlaps no other except by nesting; made if there is none."""
    for index, open_ends in enumerate(lanes):
        while open_ends and open_ends[-1] <= span.start_us:
            open_ends.pop()
        if not open_ends or span.end_us <= open_ends[-1]:
            open_ends.append(span.end_us)
            return index
    lanes.append([span.end_us])
    return len(lanes) - 1
