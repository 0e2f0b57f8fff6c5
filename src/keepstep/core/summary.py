"""What agents report about iterations and ranks: sums per (group, operation, peer), never raw events.

Times are seconds on the clock of the node that made them (``CLOCK_MONOTONIC``) unless the name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from keepstep.core.events import HOST_BACKENDS
from keepstep.core.group_names import shown_name
from keepstep.core.launched import Launched

COMMUNICATORS = "nccl-"
"""How the names of NCCL's communicators begin, which the shim gives them."""
SMALL_BYTES = 1024
"""The result of a collective of at most so many bytes is often one that the host waits for: a norm, a loss, a flag."""

STOPPED = ("T", "t")
"""States of Linux processes: stopped by a signal, stopped by a debugger."""


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A process group as its members see it. ``name`` is the same on all members and unique in a job."""

    name: str
    members: tuple[int, ...]  # global ranks, in group order
    backend: str = ""  # "gloo", or by device "cpu:gloo,cuda:nccl"; empty where it is not known
    desc: str = ""
    # The process group whose calls a communicator carries out, by name; empty while that is not known.
    serves: str = ""

    @property
    def shown(self) -> str:
        """The name that users are shown: a communicator's is that of the process group that it serves."""
        return shown_name(self.serves or self.name)

    @property
    def is_communicator(self) -> bool:
        """Whether the NCCL shim has seen it made: it is none of torch's process groups, though it may serve one.

        Where its members do not follow from what one rank knows, each member says which place it has in ``desc``.
        """
        return self.backend == "nccl"

    @property
    def records_waits(self) -> bool:
        """Whether the recorded end of an operation is the end of the transfer, so that waiting for others shows.

        On a device's backend (NCCL) the recorded end is the return of the call that enqueues the operation.
        """
        names = {one.rpartition(":")[2] for one in self.backend.split(",") if one}
        return names <= HOST_BACKENDS


@dataclass(frozen=True, slots=True)
class StreamSummary:
    """All operations of one kind that one rank ran in one iteration on one group (and peer, if point-to-point)."""

    group: str
    op: int  # core.events.Op
    peer: int  # global rank; -1 for collectives
    count: int
    bytes: int  # sum over the operations
    first_seq: int  # sequence number of the first operation in the stream
    start_s: float  # mean start, from the iteration's start
    end_s: float  # mean end, from the iteration's start
    busy_s: float  # sum of end - start
    blocked_s: float  # sum of the time the rank is known to have waited in it
    fastest_s: float  # shortest end - start: that of the last rank to arrive, close to the transfer itself


@dataclass(frozen=True, slots=True)
class IterationSummary:
    """One iteration of one rank.

    ``self_s`` is the time in which the rank waited for nobody: the iteration less the union of its waits (operations
    it was blocked in; operations in flight where blocking cannot be told from overlap) and less evaluation and
    checkpoint. Where ``ahead_s`` is not negative, duration, own time and streams are those of the rank's GPU: it
    waited while communication blocked its compute stream.

    ``between_calls_s`` and ``after_receives_s`` are of the host's calls on a device: from the call of a message's
    receipt to the next call it may have waited, as after a small collective, whose result is read; all other time from
    call to call is between them.
    """

    rank: int
    step: int
    start_s: float
    duration_s: float  # duration without evaluation and checkpoint, as the script's own clock shows it
    self_s: float
    blocked_s: float
    data_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    gc_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    ahead_s: float = (
        -1.0
    )  # how far the host was ahead of its GPU at the end; below 0: all times are the host's
    between_calls_s: float = -1.0  # below 0: not known
    after_receives_s: float = 0.0
    streams: tuple[StreamSummary, ...] = ()


BlockKind = Literal["forward", "backward", "send", "recv"]


@dataclass(frozen=True, slots=True)
class BlockSummary:
    """A forward or backward pass of one micro-batch on one rank, or one message. ``start_s`` is on the node's clock."""

    rank: int
    step: int
    kind: BlockKind
    peer: int  # global rank of a message's other end; -1 for a pass
    index: int  # counts the iteration's blocks of this kind (and peer) from 0
    start_s: float
    duration_s: float
    own_s: float  # duration without the time in which the rank is known to have waited for others


@dataclass(frozen=True, slots=True)
class OpInFlight:
    """An operation that a rank entered and has not left, or left with an error (`RankState.failed`)."""

    group: str
    op: int
    peer: int
    seq: int
    since_s: float
    site: str = ""  # the user's line that led to it, "file:line function"; empty where it is not known
    waits: bool = False  # whether the rank was seen to begin to wait for it
    failed_s: float = field(default=0.0, kw_only=True)  # when it ended with an error; 0: the rank is in it
    repeats: bool = field(default=False, kw_only=True)  # whether the rank's latest iterations had it, too
    bytes: int = field(default=0, kw_only=True)  # compared among members where ``element`` is known
    element: str = field(default="", kw_only=True)  # one of core.events.ELEMENTS
    reduction: str = field(default="", kw_only=True)  # one of core.events.REDUCTIONS
    # How often it was called here before (`core.habits`); of a message in a dump: how many there were with this peer.
    usual: int = field(default=-1, kw_only=True)
    thread: int = field(default=0, kw_only=True)  # id of the thread that entered it; 0: not known
    begun: bool | None = field(default=None, kw_only=True)  # whether the device has begun it; None: not known


@dataclass(frozen=True, slots=True)
class OpEnded:
    """A collective that a rank has left, well or with an error; on a device's backend: has enqueued."""

    seq: int
    op: int
    bytes: int = 0  # this and the others as in `OpInFlight`
    element: str = ""
    reduction: str = ""
    site: str = ""
    usual: int = -1
    failed: bool = False
    thread: int = 0


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """How far one rank is in one stream: how many operations it started and completed."""

    group: str
    op: int  # kind of the operation that was started last
    peer: int
    started: int
    completed: int
    ended: tuple[OpEnded, ...] = ()  # the last collectives that it has left, oldest first


Standstill = Literal["network", "receiver", "sender", "gpu"]


@dataclass(frozen=True, slots=True)
class LinkState:
    """Where NCCL's transfers between a rank and one of its peers stand still (MegaTrace §III-B).

    *network*: the rank sends, and the network completes nothing; *receiver*: the peer takes nothing; *sender*: nothing
    comes from the peer; *gpu*: the rank's own GPU fills, or empties, no buffer.
    """

    peer: int  # global rank
    at: Standstill
    in_flight: int  # steps that the network has not completed
    quiet_s: float  # time since anything moved there


How = Literal["still", "spins", "stopped", "traced", "kernel", "moves", "unread"]


@dataclass(frozen=True, slots=True)
class Stillness:
    """Whether a process that makes no progress does anything else, and since when without a break.

    *still*: its training thread keeps to one place, and neither its threads nor its children do more than waiting
    costs; *spins*: its training thread computes in one function, and nothing else moves; *stopped*: by a signal;
    *traced*: a debugger holds it; *kernel*: it, or a child, waits in the kernel for a device or a file server, or in a
    frozen control group; *moves*: it works on; *unread*: it cannot be read.
    """

    how: How
    since_s: float  # on the node's clock
    why: str = ""  # where the thread is, what moves, or what cannot be read
    until_s: float = 0.0  # when it was looked at last
    awaits_child: bool = False  # still, but its training thread waits for a child process that lives


@dataclass(frozen=True, slots=True)
class DeviceCalls:
    """What a rank has called on groups of a device, and what of it the device has not finished.

    torch's flight recorder tells that. Collectives are numbered as torch numbers them in their group, messages for each
    peer and direction, as in the ring.
    """

    in_flight: tuple[OpInFlight, ...] = ()
    streams: tuple[StreamProgress, ...] = ()
    answered: bool = True  # False: asked, its process said nothing in time, as while something holds it up
    is_whole: bool = (
        True  # False: there are messages that the recorder does not keep, or it does not tell ends
    )


@dataclass(frozen=True, slots=True)
class RankState:
    """Where a rank is now: the evidence for hangs. Times on the node's clock."""

    rank: int
    alive: bool
    step: int
    phase: int  # core.events.Phase
    phase_since_s: float
    progress: int  # a number that grows whenever the rank begins or ends an operation or phase
    last_progress_s: float
    now_s: float
    in_flight: tuple[OpInFlight, ...] = ()
    streams: tuple[StreamProgress, ...] = ()
    process_state: str = ""  # R, S, D, T, Z as in /proc/PID/stat; empty when the process is gone
    stack: str = ""  # Python stack where it can be had
    microbatch: int = -1  # micro-batch of the pass that the rank is in; -1 where that is not known
    unread_bytes: int = 0  # bytes received over TCP that the process has not read for a second or more
    process: int = 0  # process id on the rank's node
    links: tuple[LinkState, ...] = ()  # where its NCCL transfers stand still, as far as they are counted
    stillness: Stillness | None = None  # None: it has made progress lately, or waits for others
    timeout_s: float = 0.0  # longest timeout of a collective among its groups; 0: not known
    pause_s: float = 0.0  # longest pause in this phase that it has ended by itself
    failed: tuple[OpInFlight, ...] = ()  # operations that ended with an error; none ended well after them
    incarnation: int = -1  # incarnation of the rank's process; -1: not known
    left_loop: str = ""  # the loop "file:first-last" of its last operations, if it is out of it, by its stack
    device: DeviceCalls | None = None  # None: it has no groups of a device, or its torch cannot tell
    launched: tuple[Launched, ...] = ()  # by NCCL's RAS, where it was asked, and has answered
    communicators_settled: bool = False  # whether NCCL is known to make and end no communicator in it now


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One completed operation of one rank, picked by the same rule on every member, to compare node clocks with."""

    group: str
    op: int
    peer: int
    seq: int
    rank: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """What a node's workers sent to one address before and after a step, as the kernel or NCCL's proxy counts it.

    ``busy_s`` sums, over the connections, the time with data under way: bytes / busy_s is the speed of the path. Where
    NCCL counts, the addresses are those of ranks (`rank_address`).
    """

    node: str  # the node that sends
    source: str  # the sending node's address
    target: str  # the peer's address
    before_s: float  # length of the time before the step that was looked at
    before_bytes: int  # bytes that the peer acknowledged in that time
    before_busy_s: float
    after_s: float
    after_bytes: int
    after_busy_s: float
    over: Literal["TCP", "NCCL"] = "TCP"


def rank_address(rank: int) -> str:
    """The address of a rank in what NCCL's proxy counts."""
    return f"rank:{rank}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a node's agent answers probes. ``transport`` is ``tcp`` so far; RDMA would be another."""

    address: str
    port: int
    transport: str = "tcp"


@dataclass(frozen=True, slots=True)
class PathProbe:
    """A message from one node's agent to another's, empty or with a load, and its outcome.

    ``outcome``: ``echo`` (it came back), ``silent`` (the host took the connection, its agent did not answer),
    ``refused`` (the host is there, its agent is not), ``timeout`` (nothing came back), ``unreachable`` (no route).
    """

    source: str  # node names
    target: str
    outcome: str
    round_trip_s: float = 0.0  # time to connect or to echo, whichever was shorter
    load_s: float = 0.0  # time until a load had arrived, or for which that was tried at least

    @property
    def arrived(self) -> bool:
        """Whether the target's host gave a sign of life."""
        return self.outcome not in ("timeout", "unreachable")


CPU_CAUSES = frozenset({"cpu quota", "run queue"})
"""Causes that make a host slow: its GPU, as long as the host is ahead of it, is not slow for them."""

LASTING_CAUSES = frozenset({"cpu quota", "GPU clock"})
"""Causes that agents see from outside, and that do not come and go."""


@dataclass(frozen=True, slots=True)
class HostCause:
    """A cause outside the training process that an agent saw for a rank (or its whole node: ``rank`` = -1)."""

    rank: int
    cause: str  # "cpu quota" | "run queue" | "memory pressure" | ...
    share: float  # part of the wall time that was lost to it, 0 to 1
    detail: str = ""
