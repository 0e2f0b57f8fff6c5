"""Which host an address means: this one or another, and how the others reach us."""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import socket
from contextlib import suppress
from pathlib import Path

from keepstep.core.errors import RunError
from keepstep.core.own_address import ANYWHERE, address_towards
from keepstep.launch.command.meeting import Endpoint

_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # to connections, by the kernel
_LEAST_PORT = 10_000
_PORTS_WANTED, _PORTS_TRIED = 1000, 16


def resolve(host: str) -> list[str]:
    """The numeric addresses of a host, IPv4 first.

    Raises:
        RunError: the name is unknown.
    """
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except OSError as error:
        raise RunError(f"{host}: {error.strerror or error}; correct the host or use its address") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return sorted(addresses, key=lambda address: ":" in address)


def is_loopback(address: str) -> bool:
    """Whether only this host can reach the (numeric) address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_this_host(host: str) -> bool:
    """Whether a name or address is this machine's: its own name, or an address that can be bound here."""
    if host in ("localhost", os.uname().nodename):
        return True
    try:
        return any(_can_bind(address) for address in resolve(host))
    except RunError:
        return False


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
            return True
        except OSError:
            return False


def listen_address(endpoint: Endpoint) -> str:
    """The address to bind for others that connect to ``endpoint``.

    Where this host's own name leads to its loopback address (a habit of some distributions), others see another
    address behind it: the one on the way out.
    """
    addresses = resolve(endpoint.host)
    outside = [address for address in addresses if not is_loopback(address)]
    if outside:
        return outside[0]
    named_loopback = endpoint.host == "localhost" or _is_numeric(endpoint.host)
    return addresses[0] if named_loopback else address_towards(ANYWHERE)


def own_address(given: str, other: str) -> str:
    """Where other nodes reach this one: what was given, resolved once for all ranks, else on the way to ``other``."""
    return listen_address(Endpoint(given, 0)) if given else address_towards(other)


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        return False


def is_taken(address: str, port: int) -> bool:
    """Whether somebody listens there already."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen()  # binding alone succeeds where both sides allow the address to be used again
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def free_port(address: str) -> int:
    """A TCP port that nobody listens on at the moment.

    Not one of those that the kernel gives to connections, where others are free: such a port may be taken again before
    whoever is told of it listens, seconds later.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in (*_lasting_ports(), 0, 0):
        with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            return int(probe.getsockname()[1])
    with socket.socket(family, socket.SOCK_STREAM) as probe:  # the address is not of this machine (yet)
        probe.bind(("::" if family == socket.AF_INET6 else "", 0))
        return int(probe.getsockname()[1])


def _lasting_ports() -> list[int]:
    """Some that no connection is given."""
    try:
        first, last = map(int, _GIVEN_PORTS.read_text().split())
    except (OSError, ValueError):
        return []
    above, below = range(last + 1, 1 << 16), range(_LEAST_PORT, first)
    ports = above if len(above) >= _PORTS_WANTED else below
    return random.sample(ports, min(_PORTS_TRIED, len(ports)))


def claim_host(port: int) -> socket.socket | None:
    """Become the one launcher of this machine that hosts the rendezvous at ``port``; None when another has.

    The claim is a name in the kernel (abstract socket) that goes with the returned socket or the process.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0keepstep-rendezvous-{port}")
        return claim
    except OSError:
        claim.close()
        return None
