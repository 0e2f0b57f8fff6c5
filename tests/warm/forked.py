"""Starts processes of tests off a zygote, which has imported torch already: ``zygote.py`` is its program."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.warm.warm_fork import ROOM, hide

_PR_SET_CHILD_SUBREAPER = 36
_ARGUMENTS = "x" * 8192  # room for the command line of what it becomes


class Zygote:
    """The test's end."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = str(Path(__file__).with_name("zygote.py"))
        command = [sys.executable, program, str(theirs.fileno()), _ARGUMENTS]
        environment = os.environ | {ROOM: "x" * 16_384}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    def start(self, words: list[str], environment: dict[str, str], folder: str, streams: list[int]) -> int:
        """Start a process; its ID, of a child of the caller."""
        message = json.dumps([words, environment, folder]).encode()
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._ours, [message], streams)
            return int(self._ours.recv(100))
        finally:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        """End it; what it has started lives on."""
        self._ours.close()
        self._process.wait()


_zygotes: list[Zygote] = []


def fork_child(popen, words: list[str], environment: dict[str, str], folder: str | None, pipes) -> None:
    """Do for a `subprocess.Popen` what its ``_execute_child`` does; ``pipes`` are that method's six descriptors."""
    if not _zygotes:
        _zygotes.append(Zygote())
        atexit.register(_zygotes[0].close)
    hide(environment)
    streams = [own if pipe < 0 else pipe for own, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
    popen.pid = _zygotes[0].start(words, environment, os.fspath(folder or os.getcwd()), streams)
    popen._child_created = True
    popen._close_pipe_fds(*pipes)


class WarmPopen(subprocess.Popen[str]):
    """A process that runs a script or ``-c`` program with torch; only streams, folder and environment can be given."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, *others) -> None:
        assert args[0] == sys.executable, args
        assert preexec_fn is None, "a process of its own is needed"
        assert not pass_fds, "a process of its own is needed"
        folder, environment, pipes = others[0], others[1], others[5:11]
        words = [os.fsdecode(word) for word in args]
        fork_child(self, words, dict(os.environ if environment is None else environment), folder, pipes)
