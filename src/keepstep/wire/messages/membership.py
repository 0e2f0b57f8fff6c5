"""Who takes part and what the job does next: joining, placing, electing, ending and restarting."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from keepstep.core.incident import Recovery
from keepstep.wire.messages.limits import (
    MOST_SEATS,
    MOST_TABLE,
    PROTOCOL,
    Count,
    Host,
    Label,
    Line,
    Message,
    Port,
    Rank,
    Term,
    Token,
)


class Hello(Message, frozen=True):
    """First message of a connection."""

    role: str  # "agent" | "launcher" | "client"
    node: str  # host name
    node_rank: int  # -1: not yet given one (a launcher that joins)
    pid: int
    incarnation: int = 0
    protocol: int = PROTOCOL
    failure_domain: Label = ""  # of an agent's node
    launcher: int = 0  # process that started this agent; 0: not told


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """A launcher that can elect. ``token``: drawn when its process began; one that is started anew is another."""

    token: Token
    node: Host
    pid: Count
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
    max_restarts: Count = 0  # of the whole job; the same on all nodes
    incarnation: int = -1  # of the placement it has; -1: none yet
    versions: Annotated[tuple[Label, ...], msgspec.Meta(max_length=8)] = ()  # of what all nodes have alike
    unix_s: float = 0.0  # its clock as it said this; 0: not told
    checks: Annotated[tuple[Line, ...], msgspec.Meta(max_length=16)] = ()  # what those of its node found
    hosts_controller: bool = False
    seat: Seat | None = None  # where it can be asked for its vote


class Operate(Message, frozen=True):
    """An operator orders something by hand. Answered by ``Operated`` when it is done, or refused."""

    verb: Literal["start", "stop", "suspend", "resume", "restart", "exchange", "replace"]
    now: bool = False  # do not wait until a step is sealed
    nodes: Annotated[
        tuple[Line, ...], msgspec.Meta(max_length=2)
    ] = ()  # names of those that exchange their ranks, or is replaced


class Sealed(Message, frozen=True):
    """Answer to ``Seal``: all ranks of this launcher have sealed ``step`` since; -1: they seal none, and ``why``."""

    incarnation: int
    step: int
    why: Line = ""


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
    unfit: Line = ""  # why workers should not begin again on this node
    rigid: Line = ""  # why they cannot in a job of another size


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
    pid: Count
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

    rank: Rank
    process: int
    reason: Line


class Operated(Message, frozen=True):
    """Answer to ``Operate``: what was done, or in one line why not."""

    done: str = ""
    refused: str = ""


class Refused(Message, frozen=True):
    """The controller will not have this peer; the reason is for its operator."""

    reason: str
