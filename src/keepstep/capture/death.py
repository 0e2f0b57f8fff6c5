"""Writes an uncaught exception into torch's error file, where elastic launchers look for the reason of a death.

The launcher is also told at once, because the process may take seconds to end. What no Python sees, an abort or a fatal
signal, is left in a file beside it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from keepstep.worker import last_words as _last_words
from keepstep.worker import milestones as _milestones

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def write_error_file(path: str, error: BaseException) -> None:
    """Write ``error`` in the form of ``torch.distributed.elastic``'s error files, unless one is there already."""
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
            "timestamp": str(int(time.time())),
        },
    }
    with open(path, "x") as file:
        json.dump({"message": message}, file)


# Error files that were written before it was sure that the process ends by the error.
_foreseen: list[str] = []


def foresee(error: BaseException) -> None:
    """Leave ``error`` for the launcher, which the process will end by unless the script handles it (`go_on`)."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            write_error_file(path, error)
            _foreseen.append(path)


def go_on() -> None:
    """Take back what was foreseen: the script has handled it."""
    while _foreseen:
        with suppress(OSError):
            os.unlink(_foreseen.pop())


def install() -> None:
    """Add to ``sys.excepthook``, and keep last words; what the script prints and its exit code do not change."""
    _last_words.install()
    previous: ExceptHook = sys.excepthook
    process = os.getpid()

    def excepthook(kind: type[BaseException], error: BaseException, origin: TracebackType | None) -> object:
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if not path or os.getpid() != process or issubclass(kind, KeyboardInterrupt):
            return previous(kind, error, origin)
        with suppress(Exception):  # an error in here must not hide the user's error
            go_on()
            write_error_file(path, error)
        said = previous(kind, error, origin)
        _milestones.reached("raised")
        return said

    sys.excepthook = excepthook
