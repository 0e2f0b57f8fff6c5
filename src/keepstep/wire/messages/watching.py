"""Messages in which agents report about their ranks and the network, and the requests for such reports."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from keepstep.core.finding import Finding
from keepstep.core.port_counters import PortTraffic
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
from keepstep.wire.messages.limits import MOST_NOTICES, MOST_PATHS, MOST_SAID, Line, LoadBytes, Message

Address = Annotated[str, msgspec.Meta(max_length=64)]
Ports = Annotated[tuple[PortTraffic, ...], msgspec.Meta(max_length=64)]


class Groups(Message, frozen=True):
    """Process groups that a rank has created since the last such message."""

    rank: int
    groups: tuple[GroupInfo, ...]


class RankBeat(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One rank in a heartbeat."""

    rank: int
    step: int  # last finished step; -1 before the first
    phase: int  # a `core.events.Phase`
    progress: int
    iteration_s: float = 0.0  # duration of the last finished iteration; 0 before the first
    self_s: float = 0.0
    idle_s: float = 0.0  # time since the last progress
    alive: bool = True
    in_flight: OpInFlight | None = None  # the operation in flight; of several, the one entered first
    overdue_s: float = 0.0  # how long it has waited for others, if longer than usual; else 0
    watched: bool = True  # False: it is known that its process writes no ring


class PathRate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a node's workers lately sent from one address to another; of ranks where NCCL counts (`rank_address`)."""

    source: Address
    target: Address
    over: Literal["TCP", "NCCL"]
    bytes: float
    busy_s: float  # time with something under way, summed over the connections
    usual_bytes_per_s: float = 0.0  # bytes / busy_s in the run before; 0: not known
    retransmits_per_s: float = 0.0


class KeptSteps(msgspec.Struct, frozen=True, array_like=True):
    """The newest steps that are kept of all ranks of a node; -1: none."""

    sealed: int = -1  # in the node's memory
    stored: int = -1  # on storage
    troubles: Annotated[tuple[Line, ...], msgspec.Meta(max_length=MOST_NOTICES)] = ()  # why steps are not


class Heartbeat(Message, frozen=True, gc=False):
    """Sent once a second by every agent."""

    node_rank: int
    sequence: int
    sent_s: float  # when it was sent, by the node's CLOCK_MONOTONIC
    ranks: tuple[RankBeat, ...]
    clock: tuple[ClockSample, ...] = ()
    causes: tuple[HostCause, ...] = ()
    dropped: int = 0  # ring records dropped or lost so far
    # what is not watched or not written on this node at present, and why
    notices: Annotated[tuple[Line, ...], msgspec.Meta(max_length=MOST_NOTICES)] = ()
    # Every ten seconds, what was sent in them; the busiest paths, and one of each address of the node.
    paths: Annotated[tuple[PathRate, ...], msgspec.Meta(max_length=MOST_PATHS)] = ()
    kept: KeptSteps | None = None  # when that has changed


class Found(Message, frozen=True):
    """A finding, sent as soon as it is made."""

    finding: Finding


class Said(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A line that tells of a failure, and who said it; the fields mean what those of `core.told.Told` mean."""

    rank: int  # -1: the node's kernel
    row: Line  # the name of the table's row that it matches
    line: Line  # without secrets
    source: Line  # the log's name
    number: Annotated[int, msgspec.Meta(ge=0)]
    unix_s: float  # when it was written; where that is not known, when it was read
    block: int = 0
    begins: Annotated[int, msgspec.Meta(ge=0)] = 0
    warned: bool = False
    places: Annotated[dict[Line, Line], msgspec.Meta(max_length=8)] = {}


class Words(Message, frozen=True):
    """What the ranks of this node and its kernel have said of a failure since the last such message."""

    node_rank: int
    lines: Annotated[tuple[Said, ...], msgspec.Meta(max_length=MOST_SAID)]
    # The incarnation of the ranks that wrote the lines, whenever these were read; -1: not known, as from a launcher.
    incarnation: int = -1


class PackedIterations(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Iterations as columns (`wire.packed`), ten times faster to read: for jobs of many thousand ranks."""

    rows: bytes
    streams: bytes
    names: tuple[str, ...]


class Profile(Message, frozen=True):
    """Answer to `ProfileRequest`: ``iterations`` of all local ranks, oldest first, or the same ``packed``."""

    request: int
    node_rank: int
    iterations: tuple[IterationSummary, ...]
    clock: tuple[ClockSample, ...] = ()
    causes: tuple[HostCause, ...] = ()
    traffic: tuple[PeerTraffic, ...] = ()  # network traffic around the request's ``onset_step``
    blocks: tuple[BlockSummary, ...] = ()  # blocks of the ranks in the request's ``blocks_of``
    packed: PackedIterations | None = None
    ports: Ports = ()  # counters of ports around the request's ``onset_step``


class States(Message, frozen=True):
    """Answer to `StateRequest`."""

    request: int
    node_rank: int
    states: tuple[RankState, ...]
    clock: tuple[ClockSample, ...] = ()
    traffic: tuple[PeerTraffic, ...] = ()  # network traffic before and after these ranks' latest progress
    ports: Ports = ()  # counters of ports before and after it


class Reachable(Message, frozen=True):
    """Where this node's agent answers probes. Repeated when that changes, and to every new controller."""

    node_rank: int
    endpoints: tuple[Endpoint, ...]


class Probed(Message, frozen=True):
    """Answer to `ProbeRequest`."""

    request: int
    node_rank: int
    probes: tuple[PathProbe, ...]


class ProfileRequest(Message, frozen=True):
    """Send the iteration summaries you still have of steps ``first_step`` to ``last_step`` (inclusive).

    Unless ``onset_step`` is negative, add what your workers sent to whom before and after it. For the ranks
    in ``blocks_of``, add what they did, in order, in the newest of these steps. ``packed``: send columns and
    leave out clock samples, because the job has very many ranks.
    """

    request: int
    first_step: int
    last_step: int
    onset_step: int = -1
    blocks_of: tuple[int, ...] = ()
    packed: bool = False


class StateRequest(Message, frozen=True):
    """Report where your ranks are now.

    ``stacks``: include Python stacks where they can be read; ``launched``: and what NCCL's RAS tells of the ranks;
    ``devices``: and what torch's flight recorder tells of their GPUs, which costs each rank 50 ms of CPU time.
    """

    request: int
    stacks: bool = False
    launched: bool = False
    devices: bool = True


class ProbeTarget(msgspec.Struct, frozen=True, array_like=True):
    """A node to probe. The agent uses the endpoint to which its workers are connected, else the first."""

    node: str
    endpoints: tuple[Endpoint, ...]


class ProbeRequest(Message, frozen=True):
    """Send a message to each of these nodes' agents and report the outcome. Targets beyond 16 are ignored.

    ``load_bytes``: size of the message without its header, at most `MOST_LOAD_BYTES`.
    """

    request: int
    targets: tuple[ProbeTarget, ...]
    load_bytes: LoadBytes = 0


class SaveRings(Message, frozen=True):
    """Save your ranks' rings in the run's folder, as evidence."""

    incident: int = 0
