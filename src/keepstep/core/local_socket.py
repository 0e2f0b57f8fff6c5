"""Sockets between the processes of one user on one node: whole messages, at addresses that are no files.

An address is a name in the kernel (abstract Unix socket), free again as soon as the process that listens there ends.
Anybody on the machine can connect to it, so both ends ask the kernel for the other's user and turn strangers away.
Descriptors are not inherited by programs that either process starts.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable

from keepstep.core.errors import CheckpointError

_MOST_WAITING = 128
_MOST_CONNECTIONS = 4096
_CREDENTIALS = struct.Struct("3i")  # process, user, group: struct ucred of the kernel


def listen(address: str) -> socket.socket:
    """A socket that listens. Raises OSError, with EADDRINUSE while another process listens there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{address}")
        listener.listen(_MOST_WAITING)
    except OSError:
        listener.close()
        raise
    return listener


def accept(listener: socket.socket) -> tuple[socket.socket, int] | None:
    """The next connection and the process at its other end; None where another user was turned away.

    Raises OSError as ``socket.accept`` does.
    """
    connection, _ = listener.accept()
    process, user = _peer(connection)
    if user == os.getuid():
        return connection, process
    connection.close()
    return None


def connect(address: str, name: str, patience_s: float, process: int | None = None) -> socket.socket:
    """A connection whose sends and receives take ``patience_s`` at most. ``name``: of the service, for messages.

    ``process``: the one that has to listen there; another one may, as addresses are shared by containers that share a
    network.

    Raises:
        OSError: nobody listens there, or another process.
        CheckpointError: the process that listens there belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(patience_s)
        connection.connect(f"\0{address}")
        found, user = _peer(connection)
        if user != os.getuid():
            raise CheckpointError(f"the {name} {address} belongs to another user")
        if process not in (None, found):
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"process {found} listens there, not {process}")
    except BaseException:
        connection.close()
        raise
    return connection


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return process, user


class LocalServer:
    """Hears messages of ``most_bytes`` at most on the running event loop.

    ``received`` is called with the connection, the process at its other end and the message, which is empty once the
    connection has ended. An OSError that it raises ends the connection, too.
    """

    def __init__(
        self, address: str, received: Callable[[socket.socket, int, bytes], None], most_bytes: int
    ) -> None:
        self.address = address
        self._received, self._most_bytes = received, most_bytes
        self._connections: set[socket.socket] = set()
        self._loop = asyncio.get_running_loop()
        self._listener = listen(address)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """End all connections, and accept no more."""
        for connection in (*self._connections, self._listener):
            self.drop(connection)

    def drop(self, connection: socket.socket) -> None:
        """End one connection; ``received`` is not called for that."""
        self._loop.remove_reader(connection)
        self._connections.discard(connection)
        connection.close()

    def _accept(self) -> None:
        try:
            accepted = accept(self._listener)
        except OSError:
            return
        if accepted is None:
            return
        connection, process = accepted
        if len(self._connections) >= _MOST_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        self._loop.add_reader(connection, self._read, connection, process)

    def _read(self, connection: socket.socket, process: int) -> None:
        try:
            message = connection.recv(self._most_bytes)
        except OSError:
            message = b""
        try:
            self._received(connection, process, message)
        except OSError:
            message = b""
        if not message and connection.fileno() >= 0:
            self.drop(connection)
