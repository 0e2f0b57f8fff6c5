"""Probes of the paths between nodes: a message to another node's agent, answered by its echo server.

Both ends prove that they belong to this run. The prober sends a `Ping`, then as many bytes of load as the ping says;
the echo comes when all of them are there, which shows how fast the path is.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, TypeVar

from keepstep.core.summary import Endpoint, PathProbe
from keepstep.wire.blocking import BlockingConnection, BlockingServer
from keepstep.wire.channel import HANDSHAKE_LIMIT, ClientChannel, Ends
from keepstep.wire.messages import MOST_NODE_ENDPOINTS, Message, ProbeRequest
from keepstep.wire.secret import RunKey
from keepstep.wire.transfer import Echo, Ping
from keepstep.wire.violation import Violation

TIMEOUT_S = 2.5  # long enough for a lost SYN, which is sent again after 1 s
MOST_TARGETS = 16
_IDLE_S = 3.0  # how long a prober may be silent in the middle of a load
_CHUNK_BYTES = 1 << 20
_SLICE_S = 0.1  # part of a wait; if it lasts longer, this process itself stood still

_T = TypeVar("_T")


def echo_server(key: RunKey) -> BlockingServer:
    """A server that answers pings, once it listens."""
    return BlockingServer(key, "prober", _echo, purpose="probes are answered", idle_s=_IDLE_S)


def _echo(connection: BlockingConnection) -> None:
    """Take one ping with its load, and answer it."""
    ping = connection.receive()
    assert isinstance(ping, Ping)
    chunk = memoryview(bytearray(min(ping.load_bytes, _CHUNK_BYTES)))
    left = ping.load_bytes
    while left:
        part = chunk[:left]
        if connection.receive_into(part) < len(part):
            raise ConnectionError("a part of a load did not come")
        left -= len(part)
    connection.send(Echo())


async def probe_paths(
    request: ProbeRequest, node: str, key: RunKey, used: Collection[str], timeout_s: float = TIMEOUT_S
) -> tuple[PathProbe, ...]:
    """Probe all targets at once. ``used``: addresses to which this node's workers have connections."""
    chosen = [
        (target.node, endpoint)
        for target in request.targets[:MOST_TARGETS]
        if (endpoint := _endpoint(target.endpoints, used)) is not None
    ]
    size = request.load_bytes
    found = await asyncio.gather(*(_probe(endpoint, key, timeout_s, size) for _, endpoint in chosen))
    return tuple(PathProbe(node, target, *probed) for (target, _), probed in zip(chosen, found, strict=True))


def _endpoint(endpoints: Sequence[Endpoint], used: Collection[str]) -> Endpoint | None:
    """The endpoint to probe; TCP is the only transport that is known."""
    fitting = [
        one
        for one in endpoints[:MOST_NODE_ENDPOINTS]
        if one.transport == "tcp" and 0 < one.port < 1 << 16 and is_elsewhere(one.address)
    ]
    return min(fitting, key=lambda one: one.address not in used, default=None)


async def _probe(endpoint: Endpoint, key: RunKey, timeout_s: float, size: int) -> tuple[str, float, float]:
    """The outcome of one ping, its round trip in seconds, and how many seconds the load took."""
    family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
    connecting = _Patience(timeout_s)
    with socket.socket(family, socket.SOCK_STREAM) as end:
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else the load waits for the ping's ACK
        connection = asyncio.get_running_loop().sock_connect(end, (endpoint.address, endpoint.port))
        try:
            await connecting.wait_for(connection)
        except (asyncio.TimeoutError, TimeoutError):
            return "timeout", connecting.waited_s, 0.0
        except ConnectionRefusedError:
            return "refused", connecting.waited_s, 0.0
        except OSError:
            return "unreachable", connecting.waited_s, 0.0
        echoing = _Patience(max(connecting.left_s, 0.1))
        with contextlib.suppress(OSError, Violation, asyncio.TimeoutError, TimeoutError):
            channel = ClientChannel(key, "prober", Ends.of(end))
            await echoing.wait_for(_prove(end, channel))
            echoing.waited_s = 0.0
            await echoing.wait_for(_ping(end, channel, size))
            round_trip_s = min(connecting.waited_s, echoing.waited_s)
            return "echo", round_trip_s, echoing.waited_s if size else 0.0
        return "silent", connecting.waited_s, echoing.waited_s if size else 0.0


class _Patience:
    """A time limit for several waits. Time in which this process itself stood still does not count."""

    def __init__(self, left_s: float) -> None:
        self.left_s, self.waited_s = left_s, 0.0

    async def wait_for(self, awaited: Coroutine[Any, Any, _T]) -> _T:
        """Wait for the coroutine. Raises asyncio.TimeoutError when nothing of the limit is left."""
        task = asyncio.ensure_future(awaited)
        try:
            while self.left_s > 0:
                begun_s, slice_s = time.monotonic(), min(_SLICE_S, self.left_s)
                done, _ = await asyncio.wait({task}, timeout=slice_s)
                passed_s = min(time.monotonic() - begun_s, slice_s)
                self.waited_s += passed_s
                self.left_s -= passed_s
                if done:
                    return task.result()
            raise asyncio.TimeoutError
        finally:
            task.cancel()


async def _prove(end: socket.socket, channel: ClientChannel) -> None:
    loop = asyncio.get_running_loop()
    answer = channel.open()
    while True:
        await loop.sock_sendall(end, answer)
        if channel.established:
            return
        _, answer = await _receive(end, channel)


async def _ping(end: socket.socket, channel: ClientChannel, size: int) -> None:
    """Send a ping and its load, and wait for the echo."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(end, channel.send(Ping(size)))
    chunk = memoryview(bytes(min(size, _CHUNK_BYTES)))
    while size:
        await loop.sock_sendall(end, chunk[:size])
        size -= min(size, len(chunk))
    while not (await _receive(end, channel))[0]:
        pass


async def _receive(end: socket.socket, channel: ClientChannel) -> tuple[list[Message], bytes]:
    """Messages that have come, and the bytes to send in answer."""
    data = await asyncio.get_running_loop().sock_recv(end, HANDSHAKE_LIMIT)
    if not data:
        raise ConnectionError("the other side closed the connection")
    return channel.receive(data)


def is_elsewhere(address: str) -> bool:
    """Whether other hosts may reach this address: it is numeric, and no loopback, multicast or wildcard address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return not (ip.is_loopback or ip.is_multicast or ip.is_unspecified)
