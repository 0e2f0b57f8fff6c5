"""The messages. One connection per agent or launcher; after the handshake both sides send tagged msgpack structs.

A message never carries raw events. Unknown fields are ignored, so a newer minor version may add some.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from keepstep.core.finding import Finding
from keepstep.core.incident import Recovery
from keepstep.core.microbatches import Split
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
from keepstep.core.validation import RankFigures, RankTests, TransferEndpoint, Validation

PROTOCOL = 2
MOST_HELD_KEYS = 8  # of one rank on one node
MOST_HELD_RANKS = 4096  # of which one node holds snapshots
MOST_NODE_ENDPOINTS = 4
LEAST_HOLD_S, MOST_HOLD_S = 5.0, 20.0  # of a validation
MOST_LABEL = 100  # characters of a failure domain's name
MOST_SEATS = 7  # of a council
MOST_TABLE = 1 << 16  # rows of a rank table: nodes
MOST_REPLICAS = 1 << 14  # of a model
MOST_LOAD_BYTES = 64 << 20  # of a probe

_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
_Ranks = Annotated[tuple[_Rank, ...], msgspec.Meta(max_length=MOST_HELD_RANKS)]
_Key = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]  # `checkpoint.slots.Key`, packed
_NoKey = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]  # 0: none
_Endpoints = Annotated[tuple[Endpoint, ...], msgspec.Meta(max_length=MOST_NODE_ENDPOINTS)]
_Label = Annotated[str, msgspec.Meta(max_length=MOST_LABEL)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Line = Annotated[str, msgspec.Meta(max_length=500)]
Token = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Term = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Port = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Host = Annotated[str, msgspec.Meta(max_length=255)]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=True):
    """Root of everything that crosses a connection after the handshake."""


# --- node to controller -------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a connection."""

    role: str  # "agent" | "launcher" | "client"
    node: str  # host name
    node_rank: int  # -1: not yet given one (a launcher that joins)
    pid: int
    incarnation: int = 0
    protocol: int = PROTOCOL
    failure_domain: _Label = ""  # of an agent's node
    launcher: int = 0  # process that started this agent; 0: not told


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """A launcher that can elect. ``token``: drawn when its process began; one that is started anew is another."""

    token: Token
    node: Host
    pid: _Count
    address: Host  # numeric
    port: Port  # where it listens to other launchers


class Join(Message, frozen=True):
    """A launcher asks to take part: the rendezvous. Answered by ``Placement`` when all nodes are here, or `Spare`."""

    node: str
    address: str  # where the other nodes reach this one
    nproc: int  # ranks that it will run
    free_port: int  # free on this node at the moment: MASTER_PORT if it becomes node 0
    node_rank: int = -1  # wished for; -1: in order of joining
    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: _Count = 0  # of the whole job; the same on all nodes
    incarnation: int = -1  # of the placement it has; -1: none yet
    versions: Annotated[tuple[_Label, ...], msgspec.Meta(max_length=8)] = ()  # of what all nodes have alike
    unix_s: float = 0.0  # its clock as it said this; 0: not told
    checks: Annotated[tuple[_Line, ...], msgspec.Meta(max_length=16)] = ()  # what those of its node found
    hosts_controller: bool = False
    seat: Seat | None = None  # where it can be asked for its vote


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


class HeldRank(msgspec.Struct, frozen=True, array_like=True):
    """How one rank stands to a hold. ``state``: ring.orders.State; ``why`` it is unable."""

    rank: int
    state: int
    endpoint: TransferEndpoint | None = None  # once it is held
    why: str = ""


class Held(Message, frozen=True):
    """Answer to ``Hold``, and told again whenever it changes: all local ranks."""

    number: int
    node_rank: int
    ranks: tuple[HeldRank, ...]


class Measured(Message, frozen=True):
    """The figures of one rank that has run its ``tests`` in hold ``number``."""

    number: int
    tests: int
    node_rank: int
    figures: RankFigures


class RankKeys(msgspec.Struct, frozen=True, array_like=True):
    """The sealed snapshots of a rank that a node holds."""

    rank: _Rank
    keys: Annotated[tuple[_Key, ...], msgspec.Meta(max_length=MOST_HELD_KEYS)]


class Inventory(Message, frozen=True):
    """Everything that a node's cache holds; told again when that changes, and to every new controller.

    ``keep`` and ``first``: what its workers were told to keep when this was looked at (see `BackUp`).
    """

    node_rank: int
    own: Annotated[tuple[RankKeys, ...], msgspec.Meta(max_length=MOST_HELD_RANKS)]
    backups: Annotated[
        tuple[RankKeys, ...], msgspec.Meta(max_length=MOST_HELD_RANKS)
    ]  # of other nodes' ranks
    keep: _NoKey = 0
    first: _NoKey = 0
    able: bool = True  # its ranks have the slots that it takes to be backed up
    endpoints: _Endpoints = ()  # where its agent gives states to others
    trouble: _Line = ""  # why the last backup could not be had
    alike: RankKeys | None = None  # of its own, those that are the same on all ranks of the job


class Locate(Message, frozen=True):
    """Who holds snapshots of these ranks? Answered by `Located`."""

    request: int
    ranks: _Ranks


class Validate(Message, frozen=True):
    """An operator asks for a validation of these ranks, or of all. Answered by ``Validated``.

    ``hold_s``: how long the job may be held.
    """

    ranks: tuple[int, ...] = ()
    hold_s: Annotated[float, msgspec.Meta(ge=LEAST_HOLD_S, le=MOST_HOLD_S)] = LEAST_HOLD_S


class Operate(Message, frozen=True):
    """An operator orders something by hand. Answered by ``Operated`` when it is done, or refused."""

    verb: Literal["start", "stop", "suspend", "resume", "restart", "exchange", "replace"]
    now: bool = False  # do not wait until a step is sealed
    nodes: Annotated[
        tuple[_Line, ...], msgspec.Meta(max_length=2)
    ] = ()  # names of those that exchange their ranks, or is replaced


class Sealed(Message, frozen=True):
    """Answer to ``Seal``: all ranks of this launcher have sealed ``step`` since; -1: they seal none, and ``why``."""

    incarnation: int
    step: int
    why: _Line = ""


class Failed(Message, frozen=True):
    """Workers of this launcher failed: let all nodes begin again. Answered by ``Halt`` or ``Stop``.

    Those of earlier incarnations are said again to a new controller, for its budgets.
    """

    incarnation: int
    exit_code: int
    message: str = ""
    rank: int = -1
    step: int = -1  # finished steps of that rank; -1: not known
    unix_s: float = 0.0
    by_keepstep: bool = False  # keepstep ended that process itself


class Halted(Message, frozen=True):
    """No worker of ``incarnation`` or an earlier one runs here, and none will be started. Answer to ``Halt``."""

    incarnation: int
    free_port: int  # MASTER_PORT if this becomes node 0
    suspended: bool = False  # as the ``Halt`` was; for a new controller
    unfit: _Line = ""  # why workers should not begin again on this node
    rigid: _Line = ""  # why they cannot in a job of another size


class Ended(Message, frozen=True):
    """A launcher's workers have all ended. ``exit_code`` as the launcher will return it."""

    node_rank: int
    exit_code: int
    message: str = ""
    incarnation: int = 0
    by_operator: bool = False  # as the ``Stop`` was; for a new controller


class Kept(Message, frozen=True):
    """Answer to `Council`: this one and none older counts for this launcher from now on."""

    term: Term
    version: Term


class Recovered(Message, frozen=True):
    """A launcher's ranks train again after a restart."""

    node_rank: int
    recovery: Recovery


class Bye(Message, frozen=True):
    """The peer goes on purpose; its silence is no sign of death."""

    reason: str = ""
    orphaned: bool = False  # an agent goes because its launcher is gone: the node is lost


# --- controller to node -------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Answer to ``Hello``."""

    controller_pid: int
    heartbeat_s: float = 1.0
    protocol: int = PROTOCOL
    term: Term = 0  # of the controller; 0: elected by nobody


class Placement(Message, frozen=True):
    """The rank table, as far as a launcher needs it to start its workers. Its size is that of no job."""

    node_rank: int
    first_rank: int
    world_size: int
    node_count: int
    master_addr: str
    master_port: int
    incarnation: int = 0
    pauses: int = 0  # incarnations that are no restarts: an operator ordered them, or they were never placed


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One launcher of the rank table."""

    node: Host
    pid: _Count
    placement: Placement


_Seats = Annotated[tuple[Seat, ...], msgspec.Meta(max_length=MOST_SEATS)]


class Stop(Message, frozen=True):
    """To launchers: end your workers and return ``exit_code``."""

    exit_code: int
    reason: str
    by_operator: bool = False  # nothing is wrong: what is on its way to storage may get there


class Council(Message, frozen=True):
    """To launchers: who elects the host of the controller, and to those the rank table. Answered by `Kept`.

    Ordered by term and version. Nothing of the table is given out before a quorum has it (`core.quorum`).
    """

    term: Term
    version: Term
    leader: Seat  # the launcher beside the controller
    port: Port  # of the controller, on the leader's address
    seats: _Seats
    former: _Seats = ()  # that have to agree too, until it is known that they cannot act alone any more
    table: Annotated[tuple[Row, ...], msgspec.Meta(max_length=MOST_TABLE)] = ()
    stop: Stop | None = None  # the job ends with this, under whatever leader


class Spare(Message, frozen=True):
    """To a launcher: all places are taken. It waits for one that becomes vacant, or for ``Stop``."""

    nodes: int  # that play


class Halt(Message, frozen=True):
    """To launchers: end your workers of ``incarnation``, say `Halted`, and wait for the next placement."""

    incarnation: int
    suspend: bool = False  # which comes when an operator resumes the job
    fresh: bool = False  # an operator wants other processes: none goes on with the next one


class Seal(Message, frozen=True):
    """To launchers: say `Sealed` as soon as each of your ranks has sealed one more snapshot.

    ``alike``: one that is known to be the same on all ranks of the job. ``leave``: your ranks are to play
    on another node then. ``warm``: there is time to have warm standbys before.
    """

    incarnation: int
    alike: bool = False
    leave: bool = False
    warm: bool = False


class Kill(Message, frozen=True):
    """To a launcher: end this process of a rank, which will not go on by itself, as if it had died."""

    rank: _Rank
    process: int
    reason: _Line


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


class Hold(Message, frozen=True):
    """Hold your ranks at the end of ``step`` for as long as this is repeated: each renews the lease by ``lease_s``."""

    number: int
    step: int
    lease_s: float


class RunTests(Message, frozen=True):
    """Let held ranks run these tests. ``tests``: their number, unique like the hold's."""

    number: int
    tests: int
    ranks: tuple[RankTests, ...]


class Release(Message, frozen=True):
    """Hold ``number`` is over: go on."""

    number: int


class Splits(Message, frozen=True):
    """How ranks of a node divide micro-batches: told when it has changed."""

    node_rank: int
    ranks: Annotated[tuple[Split, ...], msgspec.Meta(max_length=MOST_HELD_RANKS)]


class Shares(Message, frozen=True):
    """Micro-batches of each replica, for the job's first rank, which tells the others. Numbers of a run only grow."""

    number: int
    rank: _Rank
    incarnation: int
    shares: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MOST_REPLICAS)]


class Pull(msgspec.Struct, frozen=True, array_like=True):
    """Ranks whose states of the target are to be brought, and where nodes that have them give them, the best first."""

    ranks: _Ranks
    endpoints: Annotated[tuple[_Endpoints, ...], msgspec.Meta(max_length=MOST_NODE_ENDPOINTS)]


class BackUp(Message, frozen=True):
    """What a node has to do so that the job's snapshots survive a node's loss. Holds until the next such message."""

    keep: _NoKey = 0  # backed up everywhere: nobody gives it up
    first: _NoKey = 0  # workers keep their oldest snapshot from this one on: it may be the next target
    target: _NoKey = 0  # to be backed up now
    pulls: Annotated[tuple[Pull, ...], msgspec.Meta(max_length=MOST_HELD_RANKS)] = ()
    ranks: _Ranks = ()  # of other nodes, whose backups belong on this node
    settled: bool = False  # ``keep`` is where it belongs: backups of other ranks can go


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A node that holds snapshots of a rank, as its ``own`` or as a backup.

    Of another rank than the one asked for: they are the same on all ranks of the job.
    """

    rank: _Rank
    node_rank: int
    node: str
    own: bool
    keys: Annotated[tuple[_Key, ...], msgspec.Meta(max_length=2 * MOST_HELD_KEYS)]
    endpoints: _Endpoints


class Located(Message, frozen=True):
    """Answer to `Locate`. ``waits``: nobody knows yet, and why; ask again."""

    request: int
    holders: Annotated[tuple[Holder, ...], msgspec.Meta(max_length=8 * MOST_HELD_RANKS)] = ()
    waits: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Validated(Message, frozen=True):
    """Answer to ``Validate``: the outcome, or in one line why there is none."""

    outcome: Validation | None = None
    nodes: tuple[tuple[int, str], ...] = ()  # node name by rank, of the ranks that were tested
    refused: str = ""


class Operated(Message, frozen=True):
    """Answer to ``Operate``: what was done, or in one line why not."""

    done: str = ""
    refused: str = ""


class SaveRings(Message, frozen=True):
    """Save the rings of your ranks under the run's folder (they are evidence)."""

    incident: int = 0


class Refused(Message, frozen=True):
    """The controller will not have this peer; the reason is for its operator."""

    reason: str


AgentMessage = (
    Hello
    | Groups
    | Heartbeat
    | Found
    | Profile
    | States
    | Reachable
    | Probed
    | Held
    | Measured
    | Splits
    | Inventory
    | Locate
    | Bye
)
LauncherMessage = Hello | Join | Found | Recovered | Failed | Halted | Sealed | Kept | Ended | Bye
ClientMessage = Hello | Validate | Operate | Bye
ToController = AgentMessage | LauncherMessage | ClientMessage
ToNode = (
    Welcome
    | Placement
    | Council
    | Spare
    | Halt
    | Seal
    | Kill
    | ProfileRequest
    | StateRequest
    | ProbeRequest
    | Hold
    | RunTests
    | Release
    | Shares
    | BackUp
    | Located
    | Validated
    | Operated
    | SaveRings
    | Stop
    | Refused
)
