"""A companion that has done its imports and waits for its arguments, so that it can begin at once.

Imports take an agent half a second of CPU, just when workers begin again and nodes ask each other's agents for their
states. Where it is known that they will, the next one is started behind the training (``python -m PROGRAM --wait``).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from keepstep.core.errors import RunError
from keepstep.launch.workers.guard import signal_group
from keepstep.launch.workers.processes import Child, Processes, give_priority


class Waiting:
    """At most one waiting process of one program. ``command``: the program's, without arguments."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], processes: Processes) -> None:
        self._command, self._environ, self._processes = tuple(command), environ, processes
        self._child: Child | None = None
        self._pipe = -1  # end of the pipe that is the child's stdin

    @property
    def pid(self) -> int | None:
        """The process that waits."""
        return self._child.pid if self._child else None

    @property
    def is_ready(self) -> bool:
        """Whether the process that waits has done its imports, or there is none."""
        if self._child is None or self._child.stdout is None:
            return True
        poll = select.poll()  # works with descriptors above 1023, unlike select.select
        poll.register(self._child.stdout, select.POLLIN)
        return bool(poll.poll(0))

    def start(self) -> None:
        """Start a process that waits, at the lowest priority, when there is none."""
        if self._child:
            return
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        try:
            self._child = self._processes.start(
                f"the next {self._command[-1]}",
                (*self._command, "--wait"),
                self._environ,
                on_exit=self._exited,
                saves=True,
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except RunError:  # the error is reported when the program itself is started
            os.close(ours)
            return
        finally:
            os.close(theirs)
        give_priority(self._child, low=True)
        self._pipe = ours

    def take(self, words: Sequence[str], log: Path) -> Child | None:
        """Give the process that waits its arguments and a file for its output; None: there is none.

        The caller sees to the child's end (``Processes.become``).
        """
        child, self._child = self._child, None
        if child is None:
            return None
        pipe, self._pipe = self._pipe, -1
        if child.stdout:
            child.stdout.close()
            child.stdout = None
        message = json.dumps({"words": list(words), "log": str(log)}).encode() + b"\n"
        try:
            whole = os.write(pipe, message) == len(message)
        except OSError:
            whole = False
        os.close(pipe)
        if not whole:
            signal_group(child.pid, signal.SIGKILL)
            return None
        give_priority(child, low=False)
        return child

    def end(self) -> None:
        """End the process that waits."""
        if self._child:
            signal_group(self._child.pid, signal.SIGKILL)

    def _exited(self, child: Child) -> None:
        self._processes.clear(child)
        if child is self._child:
            os.close(self._pipe)
            if child.stdout:
                child.stdout.close()
            self._child, self._pipe = None, -1
