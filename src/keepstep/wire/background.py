"""A client for programs without an event loop: the connection lives in a daemon thread."""

from __future__ import annotations

import asyncio
import queue
import ssl
import threading
from collections.abc import Callable, Iterable

from keepstep.wire.channel import Role
from keepstep.wire.client import Client, ClientLimits
from keepstep.wire.loops import loop_factory
from keepstep.wire.messages import Message
from keepstep.wire.secret import RunKey

_INBOX = 10_000


class BackgroundClient:
    """As :class:`keepstep.wire.Client`, for a caller that polls. Fork only before it is made.

    ``greet`` and ``trouble`` are called in the thread: they must only read what may be read from there.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: RunKey,
        *,
        role: Role,
        greet: Callable[[], Iterable[Message]],
        trouble: Callable[[Exception, int], None] | None = None,
        arrived: Callable[[], None] | None = None,
        tls: ssl.SSLContext | None = None,
        limits: ClientLimits | None = None,
    ) -> None:
        self._inbox: queue.Queue[Message] = queue.Queue(_INBOX)
        self._arrived = arrived
        self._loop = loop_factory()()
        self._closed = False
        self._client = Client(
            address[0],
            address[1],
            key,
            role=role,
            greet=greet,
            message=self._take,
            trouble=trouble or (lambda error, attempt: None),
            tls=tls,
            limits=limits,
        )
        self._thread = threading.Thread(target=self._main, name="keepstep-wire", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """There is an authenticated connection at the moment."""
        return self._client.connected

    def send(self, message: Message) -> None:
        """Send now, or when connected again; never blocks."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._client.send, message)

    def receive(self, timeout_s: float = 0.0) -> Message | None:
        """The next message from the controller, waiting at most ``timeout_s``; None when there is none."""
        try:
            return self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return None

    def drained(self, timeout_s: float) -> bool:
        """Wait until all that was sent has been handed to the kernel."""
        waiting = asyncio.run_coroutine_threadsafe(self._client.drained(timeout_s), self._loop)
        return waiting.result(timeout_s + 1.0)

    def close(self) -> None:
        """Close the connection and end the thread."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def _take(self, message: Message) -> None:
        try:
            self._inbox.put_nowait(message)
        except queue.Full:
            return  # the caller has not polled for thousands of messages; requests are repeated
        if self._arrived is not None:
            self._arrived()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._client.start)
        self._loop.run_forever()
        self._loop.close()
