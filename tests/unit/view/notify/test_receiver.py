"""One receiver: tries again, gives up, takes over from a server that has gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.view.notify.receiving import Web, web
from tests.unit.view.notify.told_runs import LOOSE, START_S, over, seen, slow

from keepstep.view.notify import told_file
from keepstep.view.notify.delivery import NotDeliveredError
from keepstep.view.notify.notice import Notice
from keepstep.view.notify.posting import address_of, post
from keepstep.view.notify.receiver import Receiver
from keepstep.view.notify.told_file import ToldFile, folders_for

NO_WAITS_S = (0.0,) * 3


class Told:
    """A receiver that keeps what it gets, and fails as it is told to first."""

    def __init__(self, *failures: NotDeliveredError) -> None:
        self.failures = list(failures)
        self.notices: list[Notice] = []
        self.tries = 0

    def __call__(self, notice: Notice) -> None:
        self.tries += 1
        if self.failures:
            raise self.failures.pop(0)
        self.notices.append(notice)

    @property
    def what(self) -> list[str]:
        return [one.what for one in self.notices]


def receiver(folder: Path, send: Callable[[Notice], None], lines: list[str], name: str = "hook") -> Receiver:
    file = ToldFile([folder / "notified"], name)
    made = Receiver(name, LOOSE, file, send, lines.append, waits_s=NO_WAITS_S, unix_s=lambda: START_S)
    made.start()
    return made


def offered(one: Receiver, *snapshots: object) -> None:
    for snapshot in snapshots:
        one.offer(snapshot)  # type: ignore[arg-type]
        assert one.settle(20.0)


def test_what_fails_is_tried_again(tmp_path: Path) -> None:
    told, lines = Told(NotDeliveredError("down"), NotDeliveredError("down")), list[str]()
    one = receiver(tmp_path, told, lines)
    offered(one, seen(), seen(slow(1, 3)))
    one.close(1.0)
    assert (told.what, told.tries, lines) == (["opened"], 3, [])


def test_what_cannot_be_delivered_is_given_up_in_one_line(tmp_path: Path) -> None:
    told, lines = Told(*[NotDeliveredError("it answers 500")] * 4), list[str]()
    one = receiver(tmp_path, told, lines)
    offered(one, seen(), seen(slow(1, 3)))
    assert (told.notices, told.tries) == ([], 4)
    (line,) = lines
    assert line.startswith(
        "notify hook: not delivered, given up after 4 tries: it answers 500: train-7b: the job is slow"
    )
    offered(one, seen(over(slow(1, 3))))
    one.close(1.0)
    assert [(told.what, told.notices[0].undelivered)] == [(["over"], 1)], "the next says that one is missing"


def test_what_is_refused_for_good_is_not_tried_again(tmp_path: Path) -> None:
    told, lines = Told(NotDeliveredError("it answers 404", is_final=True)), list[str]()
    one = receiver(tmp_path, told, lines)
    offered(one, seen(), seen(slow(1, 3)))
    one.close(1.0)
    assert (told.tries, len(lines)) == (1, 1)


def test_who_hangs_is_told_later_in_fewer_words(tmp_path: Path) -> None:
    hanging, going = threading.Event(), threading.Event()
    told = Told()

    def send(notice: Notice) -> None:
        hanging.set()
        assert going.wait(20.0)
        told(notice)

    one = receiver(tmp_path, send, [])
    offered(one, seen())
    one.offer(seen(slow(1, 3)))
    assert hanging.wait(20.0)
    for step in range(2, 50):  # nobody waits, and nothing piles up
        one.offer(seen(slow(1, 3), slow(2, 1), newest_step=step))
    one.offer(seen(over(slow(1, 3)), over(slow(2, 1))))
    going.set()
    assert one.settle(20.0)
    one.close(1.0)
    assert [(notice.what, notice.incident and notice.incident.number) for notice in told.notices] == [
        ("opened", 1),
        ("over", 1),
        ("over", 2),
    ]


def test_an_odd_snapshot_does_not_end_it(tmp_path: Path) -> None:
    told, lines = Told(), list[str]()
    one = receiver(tmp_path, told, lines)
    offered(one, seen(), "no snapshot", seen(slow(1, 3)))
    one.close(1.0)
    assert told.what == ["opened"]
    assert lines[0].startswith("notify hook: a snapshot could not be told: AttributeError")


def test_of_two_servers_one_tells_and_the_other_takes_over(tmp_path: Path) -> None:
    first_told, second_told = Told(), Told()
    first, second = receiver(tmp_path, first_told, []), receiver(tmp_path, second_told, [])
    offered(first, seen(), seen(slow(1, 3)))
    offered(second, seen(slow(1, 3)))
    assert (first_told.what, second_told.what) == (["opened"], [])
    first.close(1.0)
    offered(second, seen(over(slow(1, 3))))
    second.close(1.0)
    assert second_told.what == ["over"]


def test_other_receivers_are_told_by_their_own_account(tmp_path: Path) -> None:
    told = Told(), Told()
    for one in (receiver(tmp_path, told[0], []), receiver(tmp_path, told[1], [], "mail")):
        offered(one, seen(), seen(slow(1, 3)))
        one.close(1.0)
    assert [one.what for one in told] == [["opened"], ["opened"]]


def begin_and_hang(folder: Path, url: str) -> None:
    def send(notice: Notice) -> None:
        post(address_of(url, "url"), notice.title.encode(), {}, 60.0)

    one = receiver(folder, send, [])
    offered(one, seen())
    one.offer(seen(slow(1, 3)))
    one.settle(60.0)


def test_what_was_under_way_when_the_server_was_killed_is_sent_by_the_next(tmp_path: Path) -> None:
    with web("hang") as server:
        child = multiprocessing.get_context("spawn").Process(
            target=begin_and_hang, args=(tmp_path, server.url)
        )
        child.start()
        wait_for_request(server)
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        child.close()
    told = Told()
    one = receiver(tmp_path, told, [])
    offered(one, seen(slow(1, 3)))
    one.close(1.0)
    assert told.what == ["opened"]


def wait_for_request(server: Web) -> None:
    moment = threading.Event()
    for _ in range(3000):
        if server.requests:
            return
        moment.wait(0.01)
    raise AssertionError("nothing was sent")


def test_a_damaged_file_is_said_and_all_that_is_open_is_told(tmp_path: Path) -> None:
    told, lines = Told(), list[str]()
    one = receiver(tmp_path, told, lines)
    offered(one, seen(), seen(slow(1, 3)))
    one.close(1.0)
    (path,) = (tmp_path / "notified").glob("*.json")
    path.write_text("{")
    one = receiver(tmp_path, told, lines)
    offered(one, seen(slow(1, 3)))
    one.close(1.0)
    assert told.what == ["opened", "opened"]
    assert len(lines) == 1
    assert "told again" in lines[0]


def test_where_nothing_can_be_written_it_is_told_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "notified").write_text("a file is in the way")
    told, lines = Told(), list[str]()
    one = receiver(tmp_path, told, lines)
    offered(one, seen(), seen(slow(1, 3)))
    one.close(1.0)
    assert told.what == ["opened"]
    assert len(lines) == 1
    assert "cannot be kept" in lines[0]


def test_the_file_holds_no_address(tmp_path: Path) -> None:
    one = receiver(tmp_path, Told(), [], "https://example.com/s3cr3t")
    offered(one, seen(), seen(slow(1, 3)))
    one.close(1.0)
    files = list((tmp_path / "notified").iterdir())
    assert len(files) == 2
    assert not any("s3cr3t" in f"{path}{path.read_text()}" for path in files)


def test_where_it_is_kept(tmp_path: Path) -> None:
    run, state = tmp_path / "run", tmp_path / "state"
    run.mkdir()
    there, other = folders_for(run, {"XDG_STATE_HOME": str(state)})
    assert there == run / "notified"
    assert other.parent == state / "keepstep" / "notified"
    assert (
        folders_for(tmp_path / "gone", {"HOME": str(tmp_path)})[0].parent
        == tmp_path / ".local/state/keepstep/notified"
    )


def test_a_file_system_that_hangs_keeps_nobody_from_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, told, lines = threading.Event(), Told(), list[str]()
    monkeypatch.setattr(told_file, "write_whole", lambda *_: hangs.wait())
    monkeypatch.setattr(told_file, "_PATIENCE_S", 0.01)
    one = receiver(tmp_path, told, lines)
    offered(one, seen(), seen(slow(1, 3)), seen(over(slow(1, 3))))
    one.close(1.0)
    hangs.set()
    assert told.what == ["opened", "over"]
    assert len(lines) == 1
    assert "its file system hangs: after a restart it is told again" in lines[0]
