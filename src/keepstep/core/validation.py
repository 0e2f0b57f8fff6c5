"""Validation of a held job: the transfers to make, the figures of transfers and devices, and who is slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Topology = Literal["ring", "tree"]
Transport = Literal["tcp", "nccl"]
"""How a link was tested: between the hosts, or between the devices."""


@dataclass(frozen=True, slots=True)
class TransferEndpoint:
    """Where a held worker takes transfers. ``token``: hex digits that a sender must show."""

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """One link test, from ``source`` to ``target`` (global ranks). Passes are run in order of their numbers."""

    number: int  # number of the pass
    topology: Topology
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class RankTests:
    """The tests that one held rank has to run: its transfers in order, and the endpoints of those that it sends."""

    rank: int
    transfers: tuple[Transfer, ...]
    endpoints: dict[int, TransferEndpoint]
    limit_s: float = 4.0  # time for all tests together


@dataclass(frozen=True, slots=True)
class DeviceFigure:
    """The result of one test of one rank's device; more is better."""

    rank: int
    test: str  # "fp32", "bf16", "fp8", or the name of a custom test
    value: float
    unit: str = "TFLOP/s"
    limited: float = 0.0  # share of its time in which a CPU quota stopped the rank; lowers ``value``
    taken: float = 0.0  # share of the test in which other processes had its core; does not lower ``value``


@dataclass(frozen=True, slots=True)
class LinkFigure:
    """Best speed of messages of one size over one link, as the receiver measured it.

    0: both ends were at it, and nothing came (between devices only; otherwise such a link has no figure).
    """

    source: int
    target: int
    topology: Topology
    nbytes: int
    bytes_per_s: float
    transport: Transport = "tcp"


@dataclass(frozen=True, slots=True)
class RankFigures:
    """The results of one rank's tests: of its device, of the links that it received from, and what is missing."""

    rank: int
    devices: tuple[DeviceFigure, ...] = ()
    links: tuple[LinkFigure, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SlowDevice:
    """A device below its peers: ``share`` is its figure over their median."""

    figure: DeviceFigure
    median: float
    share: float


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A link below its peers."""

    source: int
    target: int
    bytes_per_s: float
    median: float
    share: float


@dataclass(frozen=True, slots=True)
class Validation:
    """The outcome of a validation: every figure, and slow devices and links, the slowest first."""

    ranks: tuple[int, ...]  # the ranks that were tested
    figures: tuple[RankFigures, ...]
    devices: tuple[SlowDevice, ...] = ()
    links: tuple[SlowLink, ...] = ()
    missing: tuple[str, ...] = ()
    held_s: float = 0.0
