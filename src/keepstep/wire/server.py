"""The controller's side of the wire: accepts, authenticates, hands messages over, refuses what is not allowed."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import cast

from keepstep.core import descriptors
from keepstep.wire.address import end_host, end_name, notice_dead_host
from keepstep.wire.channel import HANDSHAKE_S, TO_CONTROLLER, Ends, ServerChannel
from keepstep.wire.counters import Counters
from keepstep.wire.messages import Message
from keepstep.wire.secret import RunKey
from keepstep.wire.tls import TlsEnd
from keepstep.wire.violation import Reason, Unproven, Violation

logger = logging.getLogger("keepstep.wire")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds against peers that misbehave."""

    handshake_s: float = HANDSHAKE_S
    unproven: int = 2048  # connections without proof at most; the oldest makes room for the next
    descriptors: int | None = None  # that the process may have open; None: as many as its soft limit says
    unsent_bytes: int = 32 << 20  # to one peer, before it counts as a slow reader


@dataclass(frozen=True, slots=True)
class ServerCallbacks:
    """What the server calls, always on its event loop. They must not raise."""

    message: Callable[[Connection, Message], None]
    opened: Callable[[Connection], None]  # the peer has proved itself
    closed: Callable[[Connection, str], None]  # only for peers that were opened


_LEFT = 16  # descriptors for what is opened for a moment: files, connections to launchers
_LEAST_UNPROVEN = 8
_COUNT_AGAIN_S = 1.0


def room_for_unproven(most: int, limit: int, others: int, kept: int) -> int:
    """How many connections without proof there may be, so that another one can always be taken.

    ``limit``: descriptors of the process. ``others``: those of them that are no connection of the server. ``kept``:
    the server's other connections.
    """
    return min(most, max(limit - _LEFT - others - kept, _LEAST_UNPROVEN))


class Connection(asyncio.Protocol):
    """One peer. ``number`` is unique within the server's life; ``role`` is proven."""

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
        self._tls: TlsEnd | None = None  # the server does without
        self.number = server.next_number()
        self.peer = "?"
        self.reason = ""

    @property
    def role(self) -> str:
        """ "agent", "launcher" or "client"."""
        return self._channel.role if self._channel else ""

    def send(self, message: Message) -> None:
        """Queue a message; dropped when the connection is closed."""
        self._write(lambda channel: channel.send(message))

    def send_encoded(self, body: bytes) -> None:
        """As ``send``, for ``wire.encode(message)``: one encoding for many peers."""
        self._write(lambda channel: channel.send_encoded(body))

    def close(self, reason: str = "") -> None:
        """Send what is queued, then close."""
        self.reason = self.reason or reason
        transport = self._transport
        if transport is not None and not transport.is_closing():
            if self._tls is not None:
                transport.write(self._tls.close())
            transport.close()

    def refuse(self, violation: Violation) -> None:
        """Count, log once per host and minute, and drop the connection."""
        transport, channel = self._transport, self._channel
        if transport is None or self.reason:
            return
        self.reason = violation.reason
        self._server.refused(violation, self.peer)
        if violation.reason == "crowded-out":  # its descriptor is needed, also when it reads nothing
            transport.abort()
        elif self._tls is not None and not self._tls.is_up:
            transport.close()  # after what TLS itself has to say
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
        self._channel = self._server.new_channel(ends)
        self._tls = self._server.new_tls()
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
            self._server.count(
                "unauthenticated", self.peer, "left without a proof: holds another secret, or none"
            )
        self._server.gone(self, established, self.reason or (str(exc) if exc else "closed by the peer"))

    def stop_timer(self) -> None:
        """The proof has come, or the connection has gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _write(self, seal: Callable[[ServerChannel], bytes]) -> None:
        transport, channel = self._transport, self._channel
        if transport is None or channel is None or self.reason or not channel.established:
            return
        self._send_bytes(transport, seal(channel))
        self._server.counters.messages_out += 1
        if transport.get_write_buffer_size() > self._server.limits.unsent_bytes:
            self.refuse(Violation("slow-reader", f"{self.peer} does not read what it is sent"))

    def _send_bytes(self, transport: asyncio.Transport, data: bytes) -> None:
        if not transport.is_closing():
            transport.write(data if self._tls is None else self._tls.send(data))

    @staticmethod
    def _decrypted(tls: TlsEnd, transport: asyncio.Transport, data: bytes) -> bytes:
        try:
            plain, answer = tls.receive(data)
        except ssl.SSLError as error:
            transport.write(tls.alert())
            raise Unproven("unauthenticated", f"TLS: {error.reason or error}") from error
        transport.write(answer)
        if tls.has_ended:  # it waits for the same from us
            transport.write(tls.close())
            transport.close()
        return plain


class Server:
    """Listens until ``close``. Made by ``serve``."""

    def __init__(
        self,
        key: RunKey,
        callbacks: ServerCallbacks,
        *,
        limits: ServerLimits | None = None,
        check_addresses: bool = True,
        roles: Collection[str] = TO_CONTROLLER,
    ) -> None:
        self.limits = limits or ServerLimits()
        self.counters = Counters()
        self._key = key
        self._callbacks = callbacks
        self._check_addresses = check_addresses
        self._roles = roles
        self._loop = asyncio.get_running_loop()
        self._listener: asyncio.Server | None = None
        self._unproven: OrderedDict[int, Connection] = OrderedDict()
        self._proven: dict[int, Connection] = {}
        self._numbers = 0
        self._alive = 0  # connections, also those of which the loop has not told yet
        self._tls: ssl.SSLContext | None = None
        self._others = 0  # descriptors of the process that are no connection of ours
        self._counted_s = -_COUNT_AGAIN_S

    @property
    def port(self) -> int:
        """The port it listens on (useful when 0 was asked for)."""
        assert self._listener is not None
        return int(self._listener.sockets[0].getsockname()[1])

    @property
    def unproven(self) -> int:
        """Connections that have not proved themselves yet."""
        return len(self._unproven)

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Bind to this address and no other."""
        self._tls = tls
        self._listener = await self._loop.create_server(
            lambda: Connection(self),
            host,
            port,
            backlog=4096,
            reuse_address=True,
        )

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._listener is not None:
            self._listener.close()
        for connection in [*self._unproven.values(), *self._proven.values()]:
            connection.close("the controller ends")
        while self._unproven or self._proven:
            await asyncio.sleep(0.005)

    # Called by connections.

    def next_number(self) -> int:
        """Of one that was accepted."""
        self._numbers += 1
        self._alive += 1
        return self._numbers

    def new_channel(self, ends: Ends) -> ServerChannel:
        return ServerChannel(self._key, ends, check_addresses=self._check_addresses, roles=self._roles)

    def new_tls(self) -> TlsEnd | None:
        """The event loops' own TLS would tell of a connection only when its handshake is done: who never speaks would
        hold a descriptor, and could not be counted or closed."""
        return TlsEnd(self._tls) if self._tls is not None else None

    def await_proof(self, connection: Connection) -> asyncio.TimerHandle:
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
        """Connections without proof that there may be now, beside those with one and those that are being closed."""
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
        self.count(violation.reason, peer, str(violation))

    def count(self, reason: Reason, peer: str, message: str) -> None:
        if self.counters.refuse(reason, end_host(peer), self._loop.time()):
            logger.warning("refused %s (%s): %s", peer, reason, message)

    def gone(self, connection: Connection, established: bool, reason: str) -> None:
        self._alive -= 1
        connection.stop_timer()
        self._unproven.pop(connection.number, None)
        if self._proven.pop(connection.number, None) is not None and established:
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
    server = Server(key, callbacks, limits=limits, check_addresses=check_addresses, roles=roles)
    await server.listen(host, port, tls)
    return server
