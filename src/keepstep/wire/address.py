"""Addresses as text, and the socket options that let a dead host be noticed within seconds."""

from __future__ import annotations

import socket
from typing import Any

from keepstep.core.errors import UsageError

_UNANSWERED_MS = 3000


def parse_address(text: str, *, default_port: int | None = None) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` as (host, port).

    Raises:
        UsageError: it is neither.
    """
    host, colon, port = text.rpartition(":")
    if not colon and default_port is not None:
        host, port = text, str(default_port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{text!r} is no address: wants HOST:PORT, for example 10.0.0.1:29400")
    return host, int(port)


def end_name(address: Any) -> str:
    """One end of a connection as both sides write it: IPv4 inside IPv6 unwrapped, scope cut off."""
    if not isinstance(address, tuple):
        return "?"
    host, port = str(address[0]), int(address[1])  # pyright: ignore[reportUnknownArgumentType]
    return f"{host.partition('%')[0].removeprefix('::ffff:')}:{port}"


def end_host(name: str) -> str:
    """The host of an ``end_name``."""
    return name.rpartition(":")[0]


def notice_dead_host(connection: Any) -> None:
    """Let the kernel close a connection whose other host has not answered for about 3 s."""
    if not hasattr(connection, "setsockopt"):
        return
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    except OSError:
        return  # some socket families have none of these; the connection works without
