"""Where a worker leaves what it says as it is aborted, for the launcher to read: beside its error file."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def last_words(error_file: str | Path, process: int) -> Path:
    """The file of a process: ``abort-PID.log`` in the folder of its error file."""
    return Path(error_file).with_name(f"abort-{process}.log")


def drop_empty(error_file: str | Path, process: int) -> None:
    """Remove the file of a process that has said nothing."""
    path = last_words(error_file, process)
    with suppress(OSError):
        if path.stat().st_size == 0:
            os.unlink(path)
