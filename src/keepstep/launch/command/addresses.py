"""Hosts, addresses and ports: whether one is this machine's, how other nodes reach it, which ports are free."""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import socket
import time
from contextlib import suppress
from pathlib import Path

from keepstep.core.errors import CheckpointError, RunError
from keepstep.core.local_socket import connect, listen
from keepstep.core.own_address import ANYWHERE, address_towards
from keepstep.launch.command.meeting import Endpoint, Rendezvous

_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # ports that the kernel gives to connections
_LEAST_PORT = 10_000
_PORTS_WANTED, _PORTS_TRIED = 1000, 16
_MOST_HOSTS = 1 << 20  # characters of the hosts file that are read
_CLAIMS = 16  # names by which a port can be claimed
_CLAIM_TRIES, _CLAIM_PATIENCE_S = 3, 0.05


def resolve(host: str) -> list[str]:
    """The numeric addresses of a host, IPv4 first. Raises RunError where the name is unknown."""
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:  # the latter: a label that is empty or too long
        why = getattr(error, "strerror", None) or error
        raise RunError(f"{host}: {why}; correct the host or use its address") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return sorted(addresses, key=lambda address: ":" in address)


def own_name_with_domain(hosts: Path = Path("/etc/hosts")) -> str:
    """This host's name with its domain where the hosts file has it, as that of a Kubernetes pod does; else without."""
    name = os.uname().nodename
    with suppress(OSError, UnicodeDecodeError):
        for line in hosts.read_text()[:_MOST_HOSTS].splitlines():
            for word in line.partition("#")[0].split()[1:]:
                if word.startswith(f"{name}."):
                    return word
    return name


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


def _socket(address: str, kind: socket.SocketKind) -> socket.socket:
    """A socket of the address's family that may bind a port left in TIME_WAIT."""
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
    if kind == socket.SOCK_STREAM:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def _can_bind(address: str) -> bool:
    with _socket(address, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
            return True
        except OSError:
            return False


def listen_address(endpoint: Endpoint) -> str:
    """The address to bind so that other nodes can connect to ``endpoint``.

    Some distributions map a host's own name to its loopback address. Other nodes then see another address behind the
    name: the one from which packets leave the machine.
    """
    addresses = _resolve_here(endpoint.host)
    outside = [address for address in addresses if not is_loopback(address)]
    if outside:
        return outside[0]
    named_loopback = endpoint.host == "localhost" or _is_numeric(endpoint.host)
    return addresses[0] if named_loopback else address_towards(ANYWHERE)


def _resolve_here(host: str) -> list[str]:
    """The addresses of a host that is this one. Raises RunError where the name is unknown.

    A pod's name with its subdomain may not be known to the name server yet, or with the address of an earlier pod; its
    own name alone is in its hosts file.
    """
    own = os.uname().nodename
    try:
        found = resolve(host)
    except RunError:
        if not host.startswith(f"{own}."):
            raise
        return resolve(own)
    is_late = host.startswith(f"{own}.") and not any(_can_bind(address) for address in found)
    return resolve(own) if is_late else found


def own_address(given: str, other: str) -> str:
    """The address at which other nodes reach this one: the given one, else the one that is used towards ``other``."""
    return listen_address(Endpoint(given, 0)) if given else address_towards(other)


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        return False


def is_taken(address: str, port: int) -> bool:
    """Whether some process listens at the address already."""
    with _socket(address, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, port))
            probe.listen()  # binding alone succeeds where both sides set SO_REUSEADDR
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def free_port(address: str) -> int:
    """A TCP port on which no process listens at the moment.

    Ports that the kernel gives to connections are avoided: seconds pass before the port is used, and the kernel may
    have given it away by then.
    """
    for port in (*_lasting_ports(), 0, 0):
        with _socket(address, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((address, port))
            return int(probe.getsockname()[1])
    with _socket(address, socket.SOCK_STREAM) as probe:  # the address is not, or not yet, one of this machine
        probe.bind(("::" if ":" in address else "", 0))
        return int(probe.getsockname()[1])


def _lasting_ports() -> list[int]:
    """Some ports that the kernel gives to no connection."""
    try:
        first, last = map(int, _GIVEN_PORTS.read_text().split())
    except (OSError, ValueError):
        return []
    above, below = range(last + 1, 1 << 16), range(_LEAST_PORT, first)
    ports = above if len(above) >= _PORTS_WANTED else below
    return random.sample(ports, min(_PORTS_TRIED, len(ports)))


_claims: list[socket.socket | None] = []  # kept open until the process ends, or lets go


def becomes_host(rendezvous: Rendezvous) -> bool:
    """Whether the others meet at this process: it is node 0, or the first one on the rendezvous endpoint's host."""
    if rendezvous.endpoint is None:
        return True
    if rendezvous.backend == "static":
        return rendezvous.node_rank == 0
    if rendezvous.is_host is not None:
        return rendezvous.is_host
    if not is_this_host(rendezvous.endpoint.host):
        return False
    claim = claim_host(rendezvous.endpoint.port)
    _claims.append(claim)
    return claim is not None


def let_go() -> None:
    """End this process's claims, so that another one may become the host."""
    while _claims:
        if (claim := _claims.pop()) is not None:
            claim.close()


def claim_host(port: int) -> socket.socket | None:
    """Become the one launcher of this machine that hosts the controller at ``port``; None when another one does.

    The claim is a name in the kernel (abstract Unix socket) that ends with the returned socket or the process. Anybody
    can take a name, so one that another user has is left, and the next of several is claimed.

    Raises:
        RunError: other users have all the names.
    """
    for number in range(_CLAIMS):
        try:
            return listen(f"keepstep-rendezvous-{port}-{number}")
        except OSError:  # noqa: PERF203  the name is taken
            if _is_ours(f"keepstep-rendezvous-{port}-{number}"):
                return None
    raise RunError(
        f"another user of this machine holds all names by which launchers claim port {port}; "
        "give another port with --rdzv-endpoint"
    )


def _is_ours(address: str) -> bool:
    """Whether a process of this user listens at an address that is taken."""
    for _ in range(_CLAIM_TRIES):
        try:
            connect(address, "claim", _CLAIM_PATIENCE_S).close()
        except CheckpointError:  # noqa: PERF203  another user listens
            return False
        except OSError:  # a launcher that has taken the name is about to listen; one that never does is none
            time.sleep(_CLAIM_PATIENCE_S)
        else:
            return True
    return False
