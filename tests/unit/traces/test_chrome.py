from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np

from keepstep.core.events import Flag, Kind, Life, Op
from keepstep.core.summary import GroupInfo, IterationSummary
from keepstep.ring import RECORD, RingReader, RingWriter, create
from keepstep.traces.chrome import Span, spans_of, write_chrome_trace
from keepstep.traces.job_counters import Counter, StepTimes


def test_the_life_of_a_communicator_has_a_track_of_its_own() -> None:
    ring = create(64)
    writer = RingWriter(ring, rank=0, world_size=1)
    group = writer.group("nccl-1", [0], "nccl", "rank 0 of 1")
    writer.start(int(Kind.COMMUNICATOR), int(Life.SPLIT), group, -1, 0, int(Flag.ENQUEUED), 0)()
    writer.start(int(Kind.COLLECTIVE), int(Op.ALLREDUCE), group, -1, 4, int(Flag.ENQUEUED), 0)()
    reader = RingReader(ring)
    spans = list(spans_of(reader.snapshot(), reader.groups(), shift_ns=0, now_ns=0))
    os.close(ring)
    assert [(span.track, span.name) for span in spans] == [
        ("communicators", "SPLIT"),
        ("group nccl-1", "ALLREDUCE"),
    ]


def test_what_the_gpu_did_begins_when_it_came_to_it() -> None:
    rows = np.zeros(2, RECORD)
    rows["kind"], rows["op"], rows["flags"] = (
        int(Kind.COLLECTIVE),
        int(Op.ALLREDUCE),
        Flag.ENQUEUED | Flag.TIMED,
    )
    rows["start_ns"], rows["wait_ns"], rows["end_ns"] = (1000, 2000), (5000, 0), (9000, 0)
    groups = [GroupInfo("nccl-1", (0,), "nccl", "")]
    done, waits = spans_of(rows, groups, shift_ns=0, now_ns=10_000)
    assert (done.track, done.start_us, done.end_us) == ("group nccl-1 on the GPU", 5.0, 9.0)
    assert done.args["called_us_before"] == 4.0
    assert (waits.start_us, waits.end_us, waits.args["in_flight"]) == (2.0, 10.0, True)


def _row(
    rank: int, step: int, start_s: float, duration_s: float = 1.0, self_s: float = 0.75
) -> IterationSummary:
    return IterationSummary(
        rank=rank, step=step, start_s=start_s, duration_s=duration_s, self_s=self_s, blocked_s=0
    )


def test_counters_of_pace_of_what_is_lost_and_of_what_is_waited() -> None:
    times = StepTimes()
    for rank in (1, 0):
        for step in range(8):
            slow = step >= 6
            times.add(_row(rank, step, 100.0 + step + 0.5 * rank, 2.0 if slow else 1.0))
    pace, lost, waiting = times.counters()
    assert [point[1] for point in pace.points] == [1.0] * 6 + [2.0] * 2
    assert [point[0] for point in pace.points][:2] == [100e6, 101e6]  # on the clock of rank 0
    assert [point[1] for point in lost.points] == [0.0] * 6 + [0.5] * 2
    assert [point[1] for point in waiting.points] == [0.25] * 6 + [0.625] * 2
    assert times.starts()[7] == 107.0


def test_a_step_that_is_made_again_is_another_one_and_one_that_is_written_late_is_not() -> None:
    times = StepTimes()
    for step, start_s in ((0, 10.0), (2, 12.0), (1, 11.0), (3, 13.0), (2, 20.0), (3, 21.0)):
        times.add(_row(0, step, start_s))
    pace = times.counters()[0]
    assert [time_us / 1e6 for time_us, _ in pace.points] == [10.0, 11.0, 12.0, 13.0, 20.0, 21.0]
    assert times.starts() == {0: 10.0, 1: 11.0, 2: 20.0, 3: 21.0}


def test_a_trace_has_what_perfettos_importer_takes(tmp_path: Path) -> None:
    spans = [Span("a", "x", 0.0, 10.0, {}), Span("a", "y", 2.0, 5.0, {}), Span("a", "z", 8.0, 12.0, {})]
    counters = [Counter("pace", "seconds", ((0.0, 0.5), (10.0, 1.5)))]
    write_chrome_trace(tmp_path / "trace.json.gz", {0: spans, 3: []}, [(4.0, "incident 0001")], counters)
    with gzip.open(tmp_path / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i", "C"}
    assert all(event["s"] == "g" for event in events if event["ph"] == "i")
    told = [(event["ts"], event["name"], event["args"]) for event in events if event["ph"] == "C"]
    assert told == [(0.0, "pace", {"seconds": 0.5}), (10.0, "pace", {"seconds": 1.5})]
    assert not {event["pid"] for event in events if event["ph"] in "Ci"} & {0, 3}
    bars: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            bars.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    assert all(
        end <= first or begin >= last or begin <= first <= last <= end or first <= begin <= end <= last
        for track in bars.values()
        for begin, end in track
        for first, last in track
    )
