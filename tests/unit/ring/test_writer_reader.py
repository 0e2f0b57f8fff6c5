"""One process writes, the same process reads: what comes out is what went in, once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from keepstep.core.events import Flag, Kind, Op, Phase
from keepstep.ring import RECORD, RETIRED, Operation, RingReader, RingWriter, create

pytestmark = pytest.mark.usefixtures("ring_part")


@pytest.fixture
def ring_fd() -> Iterator[int]:
    fd = create(64)
    yield fd
    os.close(fd)


@pytest.fixture
def writer(ring_fd: int) -> RingWriter:
    return RingWriter(ring_fd, rank=3, world_size=8, incarnation=2)


def begin(writer: RingWriter, group: int = 0, nbytes: int = 0, flags: Flag = Flag.NONE) -> Operation:
    return writer.start(Kind.COLLECTIVE, Op.ALLREDUCE, group, -1, nbytes, flags, 0)


def test_every_field_comes_out_as_it_went_in(ring_fd: int, writer: RingWriter) -> None:
    reader = RingReader(ring_fd)
    operation = writer.start(Kind.P2P, Op.SEND, 7, 5, 2**40, Flag.ASYNC | Flag.SYNC_KNOWN, 11)
    (record,) = reader.poll().started
    assert {
        name: record[name].item() for name in record.dtype.names if name not in ("start_ns", "thread")
    } == {
        "ticket": 0,
        "end_ns": 0,
        "wait_ns": 0,
        "bytes": 2**40,
        "seq": 1,
        "peer": 5,
        "site": 11,
        "group": 7,
        "kind": Kind.P2P,
        "op": Op.SEND,
        "flags": Flag.ASYNC | Flag.SYNC_KNOWN,
    }
    assert record["thread"] == threading.get_native_id()
    assert operation.seq == 1
    assert not operation.ended


def test_start_is_published_before_the_end_and_each_comes_once(ring_fd: int, writer: RingWriter) -> None:
    reader = RingReader(ring_fd)
    operation = begin(writer)
    assert len(reader.in_flight()) == 1
    first, second = reader.poll(), reader.poll()
    operation.waiting()
    operation()
    third, fourth = reader.poll(), reader.poll()
    assert [len(b.started) for b in (first, second, third, fourth)] == [1, 0, 0, 0]
    assert [len(b.finished) for b in (first, second, third, fourth)] == [0, 0, 1, 0]
    record = third.finished[0]
    assert record["start_ns"] <= record["wait_ns"] <= record["end_ns"]
    assert len(reader.in_flight()) == 0


def test_the_first_end_and_the_first_wait_count(ring_fd: int, writer: RingWriter) -> None:
    reader = RingReader(ring_fd)
    operation = begin(writer)
    operation.waiting()
    operation()
    before = reader.snapshot()
    operation.waiting()
    operation.fail()
    operation()
    assert np.array_equal(reader.snapshot(), before)
    assert reader.streams()["completed"].tolist() == [1]


def test_a_failed_end_carries_the_flag(ring_fd: int, writer: RingWriter) -> None:
    reader = RingReader(ring_fd)
    begin(writer).fail()
    assert reader.poll().finished["flags"].tolist() == [Flag.FAILED]


def test_an_operation_is_a_future_callback(ring_fd: int, writer: RingWriter) -> None:
    future: Future[int] = Future()
    operation = begin(writer)
    future.add_done_callback(operation)
    future.set_result(1)
    assert operation.ended
    assert len(RingReader(ring_fd).in_flight()) == 0


def test_sequence_numbers_are_per_group_peer_and_direction(writer: RingWriter, ring_fd: int) -> None:
    def seq(kind: Kind, op: Op, group: int, peer: int) -> int:
        return writer.start(kind, op, group, peer, 0, 0, 0).seq

    assert [seq(Kind.COLLECTIVE, op, 1, root) for op, root in ((Op.ALLREDUCE, -1), (Op.BROADCAST, 0))] == [
        1,
        2,
    ]
    assert seq(Kind.COLLECTIVE, Op.ALLREDUCE, 2, -1) == 1
    assert [seq(Kind.P2P, Op.SEND, 1, 4) for _ in range(3)] == [1, 2, 3]
    assert [seq(Kind.P2P, Op.RECV, 1, 4), seq(Kind.P2P, Op.SEND, 1, 5)] == [1, 1]
    assert [seq(Kind.PHASE, phase, -1, -1) for phase in (Phase.GC, Phase.GC, Phase.DATA)] == [1, 2, 1]  # type: ignore[arg-type]
    assert seq(Kind.COLLECTIVE, Op.ALLREDUCE, -1, -1) == 0
    rows = RingReader(ring_fd).streams()[["group", "kind", "peer", "op", "started", "completed"]].tolist()
    assert rows == [
        (1, Kind.COLLECTIVE, -1, Op.BROADCAST, 2, 0),
        (1, Kind.P2P, 4, Op.SEND, 3, 0),
        (1, Kind.P2P, 4, Op.RECV, 1, 0),
        (1, Kind.P2P, 5, Op.SEND, 1, 0),
        (2, Kind.COLLECTIVE, -1, Op.ALLREDUCE, 1, 0),
    ]


def test_records_with_a_flag_come_apart(ring_fd: int, writer: RingWriter) -> None:
    reader = RingReader(ring_fd)
    for flags in (Flag.NONE, Flag.ENQUEUED, Flag.ENQUEUED | Flag.TIMED, Flag.ASYNC):
        begin(writer, nbytes=int(flags), flags=flags)()
    begin(writer, nbytes=7, flags=Flag.ENQUEUED | Flag.TIMED)
    batch, timed = reader.poll_apart(Flag.ENQUEUED, Flag.TIMED)
    assert batch.started["bytes"].tolist() == batch.finished["bytes"].tolist() == [0, Flag.ASYNC]
    assert timed["bytes"].tolist() == [Flag.ENQUEUED | Flag.TIMED]
    assert (batch.lost, batch.unfinished) == (0, 0)


def test_a_full_ring_overwrites_the_oldest_and_a_slow_reader_counts_them(
    ring_fd: int, writer: RingWriter
) -> None:
    reader = RingReader(ring_fd)
    for number in range(100):
        begin(writer, nbytes=number)()
    batch = reader.poll()
    assert batch.lost == 36
    assert batch.started["bytes"].tolist() == list(range(36, 100))
    assert batch.finished["bytes"].tolist() == list(range(36, 100))
    assert reader.header.written == 100
    assert writer.dropped == 0


def test_a_late_end_is_counted_and_touches_no_newer_record(ring_fd: int, writer: RingWriter) -> None:
    reader = RingReader(ring_fd)
    late = begin(writer)
    reader.poll()
    newer = [begin(writer, nbytes=number) for number in range(64)]
    late.waiting()
    late()
    assert late.ended
    batch = reader.poll()
    assert (len(batch.finished), batch.unfinished, batch.lost) == (0, 1, 0)
    assert reader.snapshot()["end_ns"].tolist() == [0] * 64
    assert reader.snapshot()["wait_ns"].tolist() == [0] * 64
    assert reader.header.late == 1
    assert reader.streams()["completed"].tolist() == [1]
    assert len(newer) == 64


def test_readers_do_not_disturb_each_other_and_may_come_late(ring_fd: int, writer: RingWriter) -> None:
    early = RingReader(ring_fd)
    for number in range(80):
        begin(writer, nbytes=number)
        if number % 10 == 9:
            early.poll()
    late = RingReader(f"/proc/self/fd/{ring_fd}")
    assert late.poll().started["bytes"].tolist() == list(range(16, 80))
    assert late.poll().lost == 0
    assert len(early.poll().started) == 0


def test_groups_and_sites_come_back_by_their_id(ring_fd: int, writer: RingWriter) -> None:
    irregular = [5, 0, 9, 2, 3]
    groups = [
        writer.group("world", range(100_000), "nccl", "default_pg"),
        writer.group("dp", range(1, 8, 2), "gloo", ""),
        writer.group("odd", irregular, "gloo", "αβ"),
        writer.group("down", [3, 2, 1], "", ""),
        writer.group("none", [], "", ""),
    ]
    assert groups == [0, 1, 2, 3, 4]
    assert writer.group("dp", range(1, 8, 2), "gloo", "") == 1
    assert writer.group("dp", [1, 3], "gloo", "") == 5
    assert [writer.site(text) for text in ("a.py:1", "b.py:2", "a.py:1", "\udcff.py")] == [1, 2, 1, 3]
    reader = RingReader(ring_fd)
    found = reader.groups()
    assert [g.name for g in found] == ["world", "dp", "odd", "down", "none", "dp"]
    assert found[0].members == tuple(range(100_000))
    assert [g.members for g in found[1:]] == [(1, 3, 5, 7), tuple(irregular), (3, 2, 1), (), (1, 3)]
    assert (found[2].backend, found[2].desc) == ("gloo", "αβ")
    assert reader.sites() == ["", "a.py:1", "b.py:2", "?.py"]


def test_full_tables_are_counted_and_nothing_raises(ring_fd: int, writer: RingWriter) -> None:
    groups = [writer.group(f"g{i}", [i], "gloo", "") for i in range(1100)]
    assert groups == [*range(1024), *[-1] * 76]
    sites = [writer.site(f"file.py:{i}") for i in range(4200)]
    assert sites == [*range(1, 4096), *[0] * 105]
    assert RingReader(ring_fd).header.overflowed == 76 + 105
    seqs = [writer.start(Kind.P2P, Op.SEND, 0, peer, 0, 0, 0).seq for peer in range(5000)]
    assert set(seqs) == {0, 1}
    reader = RingReader(ring_fd)
    assert reader.header.overflowed == 76 + 105 + seqs.count(0)
    assert len(reader.streams()) == seqs.count(1)
    assert len(reader.groups()) == 1024
    assert len(reader.sites()) == 4096
    assert reader.header.dropped == 0


def test_places_of_groups_that_are_gone_are_used_again(ring_fd: int, writer: RingWriter) -> None:
    """Under a number of their own: records of the old one are never taken for those of the new one."""
    assert writer.group("world", (0, 1), "gloo", "") == 0
    reader = RingReader(ring_fd)
    for made in range(3000):
        group = writer.group(f"g{made}", (0, 1), "gloo", "")
        assert group == made // 1023 * 1024 + 1 + made % 1023
        operation = begin(writer, group)
        assert operation.seq == 1, "each counts its operations anew"
        if made % 2:
            operation()
        writer.retire(group)
        writer.retire(group)
        operation()
    assert begin(writer, 0).seq == 1
    known = {number: one.name for number, one in enumerate(reader.groups()) if one is not RETIRED}
    last = {made // 1023 * 1024 + 1 + made % 1023: f"g{made}" for made in range(3000 - 1023, 3000)}
    assert known == {0: "world"} | last
    streams = reader.streams()
    assert set(streams["group"].tolist()) == {0, *last}
    assert {int(count) for name in ("started", "completed") for count in streams[name]} == {0, 1}
    assert reader.header.overflowed == 0
    late = begin(writer, group)
    for made in range(1023):
        writer.retire(writer.group(f"h{made}", (0, 1), "gloo", ""))
    late()
    assert int(reader.streams()["completed"].max(initial=0)) == 0, "the place of its stream was freed"


def test_groups_of_any_size_take_the_places_of_others_until_numbers_end(
    ring_fd: int, ring_part: str, writer: RingWriter
) -> None:
    if ring_part == "twin":
        pytest.skip("32,768 groups take the twin half a minute")
    squares = [n * n for n in range(200)]
    for made in range(32_768):
        group = writer.group(f"g{made}", squares[: made * 7919 % 200], "gloo", "")
        assert group >= 0
        writer.retire(group)
    assert writer.group("beyond", (), "gloo", "") == -1
    assert RingReader(ring_fd).header.overflowed == 1


def test_streams_of_groups_that_are_gone_give_way(ring_fd: int, writer: RingWriter) -> None:
    for made in range(100):
        group = writer.group(f"g{made}", range(100), "gloo", "")
        for peer in range(100):
            assert writer.start(Kind.P2P, Op.SEND, group, peer, 0, 0, 0).seq == 1
        writer.retire(group)
    assert RingReader(ring_fd).header.overflowed == 0


def test_a_group_too_large_for_the_table_is_refused_not_cut(ring_fd: int, writer: RingWriter) -> None:
    squares = [n * n for n in range(40_000)]
    ids = [writer.group(f"g{i}", squares, "", "") for i in range(8)]
    assert -1 in ids
    kept = [i for i in ids if i >= 0]
    assert [g.members for g in RingReader(ring_fd).groups()] == [tuple(squares)] * len(kept)


@pytest.mark.parametrize(
    "arguments",
    [
        ("x", 1, 0, -1, 0, 0, 0),
        (1, 300, 0, -1, 0, 0, 0),
        (1, 1, 2**20, -1, 0, 0, 0),
        (1, 1, 0, -1, -5, 0, 0),
        (1,) * 9,
    ],
)
def test_arguments_that_do_not_fit_are_a_counted_drop(
    writer: RingWriter, ring_fd: int, arguments: tuple[object, ...]
) -> None:
    operation = writer.start(*arguments)  # type: ignore[arg-type]
    operation.waiting()
    operation()
    assert operation.ended
    assert operation.seq == 0
    assert writer.dropped == 1
    assert RingReader(ring_fd).header.written == 0


def test_arguments_may_be_named(writer: RingWriter, ring_fd: int) -> None:
    writer.start(Kind.P2P, op=Op.RECV, group=1, peer=2, nbytes=3, flags=1, site=4)
    record = RingReader(ring_fd).snapshot()[0]
    assert record[["kind", "op", "group", "peer", "bytes", "flags", "site"]].item() == (2, 11, 1, 2, 3, 1, 4)


def test_after_close_nothing_is_written_and_readers_are_told(ring_fd: int, writer: RingWriter) -> None:
    operation = begin(writer)
    writer.close()
    writer.close()
    operation()
    begin(writer)()
    reader = RingReader(ring_fd)
    assert reader.header.closed
    assert reader.header.written == 1
    assert len(reader.in_flight()) == 1
    assert writer.group("late", [1], "", "") == -1
    assert not writer.writable


def test_an_operation_outlives_its_writer_object(ring_fd: int) -> None:
    writer = RingWriter(ring_fd, rank=0, world_size=1)
    operation = begin(writer)
    del writer
    operation()
    assert len(RingReader(ring_fd).in_flight()) == 0


def test_many_threads_lose_nothing_that_fits() -> None:
    fd = create(8192)
    writer = RingWriter(fd, rank=0, world_size=1)
    reader = RingReader(fd)

    def work(thread: int) -> None:
        for i in range(1000):
            begin(writer, nbytes=thread << 20 | i)()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    batch = reader.poll()
    os.close(fd)
    assert sorted(batch.started["bytes"].tolist()) == [n << 20 | i for n in range(6) for i in range(1000)]
    assert sorted(batch.started["seq"].tolist()) == list(range(1, 6001))
    assert len(batch.finished) == 6000
    assert (batch.lost, writer.dropped) == (0, 0)


def test_a_saved_copy_reads_the_same(ring_fd: int, writer: RingWriter, tmp_path: object) -> None:
    path = os.path.join(str(tmp_path), "rank-00003.ring")
    group, site = writer.group("world", range(8), "gloo", "d"), writer.site("x.py:1")
    for number in range(90):
        operation = writer.start(1, 1, group, -1, number, 0, site)
        if number % 3:
            operation()
    live = RingReader(ring_fd)
    live.save(path)
    saved = RingReader(path)
    assert os.listdir(str(tmp_path)) == ["rank-00003.ring"]
    assert np.array_equal(saved.snapshot(), live.snapshot())
    assert np.array_equal(saved.in_flight(), live.in_flight())
    assert np.array_equal(saved.streams(), live.streams())
    assert (saved.header, saved.groups(), saved.sites()) == (live.header, live.groups(), live.sites())
    assert live.writer_lives()
    assert not saved.writer_lives()
    batch = saved.poll()
    assert (len(batch.started), batch.lost) == (64, 0)
    again = os.path.join(str(tmp_path), "again.ring")
    saved.save(again)
    with open(path, "rb") as one, open(again, "rb") as other:
        assert one.read() == other.read()


def test_an_unclaimed_ring_can_be_watched_from_the_start(ring_fd: int) -> None:
    reader = RingReader(ring_fd)
    header = reader.header
    assert (header.rank, header.pid, header.records, header.written, header.closed) == (-1, 0, 64, 0, False)
    assert len(reader.poll().started) == 0
    writer = RingWriter(ring_fd, rank=3, world_size=8, incarnation=2)
    begin(writer)
    assert len(reader.poll().started) == 1
    header = reader.header
    assert (header.rank, header.world_size, header.pid, header.incarnation) == (3, 8, os.getpid(), 2)
    assert header.realtime_ns > 10**18
    assert 0 < header.monotonic_ns <= reader.snapshot()["start_ns"][0]


def test_the_dtype_is_the_native_row() -> None:
    assert RECORD.itemsize == 64
    assert RECORD.names is not None
    assert RECORD.names[:5] == ("ticket", "start_ns", "end_ns", "wait_ns", "bytes")
