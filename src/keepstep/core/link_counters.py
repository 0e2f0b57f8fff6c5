"""The state of one process's NCCL network links, as one look at its link table found it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[Any]  # structured

WINDOW = 65
"""Completions that are kept for each link: the 64 of MegaTrace's equation 1 lie between 65 times."""

FOREIGN = 255
"""Index for communicators that only another process of the node knows, for which this one sends (NCCL's PXN)."""

LINK = np.dtype([
    ("comm", "u1"), ("channel", "u1"), ("send", "?"), ("peer", "i4"),
    ("started", "u8"), ("ready", "u8"), ("posted", "u8"), ("completed", "u8"), ("finished", "u8"),
    ("bytes", "u8"), ("busy_ns", "u8"), ("since_ns", "i8"), ("posted_ns", "i8"), ("completed_ns", "i8"),
    ("moved_ns", "i8"), ("abandoned", "u8"), ("net_posted", "u8"), ("net_completed", "u8"), ("net_bytes", "u8"),
])  # fmt: skip
"""One direction of one channel to one rank of a communicator. The counters count steps: a *started* one got a buffer, a
*ready* one was filled by the GPU (sends), a *posted* one was handed to the network, a *completed* one was sent or has
arrived, a *finished* one was taken by the GPU (receives). *busy_ns*: time with something posted; *since_ns*: when that
time last began. *net_…*: work requests or socket calls, which only special builds of NCCL count. Times are on the
node's CLOCK_MONOTONIC."""

COMPLETION = np.dtype([("time_ns", "i8"), ("bytes", "u4"), ("busy_ns", "u4")])
"""One completed step; ``time_ns`` 0: there is none."""


@dataclass(frozen=True, slots=True)
class CalledOperation:
    """The operation that a communicator was given last."""

    kind: str  # collective, p2p or copy-engine
    function: str
    datatype: str
    algorithm: str
    protocol: str
    seq: int  # number among the calls of this function, as NCCL counts; p2p calls are counted by the plugin
    count: int
    channels: int
    warps: int
    other: int  # the root or the peer
    started_ns: int


@dataclass(frozen=True, slots=True)
class Communicator:
    """One communicator of the process. ``id`` and ``size`` are 0 while unknown (the size always, with NCCL 2.26)."""

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
    last: CalledOperation | None  # None when there was none, or it was being written


@dataclass(frozen=True, slots=True)
class LinkLosses:
    """How much the process could not count since it began."""

    communicators: int
    links: int
    operations: int
    notes: int
    stale: int
    foreign: int  # operations for other processes, which are no loss


@dataclass(frozen=True, slots=True, eq=False)
class LinkSnapshot:
    """One look at a link table.

    ``links``: rows of LINK, one for each link of open communicators. ``windows``: for each link a row of COMPLETION,
    oldest first.
    """

    taken_ns: int
    pid: int  # 0 while no process has used the table
    abi: int  # version of NCCL's profiler interface
    communicators: tuple[Communicator, ...]
    links: Rows
    windows: Rows
    losses: LinkLosses
    unsound: int  # how many rows were left out, as they cannot be right
