"""A client on an event loop, which connects again whenever its connection breaks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

from keepstep.core.within import within
from keepstep.wire.address import end_name, notice_dead_host
from keepstep.wire.channel import HANDSHAKE_S, ClientChannel, Ends, Role
from keepstep.wire.counters import Counters
from keepstep.wire.messages import Checksums, Heartbeat, Message, Profile, States
from keepstep.wire.secret import RunKey
from keepstep.wire.violation import Violation

logger = logging.getLogger("keepstep.wire")

_FIRST_TRY_S = 1.5  # time to connect in the first attempt; doubles with each attempt
_LASTING_S = 1.0  # a connection that ends sooner counts as a failed attempt


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """How long a client waits, and how much it keeps."""

    handshake_s: float = HANDSHAKE_S
    first_wait_s: float = 0.05  # wait before the second attempt; doubles with each attempt, with jitter
    longest_wait_s: float = 5.0
    heartbeats: int = 4  # how many of the newest heartbeats are kept without a connection
    messages: int = 4096  # how many other messages are kept without a connection
    unsent_bytes: int = 8 << 20  # above as many unsent bytes of the transport, messages wait in the queue


class _Attempt(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.transport: asyncio.Transport | None = None
        self.channel: ClientChannel | None = None
        self.closed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.writable = True
        self._violation: Violation | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=self._client.limits.unsent_bytes)
        notice_dead_host(transport.get_extra_info("socket"))
        ends = Ends(
            end_name(transport.get_extra_info("sockname")), end_name(transport.get_extra_info("peername"))
        )
        self.channel = self._client.new_channel(ends)
        self.transport.write(self.channel.open())

    def data_received(self, data: bytes) -> None:
        channel, transport = self.channel, self.transport
        if channel is None or transport is None or self._violation is not None:
            return
        was_established = channel.established
        try:
            messages, answer = channel.receive(data)
        except Violation as violation:
            self._violation = violation
            transport.abort()
            return
        if answer:
            transport.write(answer)
        if channel.established and not was_established:
            self._client.established(self)
        for message in messages:
            self._client.received(message)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self._client.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if not self.closed.done():
            self.closed.set_result(
                self._violation or Violation("lost", str(exc) if exc else "the controller closed")
            )


class Client:
    """A connection that is made again whenever it breaks, until ``close``. All calls must come from its event loop.

    ``greet()`` returns the first messages of every connection: Hello, and everything else that a new controller process
    must hear (Join, Groups, findings that still hold).

    ``trouble(error, attempt)`` is called after each failed attempt; ``attempt`` counts them from 1 for each connection.
    A launcher may give up after some attempts; an agent never does. The only error that comes with a proof is
    ``AnotherJob``: the controller holds the secret, and its run has another id than ``key``.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: RunKey,
        *,
        role: Role,
        greet: Callable[[], Iterable[Message]],
        message: Callable[[Message], None],
        connected: Callable[[], None] = lambda: None,
        disconnected: Callable[[], None] = lambda: None,
        trouble: Callable[[Exception, int], None] = lambda error, attempt: None,
        tls: ssl.SSLContext | None = None,
        limits: ClientLimits | None = None,
    ) -> None:
        self.limits = limits or ClientLimits()
        self.counters = Counters()
        self._host, self._port = address
        self._key = key
        self._role: Role = role
        self._greet, self._message = greet, message
        self._connected, self._disconnected, self._trouble = connected, disconnected, trouble
        self._tls = tls
        self._attempt: _Attempt | None = None
        self._heartbeats: deque[Message] = deque(maxlen=self.limits.heartbeats)
        self._queue: deque[Message] = deque()
        self._closing = False
        self._redirected = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def connected(self) -> bool:
        """Both ends have proved themselves."""
        return self._attempt is not None

    @property
    def queued(self) -> int:
        """Number of messages that wait for a connection or for room in it."""
        return len(self._queue) + len(self._heartbeats)

    def send(self, message: Message) -> None:
        """Send now, or when connected again. Never blocks, never raises.

        Without a connection the newest 4 heartbeats are kept, and up to 4096 other messages, of which the oldest are
        dropped first. Answers are not kept, because the question was lost with the connection. Drops are counted.
        """
        attempt = self._attempt
        if attempt is not None and attempt.writable:
            self._write(attempt, message)
        elif isinstance(message, Heartbeat):
            self.counters.dropped += len(self._heartbeats) == self._heartbeats.maxlen
            self._heartbeats.append(message)
        elif isinstance(message, Profile | States | Checksums) and attempt is None:
            self.counters.dropped += 1
        else:
            if len(self._queue) >= self.limits.messages:
                self._queue.popleft()
                self.counters.dropped += 1
            self._queue.append(message)

    def redirect(self, host: str, port: int) -> None:
        """Close the connection, and connect to another address from now on."""
        if (host, port) == (self._host, self._port):
            return
        self._host, self._port = host, port
        self._redirected.set()
        self.reconnect()

    def reconnect(self) -> None:
        """Close the connection, and make another one."""
        attempt = self._attempt
        if attempt is not None and attempt.transport is not None:
            attempt.transport.abort()

    async def drained(self, timeout_s: float) -> bool:
        """Wait until everything has been handed to the kernel; False if that takes longer than ``timeout_s``."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while loop.time() < deadline_s:
            attempt = self._attempt
            transport = attempt.transport if attempt is not None else None
            if transport is not None and not self.queued and transport.get_write_buffer_size() == 0:
                return True
            await asyncio.sleep(0.005)
        return False

    async def close(self) -> None:
        """Close for good. Queued messages are sent if there is a connection."""
        self._closing = True
        attempt = self._attempt
        if attempt is not None and attempt.transport is not None:
            self.flush()
            attempt.transport.close()
            await asyncio.wait([attempt.closed], timeout=1.0)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # These methods are called by `_Attempt`.

    def new_channel(self, ends: Ends) -> ClientChannel:
        return ClientChannel(self._key, self._role, ends)

    def established(self, attempt: _Attempt) -> None:
        self._attempt = attempt
        self.counters.connections += 1
        for message in self._greet():
            self._write(attempt, message)
        self.flush()
        self._connected()

    def received(self, message: Message) -> None:
        self.counters.messages_in += 1
        self._message(message)

    def flush(self) -> None:
        """Send the queued messages, heartbeats last."""
        for queue in (self._queue, self._heartbeats):
            while queue and self._attempt is not None and self._attempt.writable:
                self._write(self._attempt, queue.popleft())

    def _write(self, attempt: _Attempt, message: Message) -> None:
        if attempt.transport is None or attempt.channel is None or attempt.transport.is_closing():
            return
        attempt.transport.write(attempt.channel.send(message))
        self.counters.messages_out += 1

    async def _run(self) -> None:
        failures = 0
        while not self._closing:
            began_s = asyncio.get_running_loop().time()
            error, was_connected = await self._one_connection(failures)
            if self._closing:
                return
            lasted_s = asyncio.get_running_loop().time() - began_s
            failures = 1 if was_connected and lasted_s >= _LASTING_S else failures + 1
            peer = f"{self._host}:{self._port}"
            reason = error.reason if isinstance(error, Violation) else "lost"
            if self.counters.refuse(reason, peer, asyncio.get_running_loop().time()):
                logger.warning("no connection to the controller at %s: %s; trying again", peer, error)
            self._trouble(error, failures)
            wait_s = min(self.limits.longest_wait_s, self.limits.first_wait_s * 2 ** min(failures - 1, 16))
            if await self._pause(wait_s * random.uniform(0.5, 1.0)):
                failures = 0

    async def _pause(self, wait_s: float) -> bool:
        """Wait before the next attempt; True if `redirect` has cut the wait short."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(wait_s, self._redirected.wait())
        was_redirected = self._redirected.is_set()
        self._redirected.clear()
        return was_redirected

    async def _one_connection(self, failures: int) -> tuple[Exception, bool]:
        loop = asyncio.get_running_loop()
        # The kernel repeats a SYN after 1, 3 and 7 s, so that a new attempt finds a link that is back up sooner.
        patience_s = min(self.limits.handshake_s, _FIRST_TRY_S * 2 ** min(max(failures - 1, 0), 16))
        attempt = _Attempt(self)
        try:
            connecting = loop.create_connection(lambda: attempt, self._host, self._port, ssl=self._tls)
            await within(patience_s, connecting)
            timer = loop.call_later(self.limits.handshake_s, self._give_up, attempt)
            error = await attempt.closed
            timer.cancel()
        except asyncio.TimeoutError:
            return Violation("handshake-timeout", f"no connection within {patience_s:g} s"), False
        except OSError as failure:  # the host is unknown or unreachable, or it or TLS refused
            return failure, False
        finally:
            was_connected = self._attempt is attempt
            if was_connected:
                self._attempt = None
                self._disconnected()
            elif attempt.transport is not None:
                attempt.transport.abort()
        return error, was_connected

    def _give_up(self, attempt: _Attempt) -> None:
        if attempt is not self._attempt and attempt.transport is not None:
            attempt.transport.abort()
