"""Messages about who takes part in the job and what it does next: joining, placement, restarts and endings."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from keepstep.core.exit_codes import TemporaryKind
from keepstep.core.incident import Recovery
from keepstep.wire.messages import limits
from keepstep.wire.messages.limits import Message


class Hello(Message, frozen=True):
    """First message on a connection."""

    role: str  # "agent" | "launcher" | "client"
    node: str  # the sender's host name
    node_rank: int  # the sender's node rank; -1: it has none yet
    pid: int
    incarnation: int = 0
    protocol: int = limits.PROTOCOL
    failure_domain: limits.Label = ""  # failure domain of the agent's node
    launcher: int = 0  # process ID of the launcher that started this agent; 0: unknown


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """A launcher that can vote. Its process draws ``token`` when it starts, so a restarted one differs."""

    token: limits.Token
    node: limits.Host
    pid: limits.Count
    address: limits.Host  # a numeric address
    port: limits.Port  # where it listens for other launchers


class Join(Message, frozen=True):
    """A launcher asks to join. Answered by `Placement` once all nodes have joined, or by `Spare`."""

    node: str
    address: str  # where the other nodes reach this one
    nproc: int  # number of ranks it will run
    free_port: int  # currently free on this node; becomes MASTER_PORT if this is node 0
    node_rank: int = -1  # requested node rank; -1: assign in order of joining
    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: limits.Count = 0  # most restarts of the whole job; the same on all nodes
    incarnation: int = -1  # incarnation of the launcher's placement; -1: it is not placed yet
    # software that must be the same on all nodes
    versions: Annotated[tuple[limits.Label, ...], msgspec.Meta(max_length=8)] = ()
    unix_s: float = 0.0  # the launcher's clock when it sent this message; 0: unknown
    # problems that its node's checks found
    checks: Annotated[tuple[limits.Line, ...], msgspec.Meta(max_length=16)] = ()
    hosts_controller: bool = False
    seat: Seat | None = None  # its seat in elections, if it can vote
    machine: limits.Label = ""  # differs between machines, also where they have one name; "": unknown
    # software that should be the same on all nodes; the operator is told where it is not
    alike: Annotated[tuple[limits.Label, ...], msgspec.Meta(max_length=8)] = ()


class Operate(Message, frozen=True):
    """An operator gives an order by hand. Answered by `Operated` once it is done or refused."""

    verb: Literal["start", "stop", "suspend", "resume", "restart", "exchange", "replace", "drain"]
    now: bool = False  # do not wait until a step is sealed
    # the two nodes that exchange their ranks, or the one to replace or drain
    nodes: Annotated[tuple[limits.Line, ...], msgspec.Meta(max_length=2)] = ()
    why: limits.Line = ""  # what the scheduler is to be told of a node that is drained
    only_say: bool = False  # say what would be done, and do nothing


class Sealed(Message, frozen=True):
    """Answer to `Seal`: all ranks of this launcher have sealed ``step``; -1: they cannot, see ``why``."""

    incarnation: int
    step: int
    why: limits.Line = ""


class Failed(Message, frozen=True):
    """Workers of this launcher failed; all nodes should restart. Answered by `Halt` or `Stop`.

    Failures of earlier incarnations are repeated to a new controller, whose restart budgets count them.
    """

    incarnation: int
    exit_code: int
    message: str = ""
    rank: int = -1
    step: int = -1  # number of steps that rank finished; -1: unknown
    unix_s: float = 0.0
    by_keepstep: bool = False  # keepstep ended that process itself


class Halted(Message, frozen=True):
    """Answer to `Halt`: no worker of ``incarnation`` or an earlier one runs here or will be started."""

    incarnation: int
    free_port: int  # becomes MASTER_PORT if this is node 0
    suspended: bool = False  # copied from the `Halt`, so that a new controller knows
    unfit: limits.Line = ""  # why workers should not restart on this node
    rigid: limits.Line = ""  # why its workers cannot run in a job of another size


class Ended(Message, frozen=True):
    """All workers of a launcher have ended. ``exit_code`` is what the launcher will return."""

    node_rank: int
    exit_code: int
    message: str = ""
    incarnation: int = 0
    by_operator: bool = False  # copied from the `Stop`, so that a new controller knows
    kind: TemporaryKind = ""


class Kept(Message, frozen=True):
    """Answer to `Council`: from now on this council, and no older one, counts for this launcher."""

    term: limits.Term
    version: limits.Term


class Recovered(Message, frozen=True):
    """A launcher's ranks are training again after a restart."""

    node_rank: int
    recovery: Recovery


class Bye(Message, frozen=True):
    """The peer leaves on purpose; its silence does not mean that it died."""

    reason: str = ""
    orphaned: bool = False  # an agent leaves because its launcher is gone: the node is lost


class Welcome(Message, frozen=True):
    """Answer to `Hello`."""

    controller_pid: int
    heartbeat_s: float = 1.0
    protocol: int = limits.PROTOCOL
    term: limits.Term = 0  # the controller's term of office; 0: it was not elected


class Placement(Message, frozen=True):
    """The part of the rank table that a launcher needs. Its size does not grow with the job."""

    node_rank: int
    first_rank: int
    world_size: int
    node_count: int
    master_addr: str
    master_port: int
    incarnation: int = 0
    pauses: int = 0  # incarnations that do not count as restarts: ordered by an operator, or never placed


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One launcher of the rank table."""

    node: limits.Host
    pid: limits.Count
    placement: Placement


_Seats = Annotated[tuple[Seat, ...], msgspec.Meta(max_length=limits.MOST_SEATS)]


class Stop(Message, frozen=True):
    """To launchers: end your workers and return ``exit_code``."""

    exit_code: int
    reason: str
    by_operator: bool = False  # nothing is wrong, so a write to storage in progress may finish
    kind: TemporaryKind = ""  # copied from the `Ended`


class Council(Message, frozen=True):
    """To launchers: who elects the controller's host; those also get the rank table. Answered by `Kept`.

    Councils are ordered by term and version. Nothing in ``table`` is sent out as a `Placement`
    before a quorum holds the table (`core.quorum`).
    """

    term: limits.Term
    version: limits.Term
    leader: Seat  # the launcher beside the controller
    port: limits.Port  # where the controller listens, on the leader's node
    seats: _Seats
    former: _Seats = ()  # the previous council, which must also agree until it can no longer act alone
    table: Annotated[tuple[Row, ...], msgspec.Meta(max_length=limits.MOST_TABLE)] = ()
    stop: Stop | None = None  # how the job ends, whoever leads


class Spare(Message, frozen=True):
    """To a launcher: all places are taken. Wait for a vacant one, or for `Stop`."""

    nodes: int  # number of nodes in the job


class Moved(Message, frozen=True):
    """The job's controller is elsewhere: from its host to a later controller where the job began, and on to launchers.

    A controller that has given out places ignores it.
    """

    term: limits.Term
    address: limits.Host
    port: limits.Port


class Halt(Message, frozen=True):
    """To launchers: end your workers of ``incarnation``, answer `Halted`, and wait for the next placement."""

    incarnation: int
    suspend: bool = False  # the next placement comes only when an operator resumes the job
    fresh: bool = False  # an operator wants new processes: none may stay for the next incarnation


class Seal(Message, frozen=True):
    """To launchers: answer `Sealed` as soon as each of your ranks has sealed one more snapshot.

    ``alike``: it must be a snapshot known to be the same on all ranks of the job. ``leave``: your ranks will
    then move to another node. ``warm``: there is time to start warm standbys first.
    """

    incarnation: int
    alike: bool = False
    leave: bool = False
    warm: bool = False


class Kill(Message, frozen=True):
    """To a launcher: end this rank's process, which will not recover by itself, as if it had died.

    ``seen_s``: when the process was last seen to hang, on the monotonic clock of its host.
    """

    rank: limits.Rank
    process: int
    reason: limits.Line
    seen_s: float = 0.0


class Operated(Message, frozen=True):
    """Answer to `Operate`: what was done, or one line that says why not."""

    done: str = ""
    refused: str = ""


class Imports(Message, frozen=True):
    """What workers import before they train: from the first node's launcher to the controller, and on to spares.

    Their standbys import it, too. ``environment``: variables that the script sets before it imports torch.
    """

    modules: Annotated[tuple[limits.Label, ...], msgspec.Meta(max_length=limits.MOST_MODULES)]
    environment: Annotated[tuple[tuple[limits.Label, limits.Line], ...], msgspec.Meta(max_length=64)] = ()


class Renamed(Message, frozen=True):
    """To a launcher: another machine of the job has your node's name. Say Hello again, and join, with this one."""

    node: limits.Host


class Refused(Message, frozen=True):
    """The controller rejects this peer; the reason is for the peer's operator."""

    reason: str
