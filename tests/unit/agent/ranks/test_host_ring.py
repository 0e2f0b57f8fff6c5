from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from keepstep.agent.ranks.host_ring import HostRing, process_groups
from keepstep.agent.ranks.track import RankTrack
from keepstep.agent.ranks.watched_ring import WatchedRing
from keepstep.core.events import Flag, Kind, Op, element_bits
from keepstep.ring import RingReader, RingWriter, create

ENQUEUED = int(Flag.ENQUEUED)
COLLECTIVE, LIFE, ALLREDUCE = int(Kind.COLLECTIVE), int(Kind.COMMUNICATOR), int(Op.ALLREDUCE)


@pytest.fixture
def ring() -> Iterator[int]:
    descriptor = create(64)
    yield descriptor
    os.close(descriptor)


def test_the_agent_reads_what_the_probe_wrote_and_not_what_the_shim_did(ring: int) -> None:
    probe, shim = (RingWriter(ring, rank=0, world_size=2, join=True) for _ in range(2))
    communicator = shim.group("nccl-1", [0, 1], "nccl", "rank 0 of 2")
    group = probe.group("0", [0, 1], "cuda:nccl", "default")
    shim.start(LIFE, 1, communicator, 0, 2, ENQUEUED, 0)()
    begun = probe.start(COLLECTIVE, ALLREDUCE, group, -1, 8, 0, 0)
    shim.start(COLLECTIVE, ALLREDUCE, communicator, -1, 8, ENQUEUED, 0)
    reader = HostRing(ring)
    batch = reader.poll()
    assert batch.started[["group", "bytes"]].tolist() == [(group, 8)]
    assert len(batch.finished) == 0
    assert reader.in_flight()["group"].tolist() == [group]
    assert reader.streams()["group"].tolist() == [group]
    assert [one.name for one in process_groups(reader.groups())] == ["0"]
    begun()
    assert reader.poll().finished["group"].tolist() == [group]
    assert len(RingReader(ring).snapshot()) == 3


def test_calls_are_counted_once_though_both_record_them(ring: int) -> None:
    probe, shim = (RingWriter(ring, rank=0, world_size=2, join=True) for _ in range(2))
    communicator = shim.group("nccl-1", [0, 1], "nccl", "rank 0 of 2")
    group = probe.group("0", [0, 1], "cuda:nccl", "default")
    for number in range(5):
        shim.start(COLLECTIVE, ALLREDUCE, communicator, -1, 8, ENQUEUED, 0)()
        if number < 3:  # two are called by C++
            probe.start(COLLECTIVE, ALLREDUCE, group, -1, 8, 0, 0)()
    assert HostRing(ring).calls() == 5


def test_a_communicator_that_takes_a_number_out_of_order_is_known_as_the_shims(ring: int) -> None:
    """Places in the ring's table are given again, so that number 1,027 may come before 1,026."""
    probe, shim = (RingWriter(ring, rank=0, world_size=2, join=True) for _ in range(2))
    group = probe.group("0", [0, 1], "cuda:nccl", "default")
    made = [shim.group(f"nccl-{number}", [0, 1], "nccl", "rank 0 of 2") for number in range(1023)]
    reader, numbers = HostRing(ring), []
    for old in (made[5], made[4]):
        shim.retire(old)
        numbers.append(shim.group(f"again-{old}", [0, 1], "nccl", "rank 0 of 2"))
        shim.start(COLLECTIVE, ALLREDUCE, numbers[-1], -1, 8, ENQUEUED, 0)()
        probe.start(COLLECTIVE, ALLREDUCE, group, -1, 8, 0, 0)()
        assert reader.streams()["group"].tolist() == [group]
    assert numbers[0] > numbers[1] > max(made)
    assert reader.calls() == 2


def test_the_last_calls_are_the_probes_and_are_read_anew_only_after_progress(ring: int) -> None:
    probe, shim = (RingWriter(ring, rank=0, world_size=2, join=True) for _ in range(2))
    communicator = shim.group("nccl-1", [0, 1], "nccl", "rank 0 of 2")
    group = probe.group("0", [0, 1], "cuda:nccl", "default")
    shim.start(COLLECTIVE, ALLREDUCE, communicator, -1, 8, ENQUEUED, 0)()
    probe.start(COLLECTIVE, ALLREDUCE, group, -1, 8, element_bits("bfloat16"), probe.site("a.py:1 f"))()
    reader = HostRing(ring)
    calls = reader.last_calls(2)
    assert {number: [one.bytes for one in ended] for number, ended in calls.ended.items()} == {group: [8]}
    assert [(one.element, one.site) for one in calls.ended[group]] == [("bfloat16", "a.py:1 f")]
    probe.start(COLLECTIVE, ALLREDUCE, group, -1, 16, 0, 0)()
    assert reader.last_calls(2) is calls
    assert [one.bytes for one in reader.last_calls(4).ended[group]] == [8, 16]


def test_a_communicator_serves_the_group_whose_call_was_open_around_its_own(ring: int) -> None:
    probe, shim = (RingWriter(ring, rank=0, world_size=2, join=True) for _ in range(2))
    groups = [probe.group(name, [0, 1], "cuda:nccl", name) for name in ("tp", "dp")]
    communicators = [shim.group(f"nccl-{number}", [0, 1], "nccl", "rank 0 of 2") for number in range(4)]

    def call(communicator: int, *around: int) -> None:
        open_calls = [probe.start(COLLECTIVE, ALLREDUCE, group, -1, 8, 0, 0) for group in around]
        shim.start(COLLECTIVE, ALLREDUCE, communicator, -1, 8, ENQUEUED, 0)()
        for done in reversed(open_calls):
            done()

    call(communicators[0], groups[0])
    call(communicators[0])  # from C++: it has no call around it
    call(communicators[1], *groups)  # within a call of the other group
    call(communicators[2])
    for group in groups:  # calls disagree
        call(communicators[3], group)
    assert HostRing(ring).served_groups() == {communicators[0]: "tp", communicators[1]: "dp"}


def test_groups_are_sent_again_once_it_is_known_what_they_serve(ring: int) -> None:
    probe, shim = (RingWriter(ring, rank=0, world_size=2, join=True) for _ in range(2))
    group = probe.group("0", [0, 1], "cuda:nccl", "default")
    communicator = shim.group("nccl-1", [0, 1], "nccl", "rank 0 of 2")
    watched = WatchedRing(0, "", RankTrack(0, "node", (0,)), HostRing(ring))
    watched.track.know_groups(HostRing(ring).groups())
    assert [(one.name, one.serves) for one in watched.take_unsent_groups()] == [("0", ""), ("nccl-1", "")]
    assert watched.take_unsent_groups() == []
    done = probe.start(COLLECTIVE, ALLREDUCE, group, -1, 8, 0, 0)
    shim.start(COLLECTIVE, ALLREDUCE, communicator, -1, 8, ENQUEUED, 0)()
    done()
    assert [(one.name, one.serves) for one in watched.take_unsent_groups()] == [("nccl-1", "0")]
    assert watched.take_unsent_groups() == []
