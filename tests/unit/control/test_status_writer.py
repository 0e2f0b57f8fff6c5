"""The status is written beside the loop: the newest waits, a file system that hangs stops nothing, the last counts."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from keepstep import wire
from keepstep.control.controller import Controller
from keepstep.control.run_status import status_of
from keepstep.control.settings import Settings
from keepstep.control.status_writer import StatusWriter, write_status
from keepstep.traces import Run


def test_the_newest_waits_while_one_hangs() -> None:
    written, heard = list[int](), list[OSError | None]()
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        goes_on.wait()
        written.append(0)

    writer = StatusWriter(heard.append)
    writer.start()
    writer.write(hang)
    hangs.wait()
    for number in (1, 2, 3):
        writer.write(lambda number=number: written.append(number))
    assert not writer.close(0.0)  # it hangs, and is given up
    goes_on.set()
    assert writer.close(60.0)
    assert (written, heard) == ([0, 3], [None, None])


def test_what_waits_is_written_before_the_end() -> None:
    written, heard = list[str](), list[OSError | None]()
    writer = StatusWriter(heard.append)
    writer.write(lambda: written.append("last"))
    writer.start()
    assert writer.close(60.0)
    assert written == ["last"]


def test_an_error_is_told_and_the_next_is_tried() -> None:
    heard: list[OSError | None] = []
    told = threading.Semaphore(0)
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail() -> None:
        raise full

    def hear(error: OSError | None) -> None:
        heard.append(error)
        told.release()

    writer = StatusWriter(hear)
    writer.start()
    writer.write(fail)
    told.acquire()
    writer.write(lambda: None)
    assert writer.close(60.0)
    assert heard == [full, None]


def job(nodes: int) -> Controller:
    """A controller that has heard of two ranks on each of these nodes."""
    controller = Controller(Settings())
    for node in range(nodes):
        controller.connected(node, "agent")
        controller.message(node, wire.Hello("agent", f"n{node}", node, 1), 1.0)
        ranks = tuple(wire.RankBeat(2 * node + local, node, 2, 7) for local in (0, 1))
        controller.message(node, wire.Heartbeat(node, 1, 1.0, ranks), 2.0)
    return controller


def test_rows_of_large_jobs_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    """Who reads the status through `Run` sees no difference."""
    for nodes in (3, 1100, 4):
        write_status(tmp_path, *status_of(job(nodes), 3.0, 5.0, {}))
        found = Run(tmp_path).status()
        assert found is not None
        rows = [cells for node in found["nodes"] for cells in node["ranks"]]
        assert [cells[:2] for cells in rows] == [[rank, rank // 2] for rank in range(2 * nodes)]
        apart = b'"ranks":[[' not in (tmp_path / "status.json").read_bytes()
        assert apart == (nodes > 1024) == bool(found["ranks_file"])


def test_a_status_without_its_rows_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    write_status(tmp_path, *status_of(job(1100), 3.0, 5.0, {}))
    (tmp_path / "ranks.msgpack").unlink()
    found = Run(tmp_path).status()
    assert found is not None
    assert [node["ranks"] for node in found["nodes"]] == [[]] * 1100


def test_an_error_of_our_own_is_logged_and_the_next_is_written(caplog: pytest.LogCaptureFixture) -> None:
    written, heard = list[int](), list[OSError | None]()
    told = threading.Semaphore(0)

    def hear(error: OSError | None) -> None:
        heard.append(error)
        told.release()

    writer = StatusWriter(hear)
    writer.start()
    writer.write(lambda: written.append(1 // 0))
    told.acquire()
    writer.write(lambda: written.append(2))
    assert writer.close(60.0)
    assert (written, heard) == ([2], [None, None])
    assert "ZeroDivisionError" in caplog.text
