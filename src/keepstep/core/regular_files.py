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
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, "is a folder, a file is needed there", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(
                errno.EINVAL, "is a FIFO, socket or device; copy what it holds into a file", str(path)
            )
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a plain file of at most ``most_bytes``.

    Raises:
        OSError: as ``open_regular``, or the file is larger.
    """
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(
            errno.EFBIG, f"is larger than the {most_bytes >> 20} MiB that are read of it", str(path)
        )
    return content
