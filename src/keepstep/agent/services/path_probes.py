"""Probes of the paths between nodes: a message to another node's agent, answered by its echo endpoint.

A ping is 16 random bytes, how many bytes of load follow (0 to 64 MiB, big endian) and a code of 16 bytes over both
under the run's secret; the echo is a code of 16 bytes over the ping. So only who holds the secret gets an answer, an
answer is never longer than the question, and it tells nothing else. The echo of a ping with a load comes when all of it
is there: that says how fast the path is.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, TypeVar, cast

from keepstep.core.summary import Endpoint, PathProbe
from keepstep.wire.messages import MOST_LOAD_BYTES, ProbeRequest

logger = logging.getLogger("keepstep.agent")

TIMEOUT_S = 2.5  # a lost SYN is sent again after 1 s: one lost packet is no broken path
MOST_TARGETS = 16
MOST_ENDPOINTS = 4
_MOST_GUESTS = 16  # connections to the echo endpoints at a time
_GUEST_S = 1.0  # that a connection may last
_LOADED_S = 3.0  # the same of one with a load
_NONCE_BYTES = _CODE_BYTES = 16
_SIZE_BYTES = 4
_PING_BYTES = _NONCE_BYTES + _SIZE_BYTES + _CODE_BYTES
_CHUNK_BYTES = 1 << 20
_SLICE_S = 0.1  # of a wait: one that lasted longer was our own standstill

_T = TypeVar("_T")


def code(secret: bytes, what: bytes, data: bytes) -> bytes:
    """What only who holds the secret can say."""
    return hashlib.blake2b(data, digest_size=_CODE_BYTES, key=secret[:64], person=what).digest()


class Echo:
    """The node's echo endpoints: TCP sockets on the addresses that its workers use, and on no others."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._servers: dict[str, asyncio.Server] = {}
        self._failed: set[str] = set()
        self._guests: set[asyncio.Transport] = set()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where it answers now."""
        return tuple(
            Endpoint(address, server.sockets[0].getsockname()[1]) for address, server in self._servers.items()
        )

    async def listen(self, addresses: Collection[str]) -> bool:
        """Answer on these addresses, too, four at most; True when there is a new one. What fails is said once."""
        new = False
        for address in addresses:
            if address in self._servers or address in self._failed or len(self._servers) >= MOST_ENDPOINTS:
                continue
            if not is_elsewhere(address):
                continue
            loop = asyncio.get_running_loop()
            try:
                server = await loop.create_server(lambda: _Guest(self._secret, self._guests), address, 0)
            except OSError as error:
                self._failed.add(address)
                logger.info("no probes are answered on %s: %s", address, error)
                continue
            self._servers[address] = server
            new = True
        return new

    def close(self) -> None:
        """Answer no more."""
        for guest in list(self._guests):
            guest.abort()
        for server in self._servers.values():
            server.close()
        self._servers.clear()


class _Guest(asyncio.Protocol):
    """One connection to an echo endpoint: one ping with its load, one echo, the end."""

    def __init__(self, secret: bytes, guests: set[asyncio.Transport]) -> None:
        self._secret, self._guests = secret, guests
        self._transport: asyncio.Transport | None = None
        self._ping = b""
        self._awaited = 0  # bytes of the load
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        guest = cast("asyncio.Transport", transport)
        if len(self._guests) >= _MOST_GUESTS:
            guest.abort()
            return
        self._transport = guest
        self._guests.add(guest)
        self._last(_GUEST_S)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        if missing := _PING_BYTES - len(self._ping):
            self._ping += data[:missing]
            if len(self._ping) < _PING_BYTES:
                return
            data = data[missing:]
            question, told = self._ping[:-_CODE_BYTES], self._ping[-_CODE_BYTES:]
            self._awaited = int.from_bytes(question[_NONCE_BYTES:], "big")
            known = hmac.compare_digest(told, code(self._secret, b"keepstep ping", question))
            if not known or self._awaited > MOST_LOAD_BYTES:
                self._transport.abort()
                return
            if self._awaited:
                self._last(_LOADED_S)
        self._awaited -= len(data)
        if self._awaited < 0:
            self._transport.abort()
        elif self._awaited == 0:
            self._transport.write(code(self._secret, b"keepstep echo", self._ping))
            self._transport.close()

    def _last(self, seconds: float) -> None:
        """It ends after so long, whatever has come."""
        assert self._transport is not None
        if self._end is not None:
            self._end.cancel()
        self._end = asyncio.get_running_loop().call_later(seconds, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._guests.discard(self._transport)
        if self._end is not None:
            self._end.cancel()


async def probe_paths(
    request: ProbeRequest, node: str, secret: bytes, used: Collection[str], timeout_s: float = TIMEOUT_S
) -> tuple[PathProbe, ...]:
    """Probe all targets at once. ``used``: addresses to which this node's workers have connections."""
    chosen = [
        (target.node, endpoint)
        for target in request.targets[:MOST_TARGETS]
        if (endpoint := _endpoint(target.endpoints, used)) is not None
    ]
    size = request.load_bytes
    found = await asyncio.gather(*(_probe(endpoint, secret, timeout_s, size) for _, endpoint in chosen))
    return tuple(PathProbe(node, target, *probed) for (target, _), probed in zip(chosen, found, strict=True))


def _endpoint(endpoints: Sequence[Endpoint], used: Collection[str]) -> Endpoint | None:
    """Over which transport and where; other transports than TCP are not known yet."""
    fitting = [
        one
        for one in endpoints[:MOST_ENDPOINTS]
        if one.transport == "tcp" and 0 < one.port < 1 << 16 and is_elsewhere(one.address)
    ]
    return min(fitting, key=lambda one: one.address not in used, default=None)


async def _probe(endpoint: Endpoint, secret: bytes, timeout_s: float, size: int) -> tuple[str, float, float]:
    """(outcome, seconds, seconds of the load) of one ping."""
    loop = asyncio.get_running_loop()
    question = os.urandom(_NONCE_BYTES) + size.to_bytes(_SIZE_BYTES, "big")
    question += code(secret, b"keepstep ping", question)
    family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
    connecting = _Patience(timeout_s)
    with socket.socket(family, socket.SOCK_STREAM) as ping:
        ping.setblocking(False)
        try:
            await connecting.wait_for(loop.sock_connect(ping, (endpoint.address, endpoint.port)))
        except (asyncio.TimeoutError, TimeoutError):
            return "timeout", connecting.waited_s, 0.0
        except ConnectionRefusedError:
            return "refused", connecting.waited_s, 0.0
        except OSError:
            return "unreachable", connecting.waited_s, 0.0
        echoing = _Patience(max(connecting.left_s, 0.1))
        with contextlib.suppress(OSError, asyncio.TimeoutError, TimeoutError):
            await echoing.wait_for(_say(ping, question, size))
            echo = await echoing.wait_for(loop.sock_recv(ping, _CODE_BYTES))
            if hmac.compare_digest(echo, code(secret, b"keepstep echo", question)):
                round_trip_s = min(connecting.waited_s, echoing.waited_s)
                return "echo", round_trip_s, echoing.waited_s if size else 0.0
        return "silent", connecting.waited_s, echoing.waited_s if size else 0.0


class _Patience:
    """A time limit for several waits. Time in which this process stood still does not count: it blames no path."""

    def __init__(self, left_s: float) -> None:
        self.left_s, self.waited_s = left_s, 0.0

    async def wait_for(self, awaited: Coroutine[Any, Any, _T]) -> _T:
        """Raises asyncio.TimeoutError when nothing of the limit is left."""
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


async def _say(ping: socket.socket, question: bytes, size: int) -> None:
    """A ping, and its load."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(ping, question)
    chunk = memoryview(bytes(min(size, _CHUNK_BYTES)))
    while size:
        await loop.sock_sendall(ping, chunk[:size])
        size -= min(size, len(chunk))


def is_elsewhere(address: str) -> bool:
    """An address of a host as others see it: numeric, and no loopback, multicast or wildcard."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return not (ip.is_loopback or ip.is_multicast or ip.is_unspecified)
