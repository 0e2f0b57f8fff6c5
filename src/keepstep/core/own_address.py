"""The address of this host that other hosts see."""

from __future__ import annotations

import socket

ANYWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737); it is routed like any host of the internet


def address_towards(host: str) -> str:
    """This host's address on the way to ``host`` (no packet is sent); a loopback one where there is no way."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
