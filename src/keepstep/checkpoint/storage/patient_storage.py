"""A storage to be read from whose calls end in time, also when the file system or the store under it hangs.

A call that hangs cannot be ended, so each runs in a thread of its own, which is then left behind. It touches no memory
but its own: what was read is copied by the caller.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from keepstep.checkpoint.storage.backend import Readable, StorageReader

_MOST_CALLS = 64  # at a time, those that hang included

T = TypeVar("T")


class Hung(OSError):
    """A call has not come back in time."""


class PatientStorage:
    """What can be read of a storage. Raises `Hung`: nothing came for ``patience_s``."""

    def __init__(self, storage: StorageReader, patience_s: float) -> None:
        self._storage, self._patience_s = storage, patience_s
        self._places = threading.BoundedSemaphore(_MOST_CALLS)

    @property
    def where(self) -> str:
        return self._storage.where

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
        """What ``what`` gives or raises. ``late``: called in its thread should it come back after all."""
        hung = Hung(errno.ETIMEDOUT, f"hangs: no answer within {self._patience_s:g} s")
        if not self._places.acquire(timeout=self._patience_s):
            raise hung
        future: Future[T] = Future()
        try:
            threading.Thread(
                target=self._run, args=(what, future), name="keepstep-storage", daemon=True
            ).start()
        except RuntimeError as error:
            self._places.release()
            raise OSError(errno.EAGAIN, str(error)) from None
        if not wait([future], self._patience_s).done:
            future.add_done_callback(late)
            raise hung
        return future.result()

    def _run(self, what: Callable[[], T], future: Future[T]) -> None:
        try:
            future.set_result(what())
        except Exception as error:  # for who waits
            future.set_exception(error)
        finally:
            self._places.release()


class _PatientFile:
    """An open file. After a call that hung it is its thread's alone."""

    def __init__(self, storage: PatientStorage, file: Readable) -> None:
        self._storage, self._file = storage, file
        self._buffer = memoryview(b"")
        self._hung = False

    def read(self, size: int) -> bytes:
        return self._call(lambda: self._file.read(size))

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
