"""What `keepstep check` finds out about one node: its row of the table, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from keepstep.core.validation import DeviceFigure


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface, or a port of an InfiniBand or RoCE adapter."""

    name: str  # "eth0"; "mlx5_0/1" for a port
    kind: Literal["ethernet", "infiniband", "roce"]
    is_up: bool
    mbits: int = 0  # megabits per second that it has negotiated; 0: unknown
    model: str = ""  # adapters of one model are alike; "": unknown
    was_used: bool = False  # whether it has sent data since the kernel began to count


@dataclass(frozen=True, slots=True)
class PathSpeed:
    """How fast a path was read and written, in bytes per second; 0: not measured."""

    path: str
    read: float = 0.0
    write: float = 0.0
    file_system: str = ""  # "nfs4"; "": unknown
    cached: bool = False  # what was read may have come from the node's memory
    note: str = ""  # why a figure is missing


@dataclass(frozen=True, slots=True)
class Burnt:
    """The outcome of a device's burn-in.

    Attributes:
        device: ``GPU 3`` or ``CPU``.
        model: the driver's name of the device; only devices of one model are compared.
        figures: of the tests; their ``rank`` is the number of the device on its node.
        errors: what the device did wrong, one line each.
        missing: why it was not tested, or not all of it.
    """

    device: str
    model: str = ""
    seconds: float = 0.0
    products: int = 0
    checked_bytes: int = 0
    figures: tuple[DeviceFigure, ...] = ()
    errors: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node. Sizes are in bytes; -1: unknown."""

    node: str
    memory: tuple[int, int] = (-1, -1)  # available, and all
    shared: int = -1  # free shared memory
    disk: int = -1  # bytes that are free in the folder of runs
    kernel: str = ""  # "clean", "errors" or "unread"
    versions: tuple[tuple[str, str], ...] = ()  # ("driver", "570.86.15"), ...
    gpus: tuple[str, ...] = ()  # their models
    nics: tuple[Nic, ...] = ()
    paths: tuple[PathSpeed, ...] = ()
    burnt: tuple[Burnt, ...] = ()
    links: tuple[str, ...] = ()  # how fast the links to its partners were, of several nodes
    unfit: tuple[str, ...] = ()  # why no rank should run there, one line each
    warnings: tuple[str, ...] = ()  # what else is not as it should be

    @property
    def verdict(self) -> str:
        """``unfit``, ``warned`` or ``fit``."""
        return "unfit" if self.unfit else "warned" if self.warnings else "fit"
