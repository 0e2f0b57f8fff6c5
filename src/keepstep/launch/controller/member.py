"""This launcher's part in a job of several nodes: what the controller ordered last, and what it has to be told.

Pure: no connection, no clock. Everything is kept as the newest state and not as a queue, so that orders that are read
together, repeated, or meant for an incarnation that is over do no harm.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from msgspec import structs

from keepstep import wire
from keepstep.core.finding import Finding
from keepstep.core.incident import Recovery
from keepstep.launch.controller.lease import Elector

_MOST_FAILURES = 64
_MOST_TEXT = 500
LEASE_S = 30.0  # cut off from the controller for so long: others may have our place

_UNANSWERED = frozenset(
    (
        errno.EADDRNOTAVAIL,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ETIMEDOUT,
    )
)


class Member:
    """See the module. ``free_port``: a port of this node that nobody listens on."""

    def __init__(
        self,
        join: wire.Join,
        pid: int,
        free_port: Callable[[], int],
        unix_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._join = join
        self._pid = pid
        self._free_port = free_port
        self._unix_s = unix_s
        self._unfit = self._rigid = ""
        self._halt = -1  # incarnation up to which nothing may run here
        self._halted = -1  # and up to which nothing does
        self._running = -1
        self._findings: list[Finding] = []
        self._failures: dict[
            int, wire.Failed
        ] = {}  # of this node, by incarnation, for the budgets of a new controller
        self._ended: wire.Ended | None = None
        self._alone_since_s: float | None = None  # since when the controller's host has not answered
        self._away_since_s: float | None = None  # since when there is no connection
        self.placement: wire.Placement | None = None
        self.stop: wire.Stop | None = None
        self.kills: list[wire.Kill] = []  # that nobody has carried out yet
        self.seal: wire.Seal | None = None  # the same
        self._suspended = False
        self.begins_fresh = False  # no process of the incarnation that ends is to play in the next
        self.refusal = ""
        self.is_spare = False
        self.elector: Elector | None = None  # where the controller can move to another node
        self.is_void = False  # the controller that is there has been replaced by another one

    def vote(self, seat: wire.Seat, elector: Elector | None) -> None:
        """Take part in elections."""
        self._join, self.elector = structs.replace(self._join, seat=seat), elector

    @property
    def incarnation(self) -> int:
        """Of the newest placement; -1 without one."""
        return self.placement.incarnation if self.placement is not None else -1

    @property
    def runs(self) -> bool:
        """Whether workers run here."""
        return self._running > self._halted

    @property
    def begins_again(self) -> bool:
        """Whether all nodes begin again together after a failure."""
        return self._join.max_restarts > 0

    @property
    def to_run(self) -> wire.Placement | None:
        """The placement whose workers are to be started now."""
        placement = self.placement
        if placement is None or self.stop is not None:
            return None
        return placement if placement.incarnation > max(self._halt, self._halted, self._running) else None

    @property
    def must_halt(self) -> bool:
        """Whether workers run here that are to be ended."""
        return self.runs and max(self._halt, self.incarnation - 1) >= self._running

    def greet(self) -> list[wire.Message]:
        """What a controller that knows nothing has to hear, in this order."""
        node_rank = self.placement.node_rank if self.placement is not None else -1
        join = structs.replace(self._join, unix_s=self._unix_s())
        if self.placement is not None:
            join = structs.replace(join, node_rank=node_rank, incarnation=self.incarnation)
        if self.elector is not None and self.elector.council is not None:
            join = structs.replace(join, hosts_controller=self.elector.leads > 0)
        said: list[wire.Message] = [
            wire.Hello("launcher", join.node, node_rank, self._pid, max(self.incarnation, 0)),
            join,
            *(wire.Found(finding) for finding in self._findings),
        ]
        said += [*self._failures.values(), *([self._ended] if self._ended is not None else [])]
        if self._halted >= max(self.incarnation, 0):
            said.append(self._said_halted())
        return said

    def received(self, message: wire.Message) -> list[wire.Message]:
        """An order; what is to be answered at once."""
        if isinstance(message, wire.Welcome):
            self.is_void = self.elector is not None and message.term < self.elector.term
        if self.is_void:
            return []
        if isinstance(message, wire.Placement):
            if message.incarnation > self.incarnation:
                self.placement, self.is_spare, self._suspended = message, False, False
                self._unfit = ""
                self.begins_fresh = False
                self._findings, self._ended = [], None
        elif isinstance(message, wire.Halt):
            self._halt = max(self._halt, message.incarnation)
            self._suspended, self.begins_fresh = message.suspend, message.suspend or message.fresh
            if message.incarnation >= self.incarnation and self._running <= self._halted:
                return self.halted()
        elif isinstance(message, wire.Seal):
            self.seal = message
        elif isinstance(message, wire.Kill):
            self.kills.append(message)
        elif isinstance(message, wire.Spare):
            self.is_spare = True
        elif isinstance(message, wire.Stop):
            self.stop = message
        elif isinstance(message, wire.Refused) and self.placement is None:
            self.refusal = message.reason
        return []

    def place(self, placement: wire.Placement) -> None:
        """The place is known without asking (one node)."""
        self.placement, self._running = placement, placement.incarnation

    def started(self) -> None:
        """Workers of the newest placement run."""
        self._running, self._rigid = self.incarnation, ""

    def found(self, finding: Finding) -> list[wire.Message]:
        """Told at once, and again to a controller that is started anew."""
        self._findings.append(finding)
        return [wire.Found(finding)]

    def recovered(self, recovery: Recovery) -> list[wire.Message]:
        """All ranks of this node train again after a restart."""
        self._findings = [one for one in self._findings if one.incarnation >= recovery.incarnation]
        node_rank = self.placement.node_rank if self.placement is not None else -1
        return [wire.Recovered(node_rank, recovery)]

    def failed(
        self,
        exit_code: int,
        text: str,
        rank: int = -1,
        step: int = -1,
        unix_s: float = 0.0,
        by_keepstep: bool = False,
    ) -> list[wire.Message]:
        """A worker of this incarnation failed; or, said once more, the one that was to blame."""
        failed = wire.Failed(self.incarnation, exit_code, text, rank, step, unix_s, by_keepstep)
        self._failures[self.incarnation] = failed
        if len(self._failures) > _MOST_FAILURES:
            del self._failures[min(self._failures)]
        return [failed]

    def _said_halted(self) -> wire.Halted:
        return wire.Halted(self._halted, self._free_port(), self._suspended, self._unfit, self._rigid)

    def halted(self, unfit: str = "", rigid: str = "") -> list[wire.Message]:
        """None of ours runs any more, by order or because we ended them by ourselves.

        ``unfit``: why workers should not begin again on this node. ``rigid``: why they cannot in a job of another size.
        """
        self._unfit = self._unfit or unfit[:_MOST_TEXT]
        self._rigid = self._rigid or rigid[:_MOST_TEXT]
        self._halted = max(self._halted, self._halt, self._running)
        self._halt, self._ended = self._halted, None
        return [self._said_halted()]

    def ended(self, exit_code: int, text: str) -> list[wire.Message]:
        """This node's workers have ended, and it begins them again only by order; a spare just goes."""
        by_operator = self.stop is not None and self.stop.by_operator
        if self.placement is None and self.is_spare:
            return [wire.Bye(text)]
        node_rank = self.placement.node_rank if self.placement is not None else -1
        self._ended = wire.Ended(node_rank, exit_code, text, max(self.incarnation, 0), by_operator)
        return [self._ended]

    # The connection.

    def connected(self) -> None:
        """The controller is there."""
        self._alone_since_s = self._away_since_s = None

    def disconnected(self, now_s: float) -> None:
        """It is not."""
        if not self.is_void or self._away_since_s is None:  # one that was replaced has never been there
            self._alone_since_s = self._away_since_s = now_s
        self.is_void = False

    def trouble(self, error: Exception, now_s: float) -> None:
        """An attempt failed."""
        silence = isinstance(error, OSError) and error.errno in _UNANSWERED
        silence = silence or (isinstance(error, wire.Violation) and error.reason == "handshake-timeout")
        if self._away_since_s is not None and not silence and self.elector is None:
            self._alone_since_s = now_s  # its host answers: the controller alone is away

    def led(self, now_s: float) -> None:
        """The launcher beside the controller has the lease: nobody else gives our place away."""
        if self._away_since_s is not None:
            self._alone_since_s = now_s

    def away_s(self, now_s: float) -> float:
        """How long there has been no connection, or for one beside us no lease: it can order nothing."""
        if self._away_since_s is not None:
            return now_s - self._away_since_s
        return self.elector.idle_s(now_s) if self.elector is not None else 0.0

    @property
    def missing(self) -> str:
        """What a node that is cut off lacks."""
        if self.elector is not None and self.elector.leads:
            return "no majority of the nodes that elect answers the controller's node"
        return "no way to the controller"

    def is_cut_off(self, now_s: float) -> bool:
        """Whether we may have been replaced, so that our workers have to end.

        Not when its host answers that no controller is there: then nobody gives our place to others, and training does
        not wait for a controller. Where the controller can move, it is its lease that has to stand, ours too.
        """
        if not self.begins_again:
            return False
        if self.elector is not None and self.elector.leads:
            return self.elector.idle_s(now_s) >= LEASE_S
        return self.is_alone(now_s)

    def is_alone(self, now_s: float) -> bool:
        """Whether nothing has come from the controller's host for some time, not even that no controller is there."""
        return self._alone_since_s is not None and now_s - self._alone_since_s >= LEASE_S
