"""Link tests between held workers, over TCP connections of their own.

The job's own transport is left alone on purpose: a transfer on it that does not arrive can only be ended by breaking
the transport (Gloo closes the pair, NCCL aborts the communicator), and the training would not survive its own test.
Measured is therefore the hosts' network between the ranks, not NVLink or RDMA.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time

from keepstep.core.cpu_counters import queued_ns
from keepstep.core.own_address import ANYWHERE, address_towards
from keepstep.core.validation import LinkFigure, Transfer, TransferEndpoint

MESSAGE_BYTES = (16 << 20, 32 << 20, 64 << 20)
REPETITIONS = 3
LINK_BUDGET_S = 0.3  # time for one link, after which no further message is asked for
_CONNECT_S = 1.0
_CHUNK = 1 << 20
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f">{_TOKEN_BYTES}sII")  # token, number of the pass, source
_ASK = struct.Struct(">I")  # bytes of the message that is asked for
# Sent after each message: nanoseconds that the source waited for a core, and that it had one.
_COST = struct.Struct(">QQ")
_WAITING_ROOM = 64  # connections that came before their turn


def own_address() -> str:
    """The address by which this host reaches the job's master, and so its peers reach it."""
    found = address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    if not alone and found.startswith(("127.", "::1")):  # the master's name may mean loopback on its own host
        return address_towards(ANYWHERE)
    return found


class Receiver:
    """Takes the transfers that are meant for this rank, and drives them: it asks for every message."""

    def __init__(self, host: str = "") -> None:
        """``host``: the numeric address to listen on; "": that by which this host reaches the job's master.

        Raises OSError where it is no address of this host.
        """
        host = host or own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind((host, 0))
            self._socket.listen(_WAITING_ROOM)
        except OSError:
            self._socket.close()
            raise
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._early: dict[tuple[int, int], socket.socket] = {}
        self.endpoint = TransferEndpoint(host, int(self._socket.getsockname()[1]), self._token.hex())

    def receive(self, transfer: Transfer, sizes: tuple[int, ...], deadline_s: float) -> list[LinkFigure]:
        """Measure one link. Raises OSError when its source does not come before ``deadline_s`` (monotonic)."""
        with self._connection(transfer, deadline_s) as connection:
            best: dict[int, float] = {}
            begun_s = time.monotonic()
            for size in (size for size in sizes for _ in range(REPETITIONS)):
                until_s = min(begun_s + 2 * LINK_BUDGET_S, deadline_s)
                best[size] = max(best.get(size, 0.0), _message(connection, size, until_s))
                if time.monotonic() - begun_s >= LINK_BUDGET_S:
                    break
        return [
            LinkFigure(transfer.source, transfer.target, transfer.topology, size, speed)
            for size, speed in best.items()
        ]

    def close(self) -> None:
        """End: no further transfer is taken."""
        self._socket.close()
        for connection in self._early.values():
            connection.close()
        self._early.clear()

    def _connection(self, transfer: Transfer, deadline_s: float) -> socket.socket:
        """The connection of the transfer's source; connections of other transfers are kept until their turn."""
        wanted = transfer.number, transfer.source
        while wanted not in self._early:
            self._socket.settimeout(_left(deadline_s))
            connection, _ = self._socket.accept()
            try:
                connection.settimeout(_left(min(deadline_s, time.monotonic() + _CONNECT_S)))
                token, number, source = _HELLO.unpack(_exactly(connection, _HELLO.size))
            except OSError:
                connection.close()
                continue
            if not secrets.compare_digest(token, self._token) or len(self._early) >= _WAITING_ROOM:
                connection.close()
                continue
            self._early[number, source] = connection
        return self._early.pop(wanted)


def send(transfer: Transfer, endpoint: TransferEndpoint, sizes: tuple[int, ...], deadline_s: float) -> None:
    """Send what the target asks for, until it has seen enough. Raises OSError when it cannot be reached."""
    chunk = memoryview(bytes(_CHUNK))
    address = (endpoint.host, endpoint.port)
    with socket.create_connection(address, min(_left(deadline_s), _CONNECT_S)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_HELLO.pack(bytes.fromhex(endpoint.token), transfer.number, transfer.source))
        while True:
            connection.settimeout(_left(deadline_s))
            try:
                (left,) = _ASK.unpack(_exactly(connection, _ASK.size))
                if left > max(sizes):
                    return
                queued, busy = queued_ns(), time.thread_time_ns()
                while left:
                    sent = connection.send(chunk[: min(left, _CHUNK)])
                    left -= sent
                connection.sendall(_COST.pack(queued_ns() - queued, time.thread_time_ns() - busy))
            except (ConnectionError, TimeoutError):
                return  # the target has what it wants


def _message(connection: socket.socket, size: int, until_s: float) -> float:
    """Bytes per second of one message, or of the part of it that arrived by ``until_s``.

    Inside a host only the cores lie between two ranks: time in which other processes had them does not count.
    """
    buffer = memoryview(bytearray(_CHUNK))
    begun_s, queued, busy = time.monotonic(), queued_ns(), time.thread_time_ns()
    got = 0
    try:
        connection.settimeout(_left(until_s))
        connection.sendall(_ASK.pack(size))
        while got < size:
            connection.settimeout(_left(until_s))
            count = connection.recv_into(buffer, min(size - got, _CHUNK))
            if count == 0:
                raise ConnectionError("the source went away")
            got += count
        took_s = time.monotonic() - begun_s
        source_queued, source_busy = _COST.unpack(_exactly(connection, _COST.size))
    except TimeoutError:
        if got == 0:
            raise
        return got / max(time.monotonic() - begun_s, 1e-9)
    if connection.getpeername()[0] == connection.getsockname()[0]:
        queued_s = (queued_ns() - queued + source_queued) * 1e-9  # at both ends; the times may overlap
        took_s = max(took_s - queued_s, max(time.thread_time_ns() - busy, source_busy) * 1e-9)
    return got / max(took_s, 1e-9)


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes from a connection."""
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data


def _left(until_s: float) -> float:
    """Seconds that are left; raises TimeoutError when none are."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no time left")
    return left_s
