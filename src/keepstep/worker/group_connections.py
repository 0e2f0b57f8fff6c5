"""Finds the TCP connections of this process's process groups, and shuts them so that blocked calls end.

Gloo waits for a dead or stopped peer until its timeout, and neither destroying nor aborting a group ends that. Shutting
the connections does, within milliseconds. Only sockets that appeared while torch created a store or a group are shut;
they are recognized by their inodes.

What is shut is also kept open, by a descriptor of ours, until all ranks have left: when Gloo closes a connection that
has unread bytes, the peer is sent a reset, the peer's next write fails, and its Gloo tells nobody who waits for that
write (``waitSend``).
"""

from __future__ import annotations

import importlib
import os
import resource
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from keepstep.core.descriptors import socket_inodes

_MAKERS = (
    ("torch.distributed.rendezvous", "_create_c10d_store"),
    ("torch.distributed.distributed_c10d", "_new_process_group_helper"),
)
# One in so many of the descriptors that this process may have is for sockets that are kept open.
_KEPT_SHARE = 4


class GroupSockets:
    """The sockets that appeared while ``making`` was open and have not been closed since."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._inodes: set[int] = set()
        # Sockets that were open when torch began to create the current store or group; None if it creates none.
        self._before: set[int] | None = None
        self._kept: dict[int, int] = {}  # our own descriptors of sockets that were shut, by inode

    @contextmanager
    def making(self) -> Generator[None, None, None]:
        """Count sockets that appear meanwhile as a group's, even before the end: the call inside may block."""
        with self._guard:
            outermost = self._before is None
            if self._before is None:
                self._before = set(socket_inodes().values())
        try:
            yield
        finally:
            if outermost:
                self._made()

    def _made(self) -> None:
        with self._guard:
            now = set(socket_inodes().values())
            self._inodes = (self._inodes & now) | (now - (self._before or set()))
            self._before = None

    def shut(self) -> None:
        """Make reads from all these sockets return as if their other end had closed, and keep the sockets open."""
        most_kept = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _KEPT_SHARE
        with self._guard:
            ours, before = set(self._inodes), self._before
            for descriptor, inode in socket_inodes().items():
                if inode in ours or (before is not None and inode not in before):
                    own = _shut(descriptor, inode)
                    if own is None:
                        continue
                    if inode in self._kept or len(self._kept) >= most_kept:
                        os.close(own)
                    else:
                        self._kept[inode] = own

    def let_go(self) -> None:
        """Close what `shut` has kept open."""
        with self._guard:
            for descriptor in self._kept.values():
                os.close(descriptor)
            self._kept.clear()


OURS = GroupSockets()


def install() -> None:
    """Note the sockets of all stores and groups from now on. Called at the end of ``import torch``."""
    for module, name in _MAKERS:
        # `torch.distributed.rendezvous` as an attribute is a function, so modules are imported by their names.
        names = vars(importlib.import_module(module))
        made: Callable[..., Any] | None = names.get(name)
        if made is not None:
            names[name] = _noting(made)


def _noting(made: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(made)
    def make(*args: Any, **kwargs: Any) -> Any:
        with OURS.making():
            return made(*args, **kwargs)

    return make


def _shut(descriptor: int, inode: int) -> int | None:
    """Shut a TCP connection, unless another thread has closed its descriptor and reused the number.

    It is shut for reading only: Gloo reports an end that it reads to all waiting callers, but a failed write is not
    reported to the caller that waits for it (``waitSend``). Returns another descriptor of what was shut, to be closed.
    """
    try:
        own = os.dup(descriptor)
    except OSError:
        return None
    try:
        if os.fstat(own).st_ino == inode and _is_shut(own):
            return own
    except OSError:  # the connection has ended already
        pass
    os.close(own)
    return None


def _is_shut(descriptor: int) -> bool:
    """Shut the TCP connection; False if it is none: Gloo aborts the process when the socket it listens on is shut."""
    with socket.socket(fileno=os.dup(descriptor)) as found:
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
            return False
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        found.shutdown(socket.SHUT_RD)
    return True
