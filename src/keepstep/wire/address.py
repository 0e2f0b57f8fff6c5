"""Addresses as text, and socket options by which a dead host is noticed within seconds."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from keepstep.core.errors import UsageError

_UNANSWERED_MS = 3000


def parse_address(text: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` as (host, port).

    Raises:
        UsageError: the text has neither form.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{text!r} is no address: wants HOST:PORT, for example 10.0.0.1:29400")
    return host, int(port)


def end_name(address: Any) -> str:
    """A socket address as both sides of a connection write it: an IPv4 address in IPv6 as IPv4, without scope."""
    if not isinstance(address, tuple):
        return "?"
    host, port = str(address[0]), int(address[1])  # pyright: ignore[reportUnknownArgumentType]
    return f"{host.partition('%')[0].removeprefix('::ffff:')}:{port}"


def notice_dead_host(connection: Any) -> None:
    """Have the kernel close a connection if the other host has not answered for about 3 s."""
    if not hasattr(connection, "setsockopt"):
        return
    with contextlib.suppress(OSError):  # some socket families lack these options and work without them
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
