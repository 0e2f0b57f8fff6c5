"""Validation of a held job: which transfers are made, what they and the devices' tests measured, who is slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Topology = Literal["ring", "tree"]


@dataclass(frozen=True, slots=True)
class TransferEndpoint:
    """Where a held worker takes transfers. ``token``: what a sender must show, hex."""

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """One link test, from ``source`` to ``target`` (global ranks). Passes are run in order of their numbers."""

    number: int  # of the pass
    topology: Topology
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class RankTests:
    """What one held rank has to do: its own transfers in order, and where the targets of those it sends are."""

    rank: int
    transfers: tuple[Transfer, ...]
    endpoints: dict[int, TransferEndpoint]
    limit_s: float = 4.0  # for all tests together


@dataclass(frozen=True, slots=True)
class DeviceFigure:
    """What one test measured on one rank's device; more is better."""

    rank: int
    test: str  # "fp32", "bf16", "fp8", or the name of a custom test
    value: float
    unit: str = "TFLOP/s"
    limited: float = 0.0  # share of its own time in which a CPU quota kept it off its core; in ``value``
    taken: float = 0.0  # share of the test in which other processes had its core; not in ``value``


@dataclass(frozen=True, slots=True)
class LinkFigure:
    """Best speed of messages of one size over one link, as the receiver measured it."""

    source: int
    target: int
    topology: Topology
    nbytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class RankFigures:
    """The tests of one rank: its device, the links it received from, and what could not be measured."""

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
    """The outcome: every figure, and who stands out, the slowest first."""

    ranks: tuple[int, ...]  # that were tested
    figures: tuple[RankFigures, ...]
    devices: tuple[SlowDevice, ...] = ()
    links: tuple[SlowLink, ...] = ()
    missing: tuple[str, ...] = ()
    held_s: float = 0.0
