"""How the nodes of a job meet, from the command line: number of nodes, backend, endpoint."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Literal

from keepstep.core.errors import UsageError
from keepstep.launch.schedulers.local import host_in

DEFAULT_RENDEZVOUS_PORT = 29400
DEFAULT_MASTER_PORT = 29500


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (name or address) and a TCP port; port 0 means any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How the nodes of a job meet."""

    endpoint: Endpoint | None  # where; None: there is only one node
    backend: Literal["static", "c10d"]  # torchrun's name; both meet at the controller
    node_rank: int  # the one that was asked for; -1: in the order of joining
    is_host: bool | None  # whether this node hosts the controller; None: where it is the endpoint's host
    local_addr: str  # this node's address for the others; "": the one towards the endpoint
    join_timeout_s: float  # how long to wait for the other nodes


def rendezvous_from(given: argparse.Namespace, max_nodes: int, join_timeout_s: float) -> Rendezvous:
    """How the nodes meet, from torchrun's flags.

    Raises UsageError: there is no such backend, the nodes have no place to meet, or a value has another form.
    """
    backend = given.rdzv_backend
    if backend not in ("static", "c10d"):
        raise UsageError(
            f"--rdzv-backend {backend}: nodes meet at keepstep's controller; "
            "use --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
        )
    conf = _rendezvous_conf(given.rdzv_conf)
    timeout = conf.get("join_timeout") or conf.get("timeout")
    try:
        timeout_s = float(timeout) if timeout else join_timeout_s
    except ValueError:
        raise UsageError(f"--rdzv-conf {given.rdzv_conf}: the timeout is no number of seconds") from None
    endpoint = None
    if max_nodes > 1:
        endpoint = _meeting_point(given)
        if endpoint.port == 0:
            raise UsageError(f"--rdzv-endpoint {given.rdzv_endpoint}: give a port that all nodes know")
        # With restarts a node rank beyond the others is allowed: that node is a spare.
        if backend == "static" and not (
            given.node_rank >= 0 and (given.node_rank < max_nodes or given.max_restarts)
        ):
            raise UsageError(
                f"--node-rank {given.node_rank} --nnodes {given.nnodes}: give 0 to {max_nodes - 1}"
            )
    is_host = conf.get("is_host")
    return Rendezvous(
        endpoint=endpoint,
        backend=backend,
        node_rank=(given.node_rank if max_nodes > 1 else 0) if backend == "static" else -1,
        is_host=is_host.lower() in ("1", "true", "t", "yes", "y") if is_host else None,
        local_addr=given.local_addr or "",
        join_timeout_s=timeout_s,
    )


def node_range(text: str) -> tuple[int, int]:
    """``N`` or ``MIN:MAX`` as (min, max). Raises UsageError for another text, or if not 0 < MIN <= MAX."""
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if match:
        low = int(match[1])
        high = int(match[2] or low)
        if 0 < low <= high:
            return low, high
    raise UsageError(f"--nnodes {text}: give a number of nodes, or MIN:MAX with 0 < MIN <= MAX")


def parse_endpoint(flag: str, text: str, default_port: int | None) -> Endpoint:
    """``HOST``, ``HOST:PORT``, ``[V6]:PORT`` as an endpoint. Raises UsageError for another text or no port."""
    match = re.fullmatch(r"\s*(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]\s]+))(?::([0-9]+))?\s*", text)
    if not match:
        raise UsageError(f"{flag} {text}: give HOST:PORT (an IPv6 address in brackets)")
    port = int(match[3]) if match[3] is not None else default_port
    if port is None or port > 65535:
        raise UsageError(f"{flag} {text}: give a port from 1 to 65535 after the host, as HOST:PORT")
    return Endpoint(host_in(flag, match[1] or match[2]), port)


def _meeting_point(given: argparse.Namespace) -> Endpoint:
    if given.rdzv_endpoint:
        port = DEFAULT_RENDEZVOUS_PORT if given.rdzv_backend == "c10d" else None
        return parse_endpoint("--rdzv-endpoint", given.rdzv_endpoint, port)
    if given.rdzv_backend == "static":
        port = DEFAULT_MASTER_PORT if given.master_port is None else given.master_port
        if not 0 < port < 65536:
            raise UsageError(f"--master-port {port}: give a port from 1 to 65535 that all nodes know")
        return Endpoint(host_in("--master-addr", given.master_addr), port)
    raise UsageError(
        f"--nnodes {given.nnodes} --rdzv-backend c10d: say where the nodes meet, --rdzv-endpoint HOST:PORT"
    )


def _rendezvous_conf(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if any(not key.strip() or not value for key, _, value in pairs):
        raise UsageError(f"--rdzv-conf {text}: write key=value,key=value")
    return {key.strip(): value.strip() for key, _, value in pairs}
