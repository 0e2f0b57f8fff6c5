"""A server on an event loop, as the controller and electors run it: it authenticates peers and receives messages."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import cast

from keepstep.core import descriptors
from keepstep.wire.address import end_name, notice_dead_host
from keepstep.wire.channel import HANDSHAKE_S, TO_CONTROLLER, Ends, ServerChannel, encode
from keepstep.wire.counters import Counters
from keepstep.wire.messages import Message
from keepstep.wire.secret import RunKey
from keepstep.wire.tls import TlsEnd
from keepstep.wire.violation import Unproven, Violation, left_without_proof

logger = logging.getLogger("keepstep.wire")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits on what peers that misbehave may cost."""

    handshake_s: float = HANDSHAKE_S
    unproven: int = 2048  # most connections without proof; with the next one the oldest is closed
    descriptors: int | None = None  # most descriptors that the process may have open; None: its soft limit
    unsent_bytes: int = 32 << 20  # most bytes that wait for one peer before it counts as a slow reader


@dataclass(frozen=True, slots=True)
class ServerCallbacks:
    """Functions that the server calls on its event loop. They must not raise."""

    message: Callable[[Connection, Message], None]
    opened: Callable[[Connection], None]  # called when the peer has proved itself
    closed: Callable[[Connection, str], None]  # called with the reason, if ``opened`` was


_LEFT = 16  # descriptors kept free for files and connections to launchers that are opened for a moment
_LEAST_UNPROVEN = 8
_BACKLOG = 4096  # most connections that the kernel holds until they are accepted
_AT_ONCE = 64  # how often asyncio tries to accept at once; without descriptors each try fails, and is logged
_LAST_ROUNDS = 200  # most waits of 5 ms at the end; five times as many for peers that do not read
_COUNT_AGAIN_S = 1.0


def room_for_unproven(most: int, limit: int, others: int, kept: int) -> int:
    """How many connections without proof there may be, so that another connection can always be accepted.

    ``most``: upper bound of the result. ``limit``: descriptors that the process may have open. ``others``: descriptors
    that are open and are no connections of the server. ``kept``: the server's connections with proof or being closed.
    """
    return min(most, max(limit - _LEFT - others - kept, _LEAST_UNPROVEN))


class Connection(asyncio.Protocol):
    """One peer. ``number`` is unique within the server's life; ``role`` counts once the peer has proved itself."""

    __slots__ = (
        "_channel",
        "_server",
        "_timer",
        "_tls",
        "_transport",
        "number",
        "peer",
        "reason",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self._channel: ServerChannel | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tls: TlsEnd | None = None  # None: without TLS
        self.number = server.next_number()
        self.peer = "?"
        self.reason = ""

    @property
    def role(self) -> str:
        """The role that the peer has claimed, for example "agent"; empty before it has."""
        return self._channel.role if self._channel else ""

    @property
    def unsent_bytes(self) -> int:
        """How many bytes wait until the peer reads."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, message: Message) -> None:
        """Queue a message; it is dropped if the connection is closed."""
        self.send_encoded(encode(message))

    def send_encoded(self, body: bytes) -> None:
        """Queue the bytes of ``wire.encode(message)``, which saves work if the message goes to many peers."""
        transport, channel = self._transport, self._channel
        if transport is None or channel is None or self.reason or not channel.established:
            return
        self._send_bytes(transport, channel.send_encoded(body))
        self._server.counters.messages_out += 1
        if self.unsent_bytes > self._server.limits.unsent_bytes:
            self.refuse(Violation("slow-reader", f"{self.peer} does not read what it is sent"))

    def close(self, reason: str = "") -> None:
        """Close once everything queued has been sent."""
        self.reason = self.reason or reason
        transport = self._transport
        if transport is not None and not transport.is_closing():
            if self._tls is not None:
                transport.write(self._tls.close())
            transport.close()

    def refuse(self, violation: Violation) -> None:
        """Count the violation, log it at most once per host and minute, and close the connection."""
        transport, channel = self._transport, self._channel
        if transport is None or self.reason:
            return
        self.reason = violation.reason
        self._server.refused(violation, self.peer)
        if violation.reason == "crowded-out":
            transport.abort()  # its descriptor is needed at once, even if the peer reads nothing
        elif self._tls is not None and not self._tls.is_up:
            transport.close()  # after TLS's own alert has been sent
        elif channel is not None and (denial := channel.denial(violation)):
            self._send_bytes(transport, denial)
            transport.close()
        else:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        notice_dead_host(transport.get_extra_info("socket"))
        self.peer = end_name(transport.get_extra_info("peername"))
        ends = Ends(end_name(transport.get_extra_info("sockname")), self.peer)
        self._channel, self._tls = self._server.new_channel(ends)
        self._timer = self._server.await_proof(self)

    def data_received(self, data: bytes) -> None:
        channel, transport = self._channel, self._transport
        if channel is None or transport is None or self.reason:
            return
        was_established = channel.established
        try:
            if self._tls is not None:
                data = self._decrypted(self._tls, transport, data)
            messages, answer = channel.receive(data)
        except Violation as violation:
            self.refuse(violation)
            return
        if answer:
            self._send_bytes(transport, answer)
        if channel.established and not was_established:
            self._server.proven(self)
        if messages:
            self._server.deliver(self, messages, len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        established = self._channel is not None and self._channel.established
        self._transport = None
        if not established and not self.reason:
            self.reason = "unauthenticated"
            self._server.refused(left_without_proof(), self.peer)
        self._server.gone(self, self.reason or (str(exc) if exc else "closed by the peer"))

    def stop_timer(self) -> None:
        """Stop the timer that would refuse a peer without proof."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send_bytes(self, transport: asyncio.Transport, data: bytes) -> None:
        if not transport.is_closing():
            transport.write(data if self._tls is None else self._tls.send(data))

    @staticmethod
    def _decrypted(tls: TlsEnd, transport: asyncio.Transport, data: bytes) -> bytes:
        try:
            plain, answer = tls.receive(data)
        except ssl.SSLError as error:
            transport.write(tls.close())
            raise Unproven("unauthenticated", f"TLS: {error.reason or error}") from error
        transport.write(answer)
        if tls.has_ended:  # the peer waits until this side ends TLS, too
            transport.write(tls.close())
            transport.close()
        return plain


class Server:
    """Listens until ``close``. ``serve`` makes one that listens."""

    def __init__(
        self,
        channel: Callable[[Ends], ServerChannel],
        callbacks: ServerCallbacks,
        tls: ssl.SSLContext | None,
        limits: ServerLimits,
    ) -> None:
        self.limits = limits
        self.counters = Counters()
        self._channel, self._callbacks = channel, callbacks
        self._loop = asyncio.get_running_loop()
        self._listener: asyncio.Server | None = None
        self._unproven: OrderedDict[int, Connection] = OrderedDict()
        self._proven: dict[int, Connection] = {}
        self._numbers = 0
        self._alive = 0  # connections that are not closed yet, with or without proof
        self._tls = tls
        self._others = 0  # descriptors of the process that are no connections of this server
        self._counted_s = -_COUNT_AGAIN_S

    @property
    def port(self) -> int:
        """The port it listens on, which the kernel picks if 0 was asked for."""
        assert self._listener is not None
        return int(self._listener.sockets[0].getsockname()[1])

    @property
    def unproven(self) -> int:
        """Number of connections that have not proved themselves yet."""
        return len(self._unproven)

    async def listen(self, host: str, port: int) -> None:
        """Bind to this address and no other."""
        made = self._loop.create_server(
            lambda: Connection(self), host, port, backlog=_AT_ONCE, reuse_address=True
        )
        self._listener = await made
        for one in self._listener.sockets:  # the kernel may hold more of them than are accepted at once
            with socket.socket(fileno=os.dup(one.fileno())) as listening:
                listening.listen(_BACKLOG)

    async def close(self) -> None:
        """Stop listening and close every connection, also those that were accepted a moment ago."""
        if self._listener is not None:
            self._listener.close()
        for rounds in count():
            for connection in [*self._unproven.values(), *self._proven.values()]:
                connection.close("the controller ends")
            await asyncio.sleep(0.005)
            listed = self._unproven or self._proven
            if not self._alive or rounds >= _LAST_ROUNDS * (5 if listed else 1):
                return

    # These methods are called by `Connection`.

    def next_number(self) -> int:
        """The number of a connection that was just accepted."""
        self._numbers += 1
        self._alive += 1
        return self._numbers

    def new_channel(self, ends: Ends) -> tuple[ServerChannel, TlsEnd | None]:
        """The state of a new connection, with TLS if the server uses it.

        The event loops' own TLS reports a connection only after its handshake, so that a peer that never speaks would
        hold a descriptor and could be neither counted nor closed.
        """
        return self._channel(ends), TlsEnd(self._tls) if self._tls is not None else None

    def await_proof(self, connection: Connection) -> asyncio.TimerHandle:
        """Count a new connection, and start the timer that refuses it if no proof comes."""
        self.counters.connections += 1
        self._unproven[connection.number] = connection
        room = self._room()
        while len(self._unproven) > room:
            oldest = next(iter(self._unproven.values()))
            oldest.refuse(Violation("crowded-out", f"more than {room} connections without proof"))
            self._unproven.pop(oldest.number, None)
        late = Violation("handshake-timeout", f"no proof within {self.limits.handshake_s:g} s")
        return self._loop.call_later(self.limits.handshake_s, connection.refuse, late)

    def _room(self) -> int:
        """How many connections without proof there may be now."""
        now_s = self._loop.time()
        if now_s - self._counted_s >= _COUNT_AGAIN_S:
            self._counted_s = now_s
            self._others = max(descriptors.open_now() - self._alive, 0)
        limit = self.limits.descriptors or descriptors.soft_limit()
        kept = self._alive - len(self._unproven)
        return room_for_unproven(self.limits.unproven, limit, self._others, kept)

    def proven(self, connection: Connection) -> None:
        connection.stop_timer()
        self._unproven.pop(connection.number, None)
        self._proven[connection.number] = connection
        self._callbacks.opened(connection)

    def deliver(self, connection: Connection, messages: list[Message], received_bytes: int) -> None:
        self.counters.messages_in += len(messages)
        self.counters.bytes_in += received_bytes
        for message in messages:
            self._callbacks.message(connection, message)

    def refused(self, violation: Violation, peer: str) -> None:
        """Count a refusal, and log it unless one of the same host was logged within the last minute."""
        if self.counters.refuse(violation.reason, peer, self._loop.time()):
            logger.warning("refused %s (%s): %s", peer, violation.reason, violation)

    def gone(self, connection: Connection, reason: str) -> None:
        self._alive -= 1
        connection.stop_timer()
        self._unproven.pop(connection.number, None)
        if self._proven.pop(connection.number, None) is not None:
            self._callbacks.closed(connection, reason)


async def serve(
    host: str,
    port: int,
    key: RunKey,
    callbacks: ServerCallbacks,
    *,
    tls: ssl.SSLContext | None = None,
    limits: ServerLimits | None = None,
    check_addresses: bool = True,
    roles: Collection[str] = TO_CONTROLLER,
) -> Server:
    """Listen on ``host:port`` (0: any free port) and no other address. Raises OSError when it cannot be bound."""
    channel = partial(ServerChannel, key, check_addresses=check_addresses, roles=roles)
    server = Server(channel, callbacks, tls, limits or ServerLimits())
    await server.listen(host, port)
    return server
