"""The node's cache: who gets what, how much, and what stays when processes go."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import textwrap

import pytest

from keepstep.checkpoint.memory import cache as caches
from keepstep.checkpoint.memory.cache import Cache
from keepstep.checkpoint.memory.cache_server import Open, Reserve, ask, claim
from keepstep.checkpoint.memory.rank_slots import RankSlots
from keepstep.checkpoint.memory.slot import Board, Slot
from keepstep.checkpoint.memory.slots import Key, Record, write_record
from keepstep.core.errors import CheckpointError

MIB = 1 << 20


def sizes(cache: Cache, rank: int) -> list[int]:
    return [os.fstat(descriptor).st_size for descriptor in cache.slots(rank)]


def test_slots_are_sealed_in_size_and_grow_one_at_a_time() -> None:
    cache = Cache(64 * MIB)
    cache.reserve(3, MIB - 5, 2)
    assert sizes(cache, 3) == [MIB, MIB]
    with pytest.raises(PermissionError):
        os.ftruncate(cache.slots(3)[0], 0)
    with pytest.raises(PermissionError):
        os.ftruncate(cache.slots(3)[0], 2 * MIB)
    os.pwrite(cache.slots(3)[1], b"kept", 0)
    cache.reserve(3, 2 * MIB, 2, keep=(1,))
    assert sizes(cache, 3) == [2 * MIB, MIB]
    assert os.pread(cache.slots(3)[1], 4, 0) == b"kept"
    cache.reserve(3, MIB, 3)
    assert sizes(cache, 3) == [2 * MIB, MIB, MIB]
    assert cache.used_bytes == 4 * MIB
    cache.close()


def test_what_does_not_fit_is_refused_with_the_numbers_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = Cache(1 << 30)
    cache.reserve(0, 256 * MIB, 2)
    with pytest.raises(CheckpointError) as said:
        cache.reserve(1, 384 * MIB, 2)
    assert "rank 1 asks for 2 slots of 0.38 GiB" in str(said.value)
    assert "1.25 GiB of this node, whose limit is 1.00 GiB; raise KEEPSTEP_CHECKPOINT_BYTES" in str(
        said.value
    )
    assert (cache.used_bytes, cache.slots(1)) == (512 * MIB, [])
    # Pages that were promised but are not there yet count as taken.
    monkeypatch.setattr(caches, "available_bytes", lambda: 700 * MIB)
    with pytest.raises(
        CheckpointError, match=r"0.75 GiB more of this node, of whose memory 0.68 GiB are free"
    ):
        cache.reserve(1, 128 * MIB, 2)
    cache.close()


def test_a_client_gets_its_slots_and_the_figures(served) -> None:  # type: ignore[no-untyped-def]
    answer = ask(served.address, Reserve(2, MIB, 2))
    assert (served.cache.used_bytes, answer.limit_bytes) == (2 * MIB, served.cache.limit_bytes)
    slot, board = Slot(answer.slots[0]), Board(answer.board)
    os.close(answer.slots[1])
    slot.memory[5000] = 9
    board.put(2, 1, Key(0, 4))
    assert os.pread(served.cache.slots(2)[0], 1, 5000) == b"\x09"
    assert (board.held(2), board.held(1)) == (frozenset({Key(0, 4)}), frozenset())
    board.close()
    slot.close()
    with pytest.raises(CheckpointError, match="raise KEEPSTEP_CHECKPOINT_BYTES"):
        ask(served.address, Reserve(3, 1 << 40, 2))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0" * 100,
        b'{"type":"Reserve","rank":-1,"nbytes":1,"slots":1}',
        b'{"type":"Reserve","rank":0,"nbytes":1,"slots":99}',
        b'{"type":"Reserve","rank":0,"nbytes":1e300,"slots":1}',
        b'{"type":"Open","rank":2097152}',
        b"[" * 4000,
    ],
)
def test_a_bad_request_gets_a_line_and_harms_nobody(served, message: bytes) -> None:  # type: ignore[no-untyped-def]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(20)
        peer.connect(f"\0{served.address}")
        peer.send(message)
        data, descriptors, _, _ = socket.recv_fds(peer, 4096, 16)
        assert descriptors == []
        assert data == b"" or b"not a request" in data
    answer = ask(served.address, Open(0))
    assert answer.slots == []
    os.close(answer.board)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing(served) -> None:  # type: ignore[no-untyped-def]
    script = f"""
        import os, socket
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect("\\0{served.address}")
            try:
                peer.send(b'{{"type":"Open","rank":0}}')
                print(peer.recv(4096))
            except OSError:
                print(b"")
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "b''"


def test_a_cache_that_is_gone_is_one_line() -> None:
    with pytest.raises(CheckpointError, match="does not answer"):
        ask("keepstep-cache-nobody", Open(0))


def test_a_file_that_could_shrink_is_no_slot() -> None:
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, MIB)
    with pytest.raises(CheckpointError, match="not sealed"):
        Slot(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_slot_that_somebody_reads_is_not_taken(served) -> None:  # type: ignore[no-untyped-def]
    rank_slots = RankSlots(served.address, 0)
    rank_slots.make_room(MIB)
    reader = """
        import fcntl, os, sys
        fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_SH)
        os.write(1, b"reading")
        sys.stdin.read()
    """
    held = served.cache.slots(0)[0]
    command = [sys.executable, "-c", textwrap.dedent(reader), str(held)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[held]) as process:
        assert process.stdout is not None
        assert process.stdout.read(7) == b"reading"
        assert rank_slots.take(lambda: None) == 1
        rank_slots.slots[1].unlock()
        process.kill()
    assert rank_slots.take(lambda: None) == 0
    rank_slots.close()


def test_an_empty_slot_that_is_read_does_not_hide_an_older_one(served) -> None:  # type: ignore[no-untyped-def]
    rank_slots = RankSlots(served.address, 0)
    rank_slots.make_room(MIB)
    with memoryview(rank_slots.slots[1].memory) as view:
        write_record(view, Record(1, 0, 0, 0, 0, 0))
    other = Slot(os.dup(served.cache.slots(0)[0]), apart=True)
    assert other.lock(shared=True)
    assert rank_slots.take(lambda: None) is None
    assert rank_slots.take(lambda: Key(0, 2)) == 1
    other.close()
    rank_slots.close()


def test_room_is_made_without_losing_the_other_slot(served) -> None:  # type: ignore[no-untyped-def]
    rank_slots = RankSlots(served.address, 0)
    rank_slots.make_room(MIB)
    assert rank_slots._populating
    rank_slots._populating.join()
    blocks = [os.fstat(descriptor).st_blocks * 512 for descriptor in served.cache.slots(0)]
    assert blocks == [MIB, MIB]
    rank_slots.slots[1].memory[9000] = 7
    rank_slots.make_room(3 * MIB, 0)
    assert [slot.nbytes for slot in rank_slots.slots] == [3 * MIB, MIB]
    assert rank_slots.slots[1].memory[9000] == 7
    with pytest.raises(CheckpointError, match="whose limit is"):
        rank_slots.make_room(1 << 40, 0)
    assert [slot.nbytes for slot in rank_slots.slots] == [3 * MIB, MIB]
    assert rank_slots.slots[1].memory[9000] == 7
    rank_slots.close()
    again = RankSlots(served.address, 0)
    assert again.slots[1].memory[9000] == 7
    again.close()


def test_descriptors_do_not_pass_to_other_programs() -> None:
    cache = Cache(MIB)
    assert fcntl.fcntl(cache.board, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    cache.close()


def test_the_launchers_side_loads_neither_torch_nor_numpy() -> None:
    script = (
        "import sys, keepstep.checkpoint.memory.cache_server; "
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_a_topic_is_claimed_once_in_a_job(served) -> None:  # type: ignore[no-untyped-def]
    assert [claim(served.address, topic) for topic in ("memory", "memory", "storage")] == [True, False, True]
    assert served.said == []
    assert claim(served.address, "disk", "no space left")
    assert not claim(served.address, "disk", "no space left")
    assert served.said == ["no space left"]
    assert claim("keepstep-cache-nobody", "memory")  # better said twice than not at all
