"""Leaves the reason of a death where elastic launchers look for it: an uncaught exception, in torch's error file.

The launcher is told at once: the process may take seconds to end.
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


def install() -> None:
    """Chain ``sys.excepthook``; output and exit code stay as they are."""
    previous: ExceptHook = sys.excepthook
    process = os.getpid()

    def excepthook(kind: type[BaseException], error: BaseException, origin: TracebackType | None) -> object:
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if not path or os.getpid() != process or issubclass(kind, KeyboardInterrupt):
            return previous(kind, error, origin)
        with suppress(Exception):  # nothing of ours may hide the user's error
            write_error_file(path, error)
        said = previous(kind, error, origin)
        _milestones.reached("raised")
        return said

    sys.excepthook = excepthook
