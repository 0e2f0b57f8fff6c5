"""Keeps a second run out of a checkpoint folder: two runs at once would take each other's steps for their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from keepstep.core.errors import UsageError

FILE = ".in-use"  # in the folder; the lock on it is what counts, not that it is there
_PATIENCE_S = 3.0  # a run that is just ending
_POLL_S = 0.1
_MOST_BYTES = 400


class FolderLock:
    """The right to use a folder for checkpoints, until it is closed or this process ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        """Let others use the folder."""
        os.close(self._descriptor)


def lock_folder(where: str, who: str, patience_s: float = _PATIENCE_S) -> FolderLock | None:
    """Take a folder for this run; None where that cannot be done: an object store, a file system without locks.

    ``who``: this run, for the message that another one gets.

    Raises UsageError when another run uses the folder.
    """
    scheme, separator, rest = where.partition("://")
    if separator and scheme != "file":
        return None
    path = Path(rest if separator else where) / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644
        )
    except OSError:  # whatever keeps steps from being written there is said when they are
        return None
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                continue
            other = os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise UsageError(
                f"--checkpoint-dir {path.parent} is in use by {other or 'another run'}: give another folder, "
                "or wait for the end of that run"
            ) from None
        except OSError:
            os.close(descriptor)
            return None
    with contextlib.suppress(OSError):  # such as a full disk: then the message does not say who
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, who.encode()[:_MOST_BYTES], 0)
    return FolderLock(descriptor)
