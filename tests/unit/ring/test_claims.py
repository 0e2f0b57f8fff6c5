"""Who may write: one living process, the next one after its death, never a forked child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.core.errors import RingError
from keepstep.ring import RingReader, RingWriter, create

pytestmark = pytest.mark.usefixtures("ring_part")

ROOT = Path(__file__).parents[3]
MODULES = {"native": "keepstep.ring", "twin": "tests.twins.ring.python_writer"}
WRITE_AND_WAIT = """
import sys
from importlib import import_module
RingWriter = import_module(sys.argv[3]).RingWriter
writer = RingWriter(sys.argv[1], rank=1, world_size=2, incarnation=int(sys.argv[2]))
writer.begins_at(7)
group = writer.group("old", [0, 1], "gloo", "")
site = writer.site("old.py:1")
for number in range(10):
    writer.start(1, 1, group, -1, number, 0, site)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ring_fd() -> Iterator[int]:
    fd = create(64)
    yield fd
    os.close(fd)


@pytest.fixture
def other(ring_fd: int, ring_part: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has claimed the ring and written ten records without ends."""
    argv = [sys.executable, "-c", WRITE_AND_WAIT, f"/proc/{os.getpid()}/fd/{ring_fd}", "4"]
    argv.append(MODULES[ring_part])
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_living_claim_is_refused(ring_fd: int, other: subprocess.Popen[str]) -> None:
    with pytest.raises(RingError, match=f"claimed by process {other.pid}, which still runs"):
        RingWriter(ring_fd, rank=1, world_size=2)


def test_a_claim_by_this_process_is_refused_too(ring_fd: int) -> None:
    first = RingWriter(ring_fd, rank=0, world_size=1)
    with pytest.raises(RingError, match=f"claimed by process {os.getpid()}"):
        RingWriter(ring_fd, rank=0, world_size=1)
    first.close()
    with pytest.raises(RingError, match="claimed"):
        RingWriter(ring_fd, rank=0, world_size=1)
    del first
    assert RingWriter(ring_fd, rank=0, world_size=1).incarnation == 1


def test_another_writer_of_the_process_joins_its_claim(ring_fd: int) -> None:
    first = RingWriter(ring_fd, rank=0, world_size=1, incarnation=3, join=True)
    second = RingWriter(ring_fd, rank=0, world_size=1, join=True)
    assert second.incarnation == 3
    assert [first.group("a", [0], "", ""), second.group("b", [0], "", "")] == [0, 1]
    assert [first.group("b", [0], "", ""), second.group("a", [0], "", "")] == [1, 0]
    assert [second.site("x:1"), first.site("y:1"), first.site("x:1")] == [1, 2, 1]
    begun = [writer.start(1, 1, 0, -1, 8, 0, 1) for writer in (first, second, first)]
    assert [one.seq for one in begun] == [1, 2, 3]
    reader = RingReader(ring_fd)
    assert reader.streams()[["started", "completed"]].tolist() == [(3, 0)]
    assert [one.name for one in reader.groups()] == ["a", "b"]
    assert reader.sites() == ["", "x:1", "y:1"]


def test_what_one_writer_closes_is_closed_for_all_and_claimed_until_the_last_is_gone(ring_fd: int) -> None:
    first, second = (RingWriter(ring_fd, rank=0, world_size=1, join=True) for _ in range(2))
    first.close()
    assert not second.writable
    with pytest.raises(RingError, match="this process has closed it"):
        RingWriter(ring_fd, rank=0, world_size=1, join=True)
    del first
    with pytest.raises(RingError, match="claimed"):
        RingWriter(ring_fd, rank=0, world_size=1)
    del second
    assert RingWriter(ring_fd, rank=0, world_size=1, join=True).incarnation == 1


def test_nobody_joins_the_claim_of_another_process(ring_fd: int, other: subprocess.Popen[str]) -> None:
    with pytest.raises(RingError, match=f"claimed by process {other.pid}, which still runs"):
        RingWriter(ring_fd, rank=1, world_size=2, join=True)


def test_the_records_of_a_killed_writer_stay_readable(ring_fd: int, other: subprocess.Popen[str]) -> None:
    attached = RingReader(ring_fd)
    other.send_signal(signal.SIGKILL)
    other.wait()
    late = RingReader(ring_fd)
    assert (
        attached.poll().started["bytes"].tolist() == late.poll().started["bytes"].tolist() == list(range(10))
    )
    assert len(late.in_flight()) == 10
    assert not late.writer_lives()
    assert not late.header.closed
    assert [g.name for g in late.groups()] == ["old"]


def test_a_zombie_does_not_hold_its_ring(ring_fd: int, other: subprocess.Popen[str]) -> None:
    os.kill(other.pid, signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert not RingReader(ring_fd).writer_lives()
    assert RingWriter(ring_fd, rank=1, world_size=2, incarnation=9).incarnation == 9


def test_a_dead_claim_is_taken_over_with_a_new_incarnation(
    ring_fd: int, other: subprocess.Popen[str]
) -> None:
    reader, unread = RingReader(ring_fd), RingReader(ring_fd)
    assert len(reader.poll().started) == 10
    assert reader.header.first_step == 7
    other.kill()
    other.wait()
    writer = RingWriter(ring_fd, rank=1, world_size=2)
    assert writer.incarnation == 5
    assert writer.group("new", [1], "gloo", "") == 0
    assert writer.site("new.py:1") == 1
    writer.start(1, 1, 0, -1, 77, 0, 1)()
    batch = reader.poll()
    assert batch.started["ticket"].tolist() == [10]
    assert batch.started["seq"].tolist() == [1]
    assert (batch.lost, batch.unfinished) == (0, 10)
    assert unread.poll().lost == 10
    for view in (reader, RingReader(ring_fd)):
        assert view.snapshot()["bytes"].tolist() == [77]
        assert len(view.in_flight()) == 0
        assert [g.name for g in view.groups()] == ["new"]
        assert view.sites() == ["", "new.py:1"]
        assert view.streams()[["group", "started", "completed"]].tolist() == [(0, 1, 1)]
        assert (view.header.pid, view.header.incarnation) == (os.getpid(), 5)
        assert view.header.first_step == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_writes_nothing(ring_fd: int) -> None:
    writer = RingWriter(ring_fd, rank=0, world_size=1)
    begun = writer.start(1, 1, 0, -1, 1, 0, 0)
    child = os.fork()
    if child == 0:
        begun()
        begun.waiting()
        writer.start(1, 1, 0, -1, 2, 0, 0)()
        writer.start("wrong")  # type: ignore[arg-type]
        writer.group("child", [1], "", "")
        writer.close()
        del begun, writer
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    header = RingReader(ring_fd).header
    assert (header.written, header.dropped, header.closed) == (1, 0, False)
    assert len(RingReader(ring_fd).in_flight()) == 1
    assert RingReader(ring_fd).groups() == []
    assert writer.writable
    begun()
    assert len(RingReader(ring_fd).in_flight()) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_have_a_ring_of_its_own(ring_fd: int) -> None:
    mother = create(64)
    writer = RingWriter(mother, rank=0, world_size=1)
    writer.start(1, 1, 0, -1, 1, 0, 0)
    child = os.fork()
    if child == 0:
        RingWriter(ring_fd, rank=1, world_size=2).start(1, 1, 0, -1, 2, 0, 0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.close(mother)
    reader = RingReader(ring_fd)
    assert reader.header.pid == child
    assert reader.snapshot()[["bytes", "thread"]].tolist() == [(2, child)]


def test_the_last_holder_takes_the_memory_with_it(ring_fd: int) -> None:
    fd = create(64)
    link = os.readlink(f"/proc/self/fd/{fd}")
    reader = RingReader(fd)
    os.close(fd)
    assert "memfd:keepstep-ring" in link
    assert reader.header.records == 64
