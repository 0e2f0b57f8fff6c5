"""Forks scripts from a process that has imported torch already, and says how they end."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

_MOST = 1 << 20  # bytes of a message
_LOOK_S = 0.01
_STUCK_S = 150.0  # a worker that lives that long shows where it is


class Nursery:
    """A child of this process, made before it has threads, that forks scripts and says how they end.

    What is forked beside threads may find locks taken that nobody gives up.
    """

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        if os.fork() == 0:
            self._channel.close()
            _tend(theirs)
        theirs.close()

    def start(self, script: Path, words: Sequence[str], environment: Mapping[str, str], output: Path) -> int:
        """Run a script as ``__main__``, watched as if it had imported torch now; returns its process."""
        order = {
            "script": str(script),
            "words": [*words],
            "environment": {**environment},
            "output": str(output),
        }
        self._channel.send(json.dumps(order).encode())
        while True:
            if pid := self._hear():
                return pid

    def poll(self, pid: int) -> int | None:
        """Exit code once it has ended, negative for a signal."""
        while select.select([self._channel], [], [], 0)[0]:
            self._hear()
        return self._codes.get(pid)

    def end(self, pid: int) -> None:
        """SIGKILL, unless it has ended; until it has."""
        if self.poll(pid) is None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while pid not in self._codes:
            self._hear()

    def _hear(self) -> int:
        """The process that was started, 0 where one has ended."""
        said = json.loads(self._channel.recv(_MOST))
        if "code" not in said:
            return said["pid"]
        self._codes[said["pid"]] = said["code"]
        return 0


def _tend(channel: socket.socket) -> NoReturn:
    """The nursery's own life: until nobody gives it orders any more."""
    running: set[int] = set()
    while True:
        if select.select([channel], [], [], _LOOK_S)[0]:
            data = channel.recv(_MOST)
            if not data:
                os._exit(0)
            order = json.loads(data)
            pid = os.fork()
            if pid == 0:
                channel.close()
                become(
                    partial(_run_script, order["script"], order["words"]),
                    order["environment"],
                    Path(order["output"]),
                )
            running.add(pid)
            channel.send(json.dumps({"pid": pid}).encode())
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                channel.send(json.dumps({"pid": pid, "code": code}).encode())


def _run_script(script: str, words: Sequence[str]) -> None:
    from keepstep._autoload import activate

    faulthandler.dump_traceback_later(_STUCK_S)
    activate()
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def become(program: Callable[[], None], environment: Mapping[str, str], output: Path) -> NoReturn:
    """Do nothing else in this forked process, and end it."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        program()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
