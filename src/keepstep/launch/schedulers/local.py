"""What any scheduler can say of a job, and that nobody says anything where there is none."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from keepstep.core.errors import UsageError

_MOST_DIGITS = 18
_MOST_HOST = 253
_SHOWN = 40  # characters of a value in a message
_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,62})"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL}){{0,126}}\.?")


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a scheduler says of a job and of this node. Empty, zero or -1: it does not say.

    Attributes:
        name: the job, as messages call it: ``Slurm job 123``.
        nodes: how many it was given, spares included.
        node_rank: this node's place in the scheduler's order.
        master: host name of the node with rank 0; it hosts the controller.
        port: of the controller; the same on all nodes, and probably no other job's.
        run_id: tells the job from others.
        node: this node's name.
        failure_domain: label of the nodes that may be lost together with this one.
        workers: how many each node is to start.
        untold: why it does not say how the nodes meet, where it should.
        warnings: lines for the user.
    """

    name: str = ""
    nodes: int = 0
    node_rank: int = -1
    master: str = ""
    port: int = 0
    run_id: str = ""
    node: str = ""
    failure_domain: str = ""
    workers: int = 0
    untold: str = ""
    warnings: tuple[str, ...] = ()


NOTHING_TOLD = Allocation()


def number_in(environ: Mapping[str, str], name: str, most: int) -> int | None:
    """A variable's whole number from 0 to ``most``; None where it is not set. Raises UsageError for another text."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) <= most:
        return int(text)
    raise UsageError(f"{name}={text[:_SHOWN]!r}: is no number from 0 to {most}; correct it, or unset it")


def host_in(name: str, text: str) -> str:
    """A host name or address without brackets and blanks. ``name``: of the flag or variable that has it.

    Raises UsageError for another text: in a pod a name that cannot be would be waited for.
    """
    host = text.strip().removeprefix("[").removesuffix("]")
    if len(host) <= _MOST_HOST and _HOST.fullmatch(host):
        return host
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return host
    raise UsageError(f"{name}={text[:_SHOWN]!r}: is no host name or address; correct it, or unset it")
