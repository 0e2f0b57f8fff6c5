"""The tables of messages, read in a thread once they are needed: that takes long, and a start must not wait for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from keepstep.detect.failure_rows import RowMatcher
from keepstep.detect.own_tables import matcher_in_force, own_rows

logger = logging.getLogger("keepstep.agent")


class LateRows:
    """One matcher for all listeners of a node."""

    def __init__(self, load: Callable[[], RowMatcher] = matcher_in_force) -> None:
        self._load = load
        self._matcher: RowMatcher | None = None
        self._thread: threading.Thread | None = None

    def get(self, *, wait: bool = False) -> RowMatcher | None:
        """The matcher; None: it is not there yet, or the tables cannot be read. ``wait`` until that is known."""
        if self._matcher is None:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="keepstep-rows", daemon=True)
                self._thread.start()
            if wait:
                self._thread.join()
        return self._matcher

    def _run(self) -> None:
        try:
            self._matcher = self._load()
            for line in own_rows()[1]:
                logger.warning("%s", line)
        except Exception:
            logger.exception("what ranks and kernel say is not understood")
