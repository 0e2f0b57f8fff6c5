"""One receiver in a thread of its own: what is new of a run is put into words, sent, and tried again for a while.

There is room for one snapshot, the newest: a receiver that hangs is told later what happened meanwhile, in fewer
words, and nobody else waits for it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from keepstep.view.notify.delivery import NotDeliveredError
from keepstep.view.notify.notice import Notice
from keepstep.view.notify.telling import Notices, Rules
from keepstep.view.notify.told_file import ToldFile
from keepstep.view.notify.told_state import Told
from keepstep.view.run_snapshot import RunSnapshot

Send = Callable[[Notice], None]
Say = Callable[[str], None]
WAITS_S = (1.0, 4.0, 15.0, 60.0, 240.0)  # before the second try, the third, …
_SPREAD = 0.2  # share by which waits differ, so that many servers do not try again at once
_MOST_PENDING = 32  # notices that wait; of more the oldest is given up


class Receiver:
    """Tells one receiver of a run. ``send`` raises NotDeliveredError; ``say`` prints one line.

    ``waits_s``: seconds before the second try, the third, …; after the last it is given up. ``unix_s``: the clock.
    """

    def __init__(
        self,
        name: str,
        rules: Rules,
        file: ToldFile,
        send: Send,
        say: Say,
        *,
        waits_s: tuple[float, ...] = WAITS_S,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._rules, self._file, self._send, self._say = rules, file, send, say
        self._waits_s, self._unix_s = waits_s, unix_s
        self._notices: Notices | None = None
        self._newest: RunSnapshot | None = None
        self._has_news = threading.Condition()
        self._stopping, self._is_idle = threading.Event(), True
        self._said_trouble = ""
        self._thread = threading.Thread(target=self._run, name=f"notify {name}", daemon=True)

    def start(self) -> None:
        """Begin to tell."""
        self._thread.start()

    def offer(self, snapshot: RunSnapshot) -> None:
        """Take the newest snapshot; never waits."""
        with self._has_news:
            self._newest = snapshot
            self._has_news.notify_all()

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that was offered is told or given up. Returns whether it is."""
        with self._has_news:
            return self._has_news.wait_for(lambda: self._newest is None and self._is_idle, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End within ``timeout_s``. What is still on its way is told by the next server that finds it."""
        self.settle(timeout_s)
        self._stopping.set()
        with self._has_news:
            self._has_news.notify_all()
        self._thread.join(1.0)

    def _run(self) -> None:
        while (snapshot := self._next()) is not None:
            self._tell_anyway(snapshot)
        self._file.close()

    def _tell_anyway(self, snapshot: RunSnapshot) -> None:
        """Tell what is new. One odd snapshot must not end the telling."""
        try:
            self._tell(snapshot)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._say(f"notify {self.name}: a snapshot could not be told: {why}")

    def _next(self) -> RunSnapshot | None:
        with self._has_news:
            self._is_idle = True
            self._has_news.notify_all()
            self._has_news.wait_for(lambda: self._newest is not None or self._stopping.is_set())
            found, self._newest, self._is_idle = self._newest, None, False
            return None if self._stopping.is_set() else found

    def _tell(self, snapshot: RunSnapshot) -> None:
        notices = self._taken_over()
        if notices is None:
            return  # another server tells
        new = notices.since(snapshot, self._unix_s())
        told = notices.told
        told.pending += new
        dropped = max(len(told.pending) - _MOST_PENDING, 0)
        del told.pending[:dropped]
        told.undelivered += dropped
        self._keep(notices)
        while told.pending and not self._stopping.is_set():
            self._deliver(told)
            self._keep(notices)

    def _taken_over(self) -> Notices | None:
        if self._notices is None and (told := self._file.take_over()) is not None:
            self._notices = Notices(self._rules, told)
            self._tell_trouble()
        return self._notices

    def _keep(self, notices: Notices) -> None:
        self._file.keep(notices.told)
        self._tell_trouble()

    def _tell_trouble(self) -> None:
        trouble = self._file.trouble
        if trouble and trouble != self._said_trouble:
            self._say(f"notify {self.name}: {trouble}")
        self._said_trouble = trouble

    def _deliver(self, told: Told) -> None:
        """Send the first that waits, or give it up. It stays where the server is stopped meanwhile."""
        notice = replace(told.pending[0], undelivered=told.undelivered)
        why = self._tried(notice)
        if why is None:
            return
        del told.pending[0]
        if not why:
            told.undelivered = 0
            return
        told.undelivered += 1
        self._say(f"notify {self.name}: not delivered, {why}: {notice.title}")

    def _tried(self, notice: Notice) -> str | None:
        """Empty once it was delivered, else why it was given up; None where the server is stopped meanwhile."""
        for tries, wait_s in enumerate((*self._waits_s, None), start=1):
            error = self._refusal(notice)
            if error is None:
                return ""
            if error.is_final:
                return str(error)
            if wait_s is None:
                return f"given up after {tries} tries: {error}"
            spread_s = wait_s * random.uniform(1 - _SPREAD, 1 + _SPREAD)
            if self._stopping.wait(max(spread_s, error.wait_s or 0.0)):
                return None
        return None

    def _refusal(self, notice: Notice) -> NotDeliveredError | None:
        """Send it once; returns why it did not arrive."""
        try:
            self._send(notice)
        except NotDeliveredError as error:
            return error
        return None
