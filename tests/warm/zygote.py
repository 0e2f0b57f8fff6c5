"""A process that has imported torch, and forks itself for each request of a test: `Zygote` is the test's end.

A request is a command, an environment and a folder, with the descriptors of stdin, stdout and stderr. The new process
is a grandchild, whose parent ends at once: the kernel gives it to the test's process, which waits for it as for any
other child of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys

import warm_fork

_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES = 1 << 20
_ARGUMENTS = "x" * 8192  # room for the command line of what it becomes


class Zygote:
    """The test's end."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, os.path.abspath(__file__), str(theirs.fileno()), _ARGUMENTS]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    def start(self, words, environment, folder, streams) -> int:
        """Start a process; its ID, of a child of the caller."""
        message = json.dumps([words, environment, folder]).encode()
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._ours, [message], list(streams))
            return int(self._ours.recv(100))
        finally:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        """End it; what it has started lives on."""
        self._ours.close()
        self._process.wait()


def serve(channel: socket.socket) -> None:
    """Fork for each request, until the test's end is closed."""
    warm_fork.hide(os.environ)
    sys.path[:] = [path for path in sys.path if path != warm_fork.HERE]
    warm_fork.warm_up(optimizer=True)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MOST_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return
        words, environment, folder = json.loads(message)
        begin, go = os.pipe()
        told, tell = os.pipe()
        middle = os.fork()
        if middle == 0:
            process = os.fork()
            if process:
                os.write(tell, str(process).encode())
                os._exit(0)
            os.close(go)
            os.read(begin, 1)  # until the parent of this process is the test's
            os.chdir(folder)
            warm_fork.become(words, words[1:], environment, descriptors)
        os.waitpid(middle, 0)
        os.close(begin)
        channel.send(os.read(told, 100))
        for descriptor in (go, told, tell, *descriptors):
            os.close(descriptor)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
