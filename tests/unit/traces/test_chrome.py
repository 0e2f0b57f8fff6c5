from __future__ import annotations

import os

import numpy as np

from keepstep.core.events import Flag, Kind, Life, Op
from keepstep.core.summary import GroupInfo
from keepstep.ring import RECORD, RingReader, RingWriter, create
from keepstep.traces.chrome import spans_of


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
