"""What a tracker gets of a run, in a thread of its own: pace by step, and every notice as an event."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from keepstep.view.notify.pace_series import Pace
from keepstep.view.notify.receiver import Say
from keepstep.view.notify.telling import Notices, Rules
from keepstep.view.notify.told_file import ToldFile
from keepstep.view.notify.tracker import TrackerOrder
from keepstep.view.notify.tracker_process import TrackerProcess
from keepstep.view.run_snapshot import RunSnapshot


class TrackerFeed:
    """Feeds one tracker's process. Only the server that tells writes the series, too."""

    def __init__(
        self,
        name: str,
        rules: Rules,
        file: ToldFile,
        process: TrackerProcess,
        say: Say,
        *,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._rules, self._file, self._process, self._say = rules, file, process, say
        self._unix_s, self._pace = unix_s, Pace()
        self._notices: Notices | None = None
        self._newest: RunSnapshot | None = None
        self._stopping, self._is_settled = threading.Event(), threading.Event()
        self._close_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"notify {name}", daemon=True)

    def start(self) -> None:
        """Begin to feed."""
        self._thread.start()

    def offer(self, snapshot: RunSnapshot) -> None:
        """Take the newest snapshot; never waits."""
        self._is_settled.clear()
        self._newest = snapshot

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that was offered is recorded, or nothing will be. Returns whether it is."""
        return self._is_settled.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """End within ``timeout_s``; a tracker that is not done by then is killed."""
        self._close_s = timeout_s
        self._stopping.set()
        self._thread.join(timeout_s + 2.0)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._step()
            self._step()
        finally:
            self._process.close(self._close_s)
            self._file.close()

    def _step(self) -> None:
        snapshot, self._newest = self._newest, None
        try:
            if snapshot is not None:
                self._take(snapshot)
            self._process.pump()
        except Exception as error:  # one odd snapshot must not end the series
            self._say(
                f"notify {self.name}: a snapshot could not be recorded: {type(error).__name__}: {error}"
            )
        if self._newest is None and not self._process.waits:
            self._is_settled.set()

    def _take(self, snapshot: RunSnapshot) -> None:
        if self._notices is None:
            told = self._file.take_over()
            if told is None:
                return  # another server records
            self._notices = Notices(self._rules, told)
        if (point := self._pace.point(snapshot)) is not None:
            self._process.record(TrackerOrder(point=point))
        for notice in self._notices.since(snapshot, self._unix_s()):
            self._process.record(TrackerOrder(notice=notice))
        self._file.keep(self._notices.told)
