"""The server's socket, TLS and limits: who connects and says nothing, or reads nothing, is let go."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepstep.core.errors import RunError, UsageError
from keepstep.view.web.access import is_loopback

MOST_CONNECTIONS = 256
_MOST_HEADER_BYTES = 16_384  # of the request line and all headers
_REQUEST_S = 10.0  # in which a request has to be here
_UNREAD_S = 60.0  # after which a viewer that takes nothing any more is let go
_IDLE_S = 15


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: an address or name, and a port (0: any that is free)."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Address:
        """The address in ``HOST:PORT``, ``[ADDRESS]:PORT``, ``HOST`` or ``:PORT``. Raises UsageError."""
        host, colon, port = text.rpartition(":")
        if not colon or "]" in port:
            host, port = text, "8642"
        host = host.strip("[]") or "127.0.0.1"
        if not port.isascii() or not port.isdigit() or int(port) > 65_535 or any(c in host for c in " /@"):
            raise UsageError(f"--listen {text}: is no HOST:PORT; write it like 127.0.0.1:8642")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def check_address(address: Address, *, has_token: bool, has_tls: bool) -> None:
    """Raise UsageError for an address that others reach, without a token and TLS."""
    if is_loopback(address.host) or (has_token and has_tls):
        return
    raise UsageError(
        f"--listen {address}: other machines reach this address, which needs --token-file and --tls-cert with "
        "--tls-key; or leave it at 127.0.0.1 and use a tunnel (`ssh -L 8642:127.0.0.1:8642 HOST`)"
    )


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """A server's TLS 1.2 or newer. Raises UsageError where the files cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def no_password() -> str:
        raise UsageError(f"--tls-key {key}: is encrypted; give a key that is not, of mode 0600")

    try:
        context.load_cert_chain(certificate, key, no_password)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise UsageError(
            f"--tls-cert {certificate}, --tls-key {key}: {reason}; both are PEM files that belong together"
        ) from error
    return context


class _Door(socket.socket):
    """A listening socket that lets so many in at once, those included whose TLS has not begun: each takes a file."""

    def __init__(self, family: int, kind: int, proto: int, most: int) -> None:
        super().__init__(family, kind, proto)
        self._most = most
        self._inside: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        """As `socket.accept`. Closes a connection that is one too many, and raises ConnectionAbortedError."""
        came, whence = super().accept()
        self._inside = [one for one in self._inside if one.fileno() >= 0]
        if len(self._inside) >= self._most:
            came.close()
            raise ConnectionAbortedError
        self._inside.append(came)
        return came, whence


def bound_socket(address: Address, most_connections: int = MOST_CONNECTIONS) -> socket.socket:
    """A listening socket at the address. Raises RunError, which says what to do."""
    try:
        family, kind, proto, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise RunError(f"--listen {address}: {error.strerror}; name an address of this machine") from error
    made = _Door(family, kind, proto, most_connections)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(place)
        made.listen(128)
        made.setblocking(False)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            what = "the port is in use, perhaps by another `keepstep serve`; give another with --listen HOST:PORT"
        else:
            what = f"{error.strerror}; name an address of this machine and a free port"
        raise RunError(f"--listen {address}: {what}") from error
    return made


@dataclass(slots=True)
class _Limits:
    request_s: float = _REQUEST_S
    unread_s: float = _UNREAD_S


class _BoundedProtocol(H11Protocol):
    """HTTP that waits neither for a request that does not come whole, nor for who reads nothing."""

    limits = _Limits()
    _waits: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._waits, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Without cycle no request has been read so far. The timer is not begun anew: a byte now and then is no request.
        if self._is_answering() and self._waits is not None:
            self._waits.cancel()
            self._waits = None
        elif not self._is_answering():
            self._wait_for_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.limits.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _is_answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    def _wait_for_request(self) -> None:
        if self._waits is None:
            self._waits = self.loop.call_later(self.limits.request_s, self._give_up)

    def _give_up(self) -> None:
        self._waits = None
        if not self._is_answering() and not self.transport.is_closing():
            self.transport.abort()


class WebServer(uvicorn.Server):
    """A server at a socket that is bound already; quiet, and without a log of requests: they could hold a token."""

    def __init__(
        self,
        app: Any,
        *,
        tls: ssl.SSLContext | None = None,
        closing: Callable[[], None] = lambda: None,
        request_s: float = _REQUEST_S,
        unread_s: float = _UNREAD_S,
    ) -> None:
        limits = {"limits": _Limits(request_s, unread_s)}
        self._kind: Any = type("BoundedProtocol", (_BoundedProtocol,), limits)
        config = uvicorn.Config(
            app,
            http=self._kind,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        )
        super().__init__(config)
        self._tls, self._closing, self._request_s = tls, closing, request_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen at the sockets. uvicorn would wait a minute for TLS to begin."""
        await super().startup([])
        loop = asyncio.get_running_loop()
        handshake_s = None if self._tls is None else self._request_s
        self.servers = [
            await loop.create_server(
                self._protocol, sock=one, ssl=self._tls, ssl_handshake_timeout=handshake_s
            )
            for one in sockets or ()
        ]

    def _protocol(self) -> asyncio.Protocol:
        return self._kind(self.config, self.server_state, self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the answers that have no end of their own, then all others."""
        self._closing()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        """Keep uvicorn's log to errors while the server runs."""
        loggers = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.error", "uvicorn.access")]
        levels = [one.level for one in loggers]
        for one in loggers:
            one.setLevel(logging.CRITICAL if one.name.endswith("access") else logging.ERROR)
            one.addFilter(_is_news)
        try:
            yield
        finally:
            for one, level in zip(loggers, levels, strict=True):
                one.setLevel(level)
                one.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record says more than that an answer was cut off at the server's end."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is not asyncio.CancelledError and not str(record.msg).startswith("Cancel ")


def url_of(address: Address, bound: socket.socket, *, tls: bool) -> str:
    """The address to open in a browser."""
    port = bound.getsockname()[1]
    host = address.host
    try:
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.gethostname()
    except ValueError:
        pass
    return f"{'https' if tls else 'http'}://{Address(host, port)}/"
