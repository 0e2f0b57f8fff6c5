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
from collections.abc import Collection, Sequence
from typing import cast

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
    begun_s = time.monotonic()
    question = os.urandom(_NONCE_BYTES) + size.to_bytes(_SIZE_BYTES, "big")
    question += code(secret, b"keepstep ping", question)
    family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as ping:
        ping.setblocking(False)
        try:
            where = (endpoint.address, endpoint.port)
            await asyncio.wait_for(loop.sock_connect(ping, where), timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            return "timeout", time.monotonic() - begun_s, 0.0
        except ConnectionRefusedError:
            return "refused", time.monotonic() - begun_s, 0.0
        except OSError:
            return "unreachable", time.monotonic() - begun_s, 0.0
        connected_s = time.monotonic() - begun_s
        with contextlib.suppress(OSError, asyncio.TimeoutError, TimeoutError):
            left_s = max(timeout_s - connected_s, 0.1)
            await asyncio.wait_for(_say(ping, question, size), left_s)
            left_s = max(timeout_s - (time.monotonic() - begun_s), 0.1)
            echo = await asyncio.wait_for(loop.sock_recv(ping, _CODE_BYTES), left_s)
            if hmac.compare_digest(echo, code(secret, b"keepstep echo", question)):
                took_s = time.monotonic() - begun_s - connected_s
                return "echo", min(connected_s, took_s), took_s if size else 0.0
        return "silent", connected_s, time.monotonic() - begun_s - connected_s if size else 0.0


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
