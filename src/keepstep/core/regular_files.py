"""Opens files that others wrote, of plain files only: opening a FIFO could block for ever, a device might never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """The file at ``path``, open for reading bytes; symbolic links are followed.

    Raises:
        OSError: it cannot be opened, or is no plain file. ``strerror`` says which.
    """
    descriptor, _ = _opened(path)
    try:
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_part(path: Path | str, most_bytes: int, *, from_end: bool = False) -> tuple[bytes, os.stat_result]:
    """At most so many bytes from the beginning or the end of a plain file, and what the system tells of it.

    Raises OSError as ``open_regular``.
    """
    descriptor, about = _opened(path)
    try:
        return os.pread(descriptor, most_bytes, max(about.st_size - most_bytes, 0) if from_end else 0), about
    finally:
        os.close(descriptor)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a plain file of at most ``most_bytes``.

    Raises:
        OSError: as ``open_regular``, or the file is larger.
    """
    with open_regular(path) as file:
        is_larger = os.fstat(file.fileno()).st_size > most_bytes
        content = b"" if is_larger else file.read(most_bytes + 1)
    if is_larger or len(content) > most_bytes:
        raise OSError(
            errno.EFBIG, f"is larger than the {most_bytes >> 20} MiB that are read of it", str(path)
        )
    return content


def _opened(path: Path | str) -> tuple[int, os.stat_result]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        about = os.fstat(descriptor)
        if stat.S_ISDIR(about.st_mode):
            raise OSError(errno.EISDIR, "is a folder, a file is needed there", str(path))
        if not stat.S_ISREG(about.st_mode):
            raise OSError(
                errno.EINVAL, "is a FIFO, socket or device; copy what it holds into a file", str(path)
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, about
