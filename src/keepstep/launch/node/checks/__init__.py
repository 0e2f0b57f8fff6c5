"""Error checks of a node (TRANSOM, section IV-A): before its first workers start, and beside each recovery.

Each check is a function that takes a `Subject` and yields what it found; ``node_checks`` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keepstep.core.kernel_records import KERNEL_LOG

Mode = Literal["any", "ro", "rw"]
"""A path is only read (ro), has to be written (rw), or is written where that is allowed."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A path to check."""

    path: str
    mode: Mode = "any"
    is_made: bool = (
        False  # whether the job makes it when it is needed: until then the folder above it is checked
    )


@dataclass(frozen=True, slots=True)
class Subject:
    """The node as the checks look at it."""

    node: str
    nproc: int
    folders: tuple[Path, ...] = ()  # folders that have to be writable
    port: int = 0  # port that has to be free; 0: any port will do
    since_s: float = 0.0  # CLOCK_MONOTONIC; older errors of the kernel do not count
    fresh: bool = False  # nothing has failed on this node yet
    kernel_log: str = KERNEL_LOG
    paths: tuple[Wanted, ...] = ()  # paths of data sets and checkpoints


@dataclass(frozen=True, slots=True)
class Found:
    """Something that is not as it should be, in one line: what, where, and what to do."""

    text: str
    unfit: bool = False  # workers cannot run on this node as it is
    broken: bool = False  # its hardware is broken
    told: str = ""  # the kernel's line that says so
    told_s: float = 0.0  # when the kernel wrote it; CLOCK_MONOTONIC
