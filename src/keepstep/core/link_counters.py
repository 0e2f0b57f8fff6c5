"""What one process has under way on NCCL's network links, as one look at its link table found it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[Any]  # structured

WINDOW = 65
"""Completions kept of a link: the 64 of MegaTrace's equation 1 lie between 65 times."""

FOREIGN = 255
"""Communicator of what is sent or received for another process of the node (NCCL's PXN), which alone knows it."""

LINK = np.dtype([
    ("comm", "u1"), ("channel", "u1"), ("send", "?"), ("peer", "i4"),
    ("started", "u8"), ("ready", "u8"), ("posted", "u8"), ("completed", "u8"), ("finished", "u8"),
    ("bytes", "u8"), ("busy_ns", "u8"), ("since_ns", "i8"), ("posted_ns", "i8"), ("completed_ns", "i8"),
    ("moved_ns", "i8"), ("abandoned", "u8"), ("net_posted", "u8"), ("net_completed", "u8"), ("net_bytes", "u8"),
])  # fmt: skip
"""One direction of one channel to one rank of a communicator. Steps *started* got a buffer; *ready* (sends) the GPU
filled it; *posted* it was handed to the network; *completed* it was sent, or arrived; *finished* (receives) the GPU
took it. *busy_ns*: time with something posted; *since_ns*: when something last was after nothing was. *net_…*: work
requests or socket calls, which only NCCL builds of one's own tell of. Times are on the node's CLOCK_MONOTONIC."""

COMPLETION = np.dtype([("time_ns", "i8"), ("bytes", "u4"), ("busy_ns", "u4")])
"""One completed step; ``time_ns`` 0: none."""


@dataclass(frozen=True, slots=True)
class CalledOperation:
    """The last operation that a communicator was given."""

    kind: str  # collective, p2p or copy-engine
    function: str
    datatype: str
    algorithm: str
    protocol: str
    seq: int  # NCCL counts each function by itself; p2p: counted here
    count: int
    channels: int
    warps: int
    other: int  # root or peer
    started_ns: int


@dataclass(frozen=True, slots=True)
class Communicator:
    """One communicator of the process. ``id`` and ``size`` 0: not known (yet; NCCL 2.26 never tells the size)."""

    index: int
    generation: int
    is_open: bool  # neither finalised nor aborted
    id: int
    name: str
    rank: int
    size: int
    nodes: int
    opened_ns: int
    closed_ns: int
    collectives: int
    p2ps: int
    enqueued: int
    kernels: int
    kernel_ns: int
    last: CalledOperation | None  # None: none, or torn


@dataclass(frozen=True, slots=True)
class LinkLosses:
    """What the process could not count, since it began."""

    communicators: int
    links: int
    operations: int
    notes: int
    stale: int
    foreign: int  # no loss: operations for other processes


@dataclass(frozen=True, slots=True, eq=False)
class LinkSnapshot:
    """One look. ``links``: LINK, of open communicators; ``windows``: COMPLETION, a row for each link, oldest first."""

    taken_ns: int
    pid: int  # 0: no process has come yet
    abi: int  # version of NCCL's profiler interface
    communicators: tuple[Communicator, ...]
    links: Rows
    windows: Rows
    losses: LinkLosses
    unsound: int  # rows that cannot be right, left out
