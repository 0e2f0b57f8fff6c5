from __future__ import annotations

import os

from keepstep.core.events import Flag, Kind, Life, Op
from keepstep.ring import RingReader, RingWriter, create
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
