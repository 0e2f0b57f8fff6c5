"""A process that has imported torch, and forks itself for each request of a test: ``forked.py`` is the test's end.

A request is a command, an environment and a folder, with the descriptors of stdin, stdout and stderr. The new process
is a grandchild, whose parent ends at once: the kernel gives it to the test's process, which waits for it as for any
other child of its own.
"""

from __future__ import annotations

import json
import os
import socket
import sys

import warm_fork

_MOST_BYTES = 1 << 20


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
