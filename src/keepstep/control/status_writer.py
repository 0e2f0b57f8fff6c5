"""Writes ``RUN/status.json`` in a thread of its own, as a file system may take any time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from keepstep.control.run_status import RankRows, Status, packed_list
from keepstep.core.own_folders import write_whole

logger = logging.getLogger("keepstep.control")

Write = Callable[[], None]


class StatusWriter:
    """Writes one status after another, the newest of those that wait. All calls come from one thread.

    ``written`` is called in the writer's thread after each attempt, with the error if there was one.
    """

    def __init__(self, written: Callable[[OSError | None], None]) -> None:
        self._written = written
        self._change = threading.Condition()
        self._next: Write | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="keepstep-status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def write(self, write: Write) -> None:
        """Have ``write`` called soon, instead of what waits. It may raise OSError."""
        with self._change:
            self._next = write
            self._change.notify()

    def close(self, patience_s: float) -> bool:
        """Write what waits, and end the thread; False if it was still writing after ``patience_s``."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (write := self._taken()) is not None:
            self._written(_error_of(write))

    def _taken(self) -> Write | None:
        """What is to be written now; None: nothing more. Waits for it."""
        with self._change:
            self._change.wait_for(lambda: self._next is not None or self._closing)
            taken, self._next = self._next, None
            return taken


def _error_of(write: Write) -> OSError | None:
    try:
        write()
    except OSError as error:
        return error
    except Exception:
        logger.exception("status.json is not written, by an error of keepstep itself")
    return None


def write_status(folder: Path, status: Status, rows: list[RankRows]) -> None:
    """Write ``status.json`` into the run's folder, and before it the rows of ranks that are not in it."""
    if status.ranks_file:  # encoded node by node: the controller's loop may run between two of them
        write_whole(folder / status.ranks_file, packed_list([msgspec.msgpack.encode(row) for row in rows]))
    write_whole(folder / "status.json", msgspec.json.encode(status))
