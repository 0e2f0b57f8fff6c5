"""Has a worker that is aborted leave its last words in a file: what C++ says, and where Python was.

Both go to stderr otherwise, and that may be the console, or nowhere. What is printed does not change.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
from contextlib import suppress
from pathlib import Path

from keepstep.core.abort_file import drop_empty, last_words
from keepstep.core.errors import KeepstepError
from keepstep.core.own_folders import open_file

_FATAL = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


def install() -> None:
    """Install both for this process, if it is a worker and not a helper of one. Raises nothing."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file or multiprocessing.parent_process() is not None:
        return
    path = last_words(error_file, os.getpid())
    with suppress(ImportError, OSError):  # without it C++ says on stderr only why it aborts
        from keepstep.worker import _last_words  # pyright: ignore[reportMissingModuleSource]

        _last_words.install(str(path))
    with suppress(
        KeepstepError, OSError, ValueError, StopIteration
    ):  # no folder for it, or /proc is not there
        if not (faulthandler.is_enabled() or _somebody_handles_fatal_signals()):
            _leave_stack(path, error_file)


def _leave_stack(path: Path, error_file: str) -> None:
    file, process = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.getpid()
    faulthandler.enable(file)

    def ended() -> None:
        if os.getpid() == process:
            drop_empty(error_file, process)

    def forked() -> None:
        """Have a child that dies leave nothing here: it is not the worker."""
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, file, inheritable=False)
            os.close(nowhere)

    atexit.register(ended)
    os.register_at_fork(after_in_child=forked)


def _somebody_handles_fatal_signals() -> bool:
    """Whether a library (a Java machine, MPI, a sanitizer) has its own handlers, whose way must not be crossed."""
    with open("/proc/self/status") as file:
        caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt:"))
    return any(caught >> (number - 1) & 1 for number in _FATAL)
