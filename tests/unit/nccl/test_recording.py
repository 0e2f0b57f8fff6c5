"""What the shim writes of calls that it stands in front of, in the ring as its readers find it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
from tests.unit.nccl.shim import Built

from keepstep.core.events import Flag, Kind, Life, Op
from keepstep.ring import RingReader

COLLECTIVE, P2P, LIFE = int(Kind.COLLECTIVE), int(Kind.P2P), int(Kind.COMMUNICATOR)

EVERY_CALL = """
comm = init(make_id(), 1, 0)
data, out = floats(1, 2, 3, 4), floats(0, 0, 0, 0)
assert all_reduce(comm, 1, 2) == [1, 2]
good(nccl.caller_ncclBroadcast(data, out, size(4), FLOAT32, 0, comm, STREAM))
assert list(out) == [1, 2, 3, 4]
good(nccl.caller_ncclBcast(data, size(3), FLOAT32, 0, comm, STREAM))
good(nccl.caller_ncclReduce(data, out, size(4), FLOAT32, SUM, 0, comm, STREAM))
good(nccl.caller_ncclAllGather(data, out, size(4), 9, comm, None))
good(nccl.caller_ncclReduceScatter(data, out, size(4), FLOAT32, 4, comm, STREAM))
error = ctypes.c_int(-1)
good(nccl.caller_ncclCommGetAsyncError(comm, ctypes.byref(error)))
good(nccl.caller_ncclCommFinalize(comm))
good(nccl.caller_ncclCommDestroy(comm))
"""

PAIR = """
import binascii
rank = int(sys.argv[3])
id = Id.from_buffer_copy(binascii.unhexlify(sys.argv[4]))
comm = init(id, 2, rank)
assert all_reduce(comm, 1.0 + rank) == [3.0]
mine, theirs = floats(rank), floats(9)
good(nccl.caller_ncclGroupStart())
good(nccl.caller_ncclGroupStart())
good(nccl.caller_ncclSend(mine, size(1), FLOAT32, 1 - rank, comm, STREAM))
good(nccl.caller_ncclGroupEnd())
good(nccl.caller_ncclRecv(theirs, size(1), FLOAT32, 1 - rank, comm, STREAM))
assert list(theirs) == [9]
good(nccl.caller_ncclGroupEnd())
assert list(theirs) == [1 - rank]
child = ctypes.c_void_p()
good(nccl.caller_ncclCommSplit(comm, rank, 0, ctypes.byref(child), None))
assert all_reduce(child, 5.0) == [5.0]
both = ctypes.c_void_p()
good(nccl.caller_ncclCommSplit(comm, 0, -rank, ctypes.byref(both), None))
assert all_reduce(both, 5.0) == [10.0]
alone = ctypes.c_void_p()
if rank == 1:
    good(nccl.caller_ncclCommShrink(comm, (ctypes.c_int * 1)(0), 1, ctypes.byref(alone), None, 0))
    assert all_reduce(alone, 7.0) == [7.0]
"""

HANGS = """
comm = init(make_id(), 1, 0)
pair = (ctypes.c_void_p * 2)()
good(nccl.caller_ncclCommInitAll(pair, 2, None))
print("ready", flush=True)
if sys.argv[3] == "group":
    good(nccl.caller_ncclGroupStart())
    data = floats(1)
    for _ in range(3):
        good(nccl.caller_ncclAllReduce(data, data, size(1), FLOAT32, SUM, ctypes.c_void_p(pair[0]), STREAM))
    nccl.caller_ncclGroupEnd()
elif sys.argv[3] == "abort":
    waits = threading.Thread(target=lambda: print(all_reduce(ctypes.c_void_p(pair[0]), 1.0), flush=True))
    waits.start()
    sys.stdin.readline()
    good(nccl.caller_ncclCommAbort(ctypes.c_void_p(pair[0])))
    waits.join()
    error = ctypes.c_int(0)
    good(nccl.caller_ncclCommGetAsyncError(ctypes.c_void_p(pair[0]), ctypes.byref(error)))
    assert error.value == 6
else:
    all_reduce(ctypes.c_void_p(pair[0]), 1.0)
"""

THREADS = """
comms = (ctypes.c_void_p * 4)()
good(nccl.caller_ncclCommInitAll(comms, 4, None))
found = []
def work(rank):
    for number in range(50):
        found.append(all_reduce(ctypes.c_void_p(comms[rank]), float(number)) == [4.0 * number])
threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
for one in threads: one.start()
for one in threads: one.join()
assert len(found) == 200 and all(found)
"""


GOES_ON = """
comm, child, error = init(make_id(), 1, 0), ctypes.c_void_p(), ctypes.c_int(7)
assert nccl.caller_ncclCommSplit(comm, 3, 0, ctypes.byref(child), None) == 7
while error.value == 7:
    good(nccl.caller_ncclCommGetAsyncError(comm, ctypes.byref(error)))
assert all_reduce(child, 5.0) == [5.0]
"""


@pytest.mark.parametrize("mode", ["RTLD_LOCAL", "RTLD_GLOBAL"])
def test_every_call_of_a_linked_library_is_a_record(built: Built, rings: list[int], mode: str) -> None:
    _, stderr = built.run(EVERY_CALL, built.environment(rings[0]), mode=mode)
    assert stderr == ""
    reader = RingReader(rings[0])
    records, sites = reader.snapshot(), reader.sites()
    assert records[["kind", "op", "bytes", "peer", "seq"]].tolist() == [
        (LIFE, Life.INIT, 1, 0, 0),
        (COLLECTIVE, Op.ALLREDUCE, 8, -1, 1),
        (COLLECTIVE, Op.BROADCAST, 16, 0, 2),
        (COLLECTIVE, Op.BROADCAST, 12, 0, 3),  # ncclBcast, once, though it calls ncclBroadcast
        (COLLECTIVE, Op.REDUCE, 16, 0, 4),
        (COLLECTIVE, Op.ALLGATHER, 8, -1, 5),
        (COLLECTIVE, Op.REDUCE_SCATTER, 16, -1, 6),
        (LIFE, Life.FINALIZE, 0, -1, 0),
        (LIFE, Life.DESTROY, 0, -1, 0),
    ]
    assert [sites[site] for site in records["site"][1:7].tolist()] == [
        "ncclAllReduce float32 sum stream 0x10",
        "ncclBroadcast float32 stream 0x10",
        "ncclBcast float32 stream 0x10",
        "ncclReduce float32 sum stream 0x10",
        "ncclAllGather bfloat16 stream (nil)",
        "ncclReduceScatter float32 avg stream 0x10",
    ]
    assert set(records["flags"].tolist()) == {int(Flag.ENQUEUED)}
    assert set(records["group"].tolist()) == {0}
    assert len(reader.in_flight()) == 0
    (group,) = reader.groups()
    assert (group.members, group.backend, group.desc) == ((0,), "nccl", "rank 0 of 1")
    assert reader.streams()[["started", "completed"]].tolist() == [(6, 6)]


def test_two_ranks_with_groups_and_communicators_made_of_others(built: Built, rings: list[int]) -> None:
    id = f"keepstep-stand-in-test-{rings[0]}-{built.folder.parent.name}".encode().ljust(128, b"\0").hex()
    ranks = [built.start(PAIR, built.environment(rings[rank], rank, 2), rank, id) for rank in range(2)]
    built.together(ranks)
    named = []
    for rank in range(2):
        reader = RingReader(rings[rank])
        records, groups = reader.snapshot(), reader.groups()
        shrunk = [(LIFE, Life.SHRINK, -1, 0), (COLLECTIVE, Op.ALLREDUCE, -1, 3)] if rank else []
        assert records[["kind", "op", "peer", "group"]].tolist() == [
            (LIFE, Life.INIT, rank, 0),
            (COLLECTIVE, Op.ALLREDUCE, -1, 0),
            (P2P, Op.SEND, 1 - rank, 0),
            (P2P, Op.RECV, 1 - rank, 0),
            (LIFE, Life.GROUP, -1, -1),
            (LIFE, Life.SPLIT, -1, 0),
            (COLLECTIVE, Op.ALLREDUCE, -1, 1),
            (LIFE, Life.SPLIT, -1, 0),
            (COLLECTIVE, Op.ALLREDUCE, -1, 2),
            *shrunk,
        ]
        send, recv, group = records[2:5]
        assert send["flags"] == recv["flags"] == Flag.ENQUEUED | Flag.GROUPED
        assert group["bytes"] == 2
        assert send["start_ns"] < recv["start_ns"] < group["start_ns"] < send["end_ns"]
        assert group["end_ns"] <= send["end_ns"] <= recv["end_ns"]
        assert [one.members for one in groups] == [(0, 1), (rank,), (), *([(1,)] if rank else [])]
        world = groups[0].name
        assert groups[1].desc == f"rank 0 of 1; split 1 of {world} color {rank}"
        assert groups[2].desc == f"rank {1 - rank} of 2; split 2 of {world} color 0"
        named.append([one.name for one in groups])
    assert named[0][0] == named[1][0]
    assert named[0][1] != named[1][1]
    assert named[0][2] == named[1][2]
    assert len({*named[0], *named[1]}) == 5


def test_a_communicator_that_is_made_behind_its_call(built: Built, rings: list[int]) -> None:
    built.run(GOES_ON, built.environment(rings[0], STAND_IN_NONBLOCKING="1"))
    reader = RingReader(rings[0])
    assert reader.snapshot()[["kind", "op", "group", "flags"]].tolist() == [
        (LIFE, Life.INIT, 0, Flag.ENQUEUED),
        (LIFE, Life.SPLIT, 0, Flag.ENQUEUED),
        (COLLECTIVE, Op.ALLREDUCE, 1, Flag.ENQUEUED),
    ]
    world, child = reader.groups()
    assert child.desc == f"rank 0 of 1; split 1 of {world.name} color 3"


def test_threads_with_a_communicator_each(built: Built, rings: list[int]) -> None:
    built.run(THREADS, built.environment(rings[0]))
    reader = RingReader(rings[0])
    records = reader.snapshot()
    records = records[records["kind"] == COLLECTIVE]
    assert len(records) == 200
    by_group = {group: records[records["group"] == group] for group in range(4)}
    assert all(of["seq"].tolist() == list(range(1, 51)) for of in by_group.values())
    assert all(len(set(of["thread"].tolist())) == 1 for of in by_group.values())
    assert len(set(records["thread"].tolist())) == 4
    assert [one.desc.split(";")[0] for one in reader.groups()] == [f"rank {rank} of 4" for rank in range(4)]
    assert len({one.name for one in reader.groups()}) == 1


@pytest.fixture
def hanging(
    built: Built, rings: list[int], request: pytest.FixtureRequest
) -> Iterator[subprocess.Popen[str]]:
    """A process in a call that nobody answers; the parameter says in which."""
    with built.start(HANGS, built.environment(rings[0]), request.param) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def in_flight(ring: int, count: int) -> list[tuple[int, ...]]:
    """Of kind, operation, group: once there are ``count``."""
    reader = RingReader(ring)
    while len(found := reader.in_flight()) != count:
        os.sched_yield()
    return found[["kind", "op", "group"]].tolist()


@pytest.mark.parametrize("hanging", ["call"], indirect=True)
def test_a_call_that_hangs_is_in_flight_also_when_its_process_is_killed(
    rings: list[int], hanging: subprocess.Popen[str]
) -> None:
    expected = [(COLLECTIVE, Op.ALLREDUCE, 1)]
    assert in_flight(rings[0], 1) == expected
    hanging.kill()
    hanging.wait()
    assert in_flight(rings[0], 1) == expected
    assert not RingReader(rings[0]).writer_lives()
    assert RingReader(rings[0]).streams()[["group", "started", "completed"]].tolist() == [(1, 1, 0)]


@pytest.mark.parametrize("hanging", ["group"], indirect=True)
def test_a_group_that_hangs_has_all_its_calls_in_flight(
    rings: list[int], hanging: subprocess.Popen[str]
) -> None:
    call = (COLLECTIVE, Op.ALLREDUCE, 1)
    assert in_flight(rings[0], 4) == [call, call, call, (LIFE, Life.GROUP, -1)]


@pytest.mark.parametrize("hanging", ["abort"], indirect=True)
def test_an_abort_ends_a_call_as_failed(rings: list[int], hanging: subprocess.Popen[str]) -> None:
    in_flight(rings[0], 1)
    assert hanging.communicate("go\n")[0] == "6\n"
    records = RingReader(rings[0]).snapshot()
    assert records[["kind", "op"]].tolist()[2:] == [
        (COLLECTIVE, Op.ALLREDUCE),
        (LIFE, Life.ABORT),
        (LIFE, Life.ERROR),
    ]
    failed = (records["flags"] & Flag.FAILED) != 0
    assert failed.tolist() == [False, False, True, False, True]
