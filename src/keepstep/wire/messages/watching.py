"""What agents tell of their ranks and networks, by themselves and on request."""

from __future__ import annotations

from typing import Annotated

import msgspec

from keepstep.core.finding import Finding
from keepstep.core.summary import (
    BlockSummary,
    ClockSample,
    Endpoint,
    GroupInfo,
    HostCause,
    IterationSummary,
    OpInFlight,
    PathProbe,
    PeerTraffic,
    RankState,
)
from keepstep.wire.messages.limits import MOST_LOAD_BYTES, Message


class Groups(Message, frozen=True):
    """Process groups that a rank has made since the last such message."""

    rank: int
    groups: tuple[GroupInfo, ...]


class RankBeat(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One rank in a heartbeat."""

    rank: int
    step: int  # last finished step; -1 before the first
    phase: int  # core.events.Phase
    progress: int
    iteration_s: float = 0.0  # last finished iteration; 0 before the first
    self_s: float = 0.0
    idle_s: float = 0.0  # since the last progress
    alive: bool = True
    in_flight: OpInFlight | None = None  # the one entered first
    overdue_s: float = 0.0  # how long it has waited for others, once that is over the usual; else 0


class Heartbeat(Message, frozen=True, gc=False):
    """Once a second from every agent."""

    node_rank: int
    sequence: int
    sent_s: float  # node's CLOCK_MONOTONIC
    ranks: tuple[RankBeat, ...]
    clock: tuple[ClockSample, ...] = ()
    causes: tuple[HostCause, ...] = ()
    dropped: int = 0  # ring records that were dropped or lost so far


class Found(Message, frozen=True):
    """A finding, pushed at once."""

    finding: Finding


class PackedIterations(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Iterations as columns (`wire.packed`): a tenth of the time to read, for jobs of many thousand ranks."""

    rows: bytes
    streams: bytes
    names: tuple[str, ...]


class Profile(Message, frozen=True):
    """Answer to ``ProfileRequest``; ``iterations`` of all local ranks, oldest first, or the same ``packed``."""

    request: int
    node_rank: int
    iterations: tuple[IterationSummary, ...]
    clock: tuple[ClockSample, ...] = ()
    causes: tuple[HostCause, ...] = ()
    traffic: tuple[PeerTraffic, ...] = ()  # around the request's ``onset_step``
    blocks: tuple[BlockSummary, ...] = ()  # of the ranks in the request's ``blocks_of``
    packed: PackedIterations | None = None


class States(Message, frozen=True):
    """Answer to ``StateRequest``."""

    request: int
    node_rank: int
    states: tuple[RankState, ...]
    clock: tuple[ClockSample, ...] = ()
    traffic: tuple[PeerTraffic, ...] = ()  # before and after the latest progress of these ranks


class Reachable(Message, frozen=True):
    """Where this node's agent answers probes; said again when that changes, and to every new controller."""

    node_rank: int
    endpoints: tuple[Endpoint, ...]


class Probed(Message, frozen=True):
    """Answer to ``ProbeRequest``."""

    request: int
    node_rank: int
    probes: tuple[PathProbe, ...]


class ProfileRequest(Message, frozen=True):
    """Send the iteration summaries of steps ``first_step`` to ``last_step`` (both included) that you still have.

    And what your workers sent to whom before and after ``onset_step``, unless that is negative; and of the ranks in
    ``blocks_of`` what they did one after the other, in the newest of these steps. ``packed``: as columns, without clock
    samples, because there are very many of you.
    """

    request: int
    first_step: int
    last_step: int
    onset_step: int = -1
    blocks_of: tuple[int, ...] = ()
    packed: bool = False


class StateRequest(Message, frozen=True):
    """Send where your ranks are now. ``stacks``: with Python stacks where they can be had."""

    request: int
    stacks: bool = False


class ProbeTarget(msgspec.Struct, frozen=True, array_like=True):
    """A node to probe. The agent takes the endpoint to which its workers have connections, else the first."""

    node: str
    endpoints: tuple[Endpoint, ...]


class ProbeRequest(Message, frozen=True):
    """Send a message to each of these nodes' agents and tell what came of it; beyond 16 they are left out.

    ``load_bytes``: of the message, beside its head; at most `MOST_LOAD_BYTES`.
    """

    request: int
    targets: tuple[ProbeTarget, ...]
    load_bytes: Annotated[int, msgspec.Meta(ge=0, le=MOST_LOAD_BYTES)] = 0


class SaveRings(Message, frozen=True):
    """Save the rings of your ranks under the run's folder (they are evidence)."""

    incident: int = 0
