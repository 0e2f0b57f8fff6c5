"""Reading from a storage that hangs, fails for a while, or returns damaged bytes.

A call that hangs cannot be ended, so `PatientStorage` runs each call in a thread of its own and leaves the thread
behind when the time is over. The thread touches no memory of others: the caller copies what was read. Bytes that were
read as damaged are read again, because a fault on their way is likelier than one on storage: only the same damage found
twice is taken for damage of the file.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.storage.backend import Readable, StorageReader
from keepstep.checkpoint.storage.read import StoredStep, Unread, look
from keepstep.core.errors import CheckpointError

log = logging.getLogger(__name__)

_MOST_CALLS = 64  # calls at a time, those that hang included
_MOST_LOOKS = 8  # looks at a step that is read differently each time
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0  # pause before the next try, doubled from the first to the longest

T = TypeVar("T")


def read_again(read: Callable[[], T], until_s: float) -> T:
    """Call ``read`` until it succeeds; raises its CheckpointError once that is certain or time is over.

    An `Unread` is never certain; any other CheckpointError is, once the same message has come twice. ``until_s`` is on
    the clock of ``time.monotonic``.
    """
    pause_s, damage = _PAUSE_S, set[str]()
    while True:
        try:
            return read()
        except CheckpointError as error:
            is_certain = not isinstance(error, Unread) and str(error) in damage
            if is_certain or time.monotonic() >= until_s:
                raise
            damage.add(str(error))
            log.warning("%s; it is read again", error)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def look_until_sure(storage: StorageReader, key: Key) -> StoredStep:
    """A step as it was seen whole, unfinished, or twice with the same problems. Raises OSError as `look` does."""
    seen: set[tuple[str, ...]] = set()
    while True:
        step = look(storage, key)
        if step.whole or step.unfinished or step.problems in seen or len(seen) == _MOST_LOOKS:
            return step
        seen.add(step.problems)


class Hung(OSError):
    """A call to a storage has not returned in time."""


class PatientStorage:
    """A storage to read from whose calls raise `Hung` when they do not return within ``patience_s``."""

    def __init__(self, storage: StorageReader, patience_s: float) -> None:
        self._storage, self._patience_s, self.where = storage, patience_s, storage.where
        self._places = threading.BoundedSemaphore(_MOST_CALLS)

    def folders(self) -> list[str]:
        return self.call(self._storage.folders)

    def files(self, folder: str) -> dict[str, int]:
        return self.call(lambda: self._storage.files(folder))

    def open(self, folder: str, name: str) -> Readable:
        def close(opened: Future[Readable]) -> None:
            if opened.exception() is None:
                opened.result().close()

        return _PatientFile(self, self.call(lambda: self._storage.open(folder, name), close))

    def call(self, what: Callable[[], T], late: Callable[[Future[T]], None] = lambda _: None) -> T:
        """Call ``what`` in a thread. ``late`` is called there when ``what`` returns after it was given up."""
        hung = Hung(errno.ETIMEDOUT, f"hangs: no answer within {self._patience_s:g} s")
        if not self._places.acquire(timeout=self._patience_s):
            raise hung
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(what())
            except Exception as error:  # raised again in the thread that waits for the future
                future.set_exception(error)
            finally:
                self._places.release()

        try:
            threading.Thread(target=run, name="keepstep-storage", daemon=True).start()
        except RuntimeError as error:
            self._places.release()
            raise OSError(errno.EAGAIN, str(error)) from None
        if not wait([future], self._patience_s).done:
            future.add_done_callback(late)
            raise hung
        return future.result()


class _PatientFile:
    """An open file. After a call that hung, the file belongs to that call's thread, which closes it."""

    def __init__(self, storage: PatientStorage, file: Readable) -> None:
        self._storage, self._file = storage, file
        self._buffer = memoryview(b"")
        self._hung = False

    def readinto(self, target: memoryview) -> int:
        if len(self._buffer) < len(target):
            self._buffer = memoryview(bytearray(len(target)))
        part = self._buffer[: len(target)]
        count = self._call(lambda: self._file.readinto(part))
        target[:count] = part[:count]
        return count

    def seek(self, offset: int) -> object:
        return self._call(lambda: self._file.seek(offset))

    def close(self) -> None:
        if not self._hung:
            self._call(self._file.close)

    def _call(self, what: Callable[[], T]) -> T:
        try:
            return self._storage.call(what, lambda _: self._file.close())
        except Hung:
            self._hung = True
            raise
