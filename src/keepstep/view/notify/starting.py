"""``keepstep serve --notify FILE``: from its flags to threads that tell, and tests of them."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from keepstep import __version__
from keepstep.core.log_lines import one_line
from keepstep.view.notify.delivery import NotDeliveredError
from keepstep.view.notify.forms import SIGNATURE, signature, slack_body, webhook_body
from keepstep.view.notify.mailing import mail_of
from keepstep.view.notify.mailing import send as send_mail
from keepstep.view.notify.notice import JobBrief, Notice, plain
from keepstep.view.notify.posting import post
from keepstep.view.notify.receiver import Receiver, Say, Send
from keepstep.view.notify.receivers import MailTo, PostTo, Track, Wanted, read_receivers
from keepstep.view.notify.told_file import ToldFile, folders_for
from keepstep.view.notify.tracker import TrackerOrder
from keepstep.view.notify.tracker_feed import TrackerFeed
from keepstep.view.notify.tracker_process import COMMAND, TrackerProcess
from keepstep.view.run_snapshot import RunSnapshot, unread
from keepstep.view.run_source import RunSource

_CLOSE_S = 8.0
_TRACKER_TEST_S = 90.0
_LAST_S = 600.0  # for what is told last, tries that fail included
_LOOK_S, _LARGE_LOOK_S = 1.0, 5.0  # between two looks, and at a job of more than so many ranks
_LARGE_RANKS = 4096
_STUCK_S = 30.0  # after which a look at the run is taken to hang


class _Told(Protocol):
    """One receiver that is told in a thread of its own."""

    def start(self) -> None: ...
    def offer(self, snapshot: RunSnapshot) -> None: ...
    def settle(self, timeout_s: float) -> bool: ...
    def close(self, timeout_s: float) -> None: ...


class Telling:
    """Tells all receivers. It is called with each new snapshot, and never waits for any of them.

    Where it is not called any more, as on a file system that hangs, a thread of its own tells that nothing is heard.
    """

    def __init__(self, receivers: Sequence[_Told], stuck_s: float = _STUCK_S) -> None:
        self._receivers, self._stuck_s = tuple(receivers), stuck_s
        self._newest: tuple[RunSnapshot, float] | None = None  # the newest snapshot, and when it came
        self._lock, self._closing = threading.Lock(), threading.Event()
        for one in self._receivers:
            one.start()
        threading.Thread(target=self._watch, name="notify", daemon=True).start()

    def __call__(self, snapshot: RunSnapshot) -> None:
        with self._lock:
            self._newest = snapshot, time.monotonic()
            self._offer(snapshot)

    def _offer(self, snapshot: RunSnapshot) -> None:
        for one in self._receivers:
            one.offer(snapshot)

    def _watch(self) -> None:
        while not self._closing.wait(self._stuck_s / 2):
            with self._lock:
                if self._newest is None or self._newest[0].end is not None:
                    continue
                snapshot, came_s = self._newest
                stuck_s = time.monotonic() - came_s
                if stuck_s >= self._stuck_s:
                    self._offer(unread(snapshot, stuck_s))

    def settle(self, timeout_s: float) -> bool:
        """Wait until all receivers were told what was offered. Returns whether they were."""
        until_s = time.monotonic() + timeout_s
        return all(one.settle(max(until_s - time.monotonic(), 0.0)) for one in self._receivers)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End within about ``timeout_s`` seconds, however many hang."""
        self._closing.set()
        closing = [threading.Thread(target=one.close, args=(timeout_s,)) for one in self._receivers]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``keepstep serve`` that are about being told."""
    text = "tell those whom this TOML file names: webhooks, Slack, mail, trackers"
    parser.add_argument("--notify", type=Path, metavar="FILE", help=text)
    text = "send a test message to each of them, say what became of it, and exit"
    parser.add_argument("--notify-test", action="store_true", help=text)
    text = "serve no page, only tell, and exit when the job has ended and that is told"
    parser.add_argument("--no-page", action="store_true", help=text)


def start(file: Path, run: str, folder: Path, environ: Mapping[str, str], say: Say | None = None) -> Telling:
    """Begin to tell the receivers that ``file`` names of the run in ``folder``.

    Raises:
        UsageError: the file, or one that it names, cannot be used.
    """
    tell = say or _on_stderr
    folders = folders_for(folder, environ)
    return Telling([_receiver(one, folders, tell) for one in read_receivers(file, run, environ)])


def test(file: Path, snapshot: RunSnapshot, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Send a test message to each receiver: names, and why it did not arrive (empty: it did).

    Raises:
        UsageError: as `start`.
    """
    wanted = read_receivers(file, snapshot.name, environ)
    return [(one.name, _tried(one, _test_notice(snapshot, one))) for one in wanted]


def tell_until_end(source: RunSource, telling: Telling, sleep: Callable[[float], None] = time.sleep) -> None:
    """Look at the run again and again until its job has ended and all receivers know, or were given up."""
    while True:
        snapshot = source.refresh()
        telling(snapshot)
        if snapshot.end is not None:
            telling.settle(_LAST_S)
            return
        sleep(_LOOK_S if snapshot.world_size <= _LARGE_RANKS else _LARGE_LOOK_S)


def _on_stderr(line: str) -> None:
    print(f"keepstep: {one_line(line)}", file=sys.stderr, flush=True)


def _receiver(one: Wanted, folders: list[Path], say: Say) -> _Told:
    file = ToldFile(folders, _identity(one))
    if isinstance(one, Track):
        return TrackerFeed(one.name, one.rules, file, _process(one, say), say)
    return Receiver(one.name, one.rules, file, sender_of(one), say)


def _process(one: Track, say: Say) -> TrackerProcess:
    return TrackerProcess(one.options, say, secrets=tuple(one.options.headers.values()), command=COMMAND)


def _identity(one: Wanted) -> str:
    """What makes two receivers the same one, in several servers and after a restart."""
    if isinstance(one, PostTo):
        return f"{one.form} {one.address.shown}{one.address.target}"
    if isinstance(one, MailTo):
        return f"mail {one.server.host}:{one.server.port} {' '.join(sorted(one.recipients))}"
    options: dict[str, Any] = msgspec.to_builtins(one.options) | {"headers": {}}
    return f"tracker {sorted(options.items())}"


def sender_of(one: PostTo | MailTo) -> Send:
    """How a notice is sent to this receiver; it raises NotDeliveredError."""
    return _mail_sender(one) if isinstance(one, MailTo) else _post_sender(one)


def _post_sender(one: PostTo) -> Callable[[Notice], None]:
    def send(notice: Notice) -> None:
        body = slack_body(notice) if one.form == "slack" else webhook_body(notice)
        headers = {"Content-Type": "application/json", "User-Agent": f"keepstep/{__version__}"}
        if one.key:
            headers[SIGNATURE] = signature(one.key, body, int(time.time()))
        try:
            post(one.address, body, headers, one.timeout_s, one.trusted)
        except NotDeliveredError as error:
            raise NotDeliveredError(
                f"{one.address.shown}: {error}", is_final=error.is_final, wait_s=error.wait_s
            ) from None

    return send


def _mail_sender(one: MailTo) -> Callable[[Notice], None]:
    def send(notice: Notice) -> None:
        mail = mail_of(notice, one.sender, one.recipients)
        try:
            send_mail(one.server, mail, one.sender, one.recipients, one.timeout_s, one.trusted)
        except NotDeliveredError as error:
            where = f"{one.server.host}:{one.server.port}"
            raise NotDeliveredError(
                f"{where}: {error}", is_final=error.is_final, wait_s=error.wait_s
            ) from None

    return send


def _test_notice(snapshot: RunSnapshot, one: Wanted) -> Notice:
    name, now = plain(snapshot.name, 60), time.time()
    job = JobBrief(plain(snapshot.state, 100), snapshot.newest_step, snapshot.world_size, snapshot.restarts)
    return Notice(
        id=f"{name}/{snapshot.started_unix_s:.0f}/run/test/{now:.0f}",
        what="test",
        severity="info",
        run=name,
        unix_s=now,
        title=f"{name}: a test of keepstep: notices arrive here",
        lines=(),
        job=job,
        page_url=one.rules.page_url,
    )


def _tried(one: Wanted, notice: Notice) -> str:
    """Why a notice did not arrive; empty where it did."""
    if not isinstance(one, Track):
        try:
            sender_of(one)(notice)
        except NotDeliveredError as error:
            return str(error)
        return ""
    told: list[str] = []
    process = _process(one, told.append)
    process.record(TrackerOrder(notice=notice))
    process.close(_TRACKER_TEST_S)
    if told:
        return told[0].partition(": ")[2]
    return f"not recorded within {_TRACKER_TEST_S:g} s" if process.waits else ""
