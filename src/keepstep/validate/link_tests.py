"""Link tests between held workers, over TCP connections of their own, or between their devices.

The job's own transport is left alone on purpose: a transfer on it that does not arrive can only be ended by breaking
the transport (Gloo closes the pair, NCCL aborts the communicator), and the training would not survive its own test.
Over TCP the hosts' network between the ranks is measured. Ranks that train over NCCL agree over the connection to make
a communicator for this one link (`device_links`), which shows NVLink and RDMA; the data then goes there.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Lock

from keepstep.core.cpu_counters import queued_ns
from keepstep.core.own_address import ANYWHERE, address_towards
from keepstep.core.validation import LinkFigure, Transfer, TransferEndpoint
from keepstep.validate.device_links import ID_BYTES, SET_UP_S, DeviceLink, LinkError, new_id

MESSAGE_BYTES = (16 << 20, 32 << 20, 64 << 20)
REPETITIONS = 3
LINK_BUDGET_S = 0.3  # time for one link, after which no further message is asked for
_CONNECT_S = 1.0
_CHUNK = 1 << 20
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f">{_TOKEN_BYTES}sII")  # token, number of the pass, source
_ASK = struct.Struct(">I")  # bytes of the message that is asked for
_NO_MORE = (1 << 32) - 1  # asked for: the target has what it wants
# Sent after each message: nanoseconds that the source waited for a core, and that it had one.
_COST = struct.Struct(">QQ")
_WAITING_ROOM = 64  # connections that came before their turn
_NO, _YES = b"\0", b"\1"
_NO_ID = bytes(ID_BYTES)  # offered instead of an id: the data goes over TCP
_FIRST_BYTES = 1 << 20
"""Size of the first messages between devices: quick enough for any link that works."""
_LOOK_S = 0.05  # how often a wait for the other end looks whether the tests are over
_STUCK_S = 1.0
"""Longest time of a message between devices: of a slower one nothing is known but that it is."""


@dataclass(slots=True)
class OnDevice:
    """How a rank tests links on its device.

    Attributes:
        device: such as ``cuda:0``.
        deadline_s: when all tests end, as ``time.monotonic`` has it.
        stopped: set by whoever ends the tests before.
        link: is held while a link is there.
        troubles: why links had to be tested over TCP instead.
    """

    device: str
    deadline_s: float
    stopped: Event
    link: Lock
    troubles: list[str] = field(default_factory=list[str])

    def running(self) -> bool:
        return not self.stopped.is_set() and time.monotonic() < self.deadline_s


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

    def receive(
        self, transfer: Transfer, sizes: tuple[int, ...], deadline_s: float, on_device: OnDevice | None = None
    ) -> list[LinkFigure]:
        """Measure one link, if both ends can on their devices.

        Raises OSError when its source does not come before ``deadline_s`` (monotonic), LinkError when a device fails.
        """
        with self._connection(transfer, deadline_s) as connection:
            connection.settimeout(_left(deadline_s))
            identity = _offer(connection, on_device)
            with _between_devices(connection, on_device, identity, 0, max(sizes)) as link:
                if link is None or on_device is None:
                    best = _receive_over_tcp(connection, sizes, deadline_s)
                else:
                    try:
                        best = _receive_on_device(connection, on_device, link, sizes)
                    finally:
                        with suppress(OSError):  # an abort may wait for that of the other end
                            connection.sendall(_ASK.pack(_NO_MORE))
        transport = "tcp" if link is None else "nccl"
        return [
            LinkFigure(transfer.source, transfer.target, transfer.topology, size, speed, transport)
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


def send(
    transfer: Transfer,
    endpoint: TransferEndpoint,
    sizes: tuple[int, ...],
    deadline_s: float,
    on_device: OnDevice | None = None,
) -> None:
    """Send what the target asks for, until it has seen enough.

    Raises OSError when it cannot be reached, LinkError when a device fails.
    """
    address = (endpoint.host, endpoint.port)
    with socket.create_connection(address, min(_left(deadline_s), _CONNECT_S)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_HELLO.pack(bytes.fromhex(endpoint.token), transfer.number, transfer.source))
        with suppress(ConnectionError, TimeoutError):  # the target has what it wants
            connection.settimeout(_left(deadline_s))
            identity = _take_offer(connection, on_device)
            with _between_devices(connection, on_device, identity, 1, max(sizes)) as link:
                while (size := _asked(connection, deadline_s, on_device if link else None)) <= max(sizes):
                    if link is None:
                        _send_over_tcp(connection, size)
                    else:
                        link.enqueue(size, time.monotonic() + _STUCK_S)
                        connection.sendall(_YES)


def _asked(connection: socket.socket, deadline_s: float, on_device: OnDevice | None) -> int:
    """Source: bytes of the message that the target asks for."""
    connection.settimeout(_left(deadline_s))
    (size,) = _ASK.unpack(_exactly(connection, _ASK.size, on_device))
    return size


def _offer(connection: socket.socket, on_device: OnDevice | None) -> bytes:
    """Target: offer a link between devices; returns its id, or nothing where one of the two cannot."""
    identity = new_id() if on_device is not None else _NO_ID
    connection.sendall(identity)
    agreed = on_device is not None and _exactly(connection, 1) == _YES
    return identity if agreed else b""


def _take_offer(connection: socket.socket, on_device: OnDevice | None) -> bytes:
    """Source: the id of the link that was offered and taken, or nothing."""
    identity = _exactly(connection, ID_BYTES)
    if identity == _NO_ID:
        return b""
    connection.sendall(_NO if on_device is None else _YES)
    return b"" if on_device is None else identity


@contextmanager
def _between_devices(
    connection: socket.socket, on_device: OnDevice | None, identity: bytes, place: int, most_bytes: int
) -> Generator[DeviceLink | None]:
    """The link between the devices once both ends have it; None: they cannot have it, and the data goes over TCP."""
    if on_device is None or not identity:
        yield None
        return
    with on_device.link:
        if not on_device.running():
            raise TimeoutError("no time left")
        link = DeviceLink(on_device.device, place, most_bytes, on_device.running)
        try:
            trouble = ""
            try:
                link.set_up(identity, time.monotonic() + SET_UP_S)
            except LinkError as error:
                trouble = str(error)
            connection.sendall(_NO if trouble else _YES)
            if _exactly(connection, 1, on_device) == _YES and not trouble:
                yield link
                return
        finally:
            link.close()
    on_device.troubles.append(trouble or "the other end of a link has no communicator")
    yield None


def _receive_on_device(
    connection: socket.socket, on_device: OnDevice, link: DeviceLink, sizes: tuple[int, ...]
) -> dict[int, float]:
    """Bytes per second by size; 0 for the first where both devices were at it for long enough, and nothing came."""
    best: dict[int, float] = {}
    begun_s = time.monotonic()
    for size in (_FIRST_BYTES, *sizes):
        connection.sendall(_ASK.pack(size))
        events = link.enqueue(size, time.monotonic() + _STUCK_S)
        if _exactly(connection, 1, on_device) != _YES:
            raise LinkError("the source sent nothing")
        speed = link.speed(size, events, time.monotonic() + _STUCK_S)
        if speed or (not best and on_device.running()):
            best[size] = speed
        elif not best:
            raise TimeoutError("no time left")
        if not speed or time.monotonic() - begun_s >= LINK_BUDGET_S or size / speed >= LINK_BUDGET_S:
            break
    if len(best) > 1:
        del best[_FIRST_BYTES]
    return best


def _receive_over_tcp(
    connection: socket.socket, sizes: tuple[int, ...], deadline_s: float
) -> dict[int, float]:
    """Bytes per second by size."""
    best: dict[int, float] = {}
    begun_s = time.monotonic()
    for size in (size for size in sizes for _ in range(REPETITIONS)):
        until_s = min(begun_s + 2 * LINK_BUDGET_S, deadline_s)
        best[size] = max(best.get(size, 0.0), _message(connection, size, until_s))
        if time.monotonic() - begun_s >= LINK_BUDGET_S:
            break
    return best


def _send_over_tcp(connection: socket.socket, left: int) -> None:
    """Send so many bytes, and what that cost."""
    chunk = memoryview(bytes(_CHUNK))
    queued, busy = queued_ns(), time.thread_time_ns()
    while left:
        sent = connection.send(chunk[: min(left, _CHUNK)])
        left -= sent
    connection.sendall(_COST.pack(queued_ns() - queued, time.thread_time_ns() - busy))


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


def _exactly(connection: socket.socket, count: int, on_device: OnDevice | None = None) -> bytes:
    """So many bytes from a connection; with ``on_device`` it ends when its tests do."""
    data = b""
    if on_device is not None:
        connection.settimeout(_LOOK_S)
    while len(data) < count:
        if on_device is not None and not on_device.running():
            raise TimeoutError("no time left")
        try:
            more = connection.recv(count - len(data))
        except TimeoutError:
            if on_device is None:
                raise
            continue
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
