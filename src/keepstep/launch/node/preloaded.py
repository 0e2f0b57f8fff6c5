"""A companion that has imported all that it needs, and waits to be told what to do: one that follows begins at once.

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
from keepstep.launch.workers.guard import Guard
from keepstep.launch.workers.processes import Child, Processes, low_priority, restore_priority, signal_group


class Waiting:
    """One at a time, of one program. ``command``: as it is started without arguments."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], processes: Processes, guard: Guard
    ) -> None:
        self._command, self._environ = tuple(command), environ
        self._processes, self._guard = processes, guard
        self._child: Child | None = None
        self._pipe = -1  # its stdin

    @property
    def pid(self) -> int | None:
        """The process that waits."""
        return self._child.pid if self._child else None

    @property
    def is_ready(self) -> bool:
        """One has imported all; or there is none."""
        if self._child is None or self._child.stdout is None:
            return True
        poll = select.poll()  # unlike select.select for descriptors of any number
        poll.register(self._child.stdout, select.POLLIN)
        return bool(poll.poll(0))

    def start(self) -> None:
        """Have one, at the lowest priority, when there is none."""
        if self._child:
            return
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        try:
            child = self._processes.start(
                f"the next {self._command[-1]}",
                (*self._command, "--wait"),
                self._environ,
                on_exit=self._exited,
                death_signal=signal.SIGTERM,
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except RunError:  # the one that is needed is started then, and says why it cannot be
            os.close(ours)
            return
        finally:
            os.close(theirs)
        low_priority(child.pid)
        self._guard.add(child.pid, at_once=False)
        self._child, self._pipe = child, ours

    def take(self, words: Sequence[str], log: Path) -> Child | None:
        """Have the one that waits do what its arguments say, its words in ``log``; None: there is none.

        Whoever takes it sees to its end (``Processes.become``).
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
        restore_priority(child)
        return child

    def end(self) -> None:
        """End the one that waits."""
        if self._child:
            signal_group(self._child.pid, signal.SIGKILL)

    def _exited(self, child: Child) -> None:
        self._guard.remove(child.pid)
        signal_group(child.pid, signal.SIGKILL)
        if child is self._child:
            os.close(self._pipe)
            if child.stdout:
                child.stdout.close()
            self._child, self._pipe = None, -1
