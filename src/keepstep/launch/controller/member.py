"""This launcher's part in a job: what the controller ordered last, and what it has to be told.

Pure: no connection, no clock. Kept is the newest state and no queue, so that orders do no harm that are read together,
repeated, or meant for an incarnation that is over.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from msgspec import structs

from keepstep import wire
from keepstep.core.exit_codes import TemporaryKind
from keepstep.core.finding import Finding
from keepstep.core.incident import Recovery
from keepstep.core.told import KERNEL_SOURCES
from keepstep.launch.controller.lease import Elector

_MOST_FAILURES = 64
_MOST_TEXT = 500
LEASE_S = 30.0  # seconds without the controller after which another node may have this one's place

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
"""Errors of a connection that say nothing about whether its host lives."""


class Member:
    """What this launcher was ordered and has told."""

    def __init__(
        self,
        join: wire.Join,
        pid: int,
        free_port: Callable[[], int],
        unix_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``free_port``: finds a port of this node on which no process listens."""
        self._join, self._pid = join, pid
        self._free_port, self._unix_s = free_port, unix_s
        self._unfit = self._rigid = ""
        self._halt = -1  # incarnation up to which nothing may run here
        self._halted = -1  # incarnation up to which nothing runs here
        self._running = -1  # the newest incarnation whose workers were started
        self._findings: list[Finding] = []
        # What a new controller needs for its budgets, by incarnation.
        self._failures: dict[int, wire.Failed] = {}
        self._ended: wire.Ended | None = None
        self._imported: wire.Imports | None = None  # what this node's workers import, for spares
        self._alone_since_s: float | None = None  # since when the controller's host has not answered
        self._away_since_s: float | None = None  # since when there is no connection
        self._suspended = False
        self.placement: wire.Placement | None = None  # the newest place in the rank table
        self.stop: wire.Stop | None = None  # the order to end the job
        self.kills: list[wire.Kill] = []  # orders to end a worker that hangs, not carried out yet
        self.seal: wire.Seal | None = None  # the order to tell the next sealed step, not carried out yet
        self.begins_fresh = False  # no process of the incarnation that ends is to play in the next
        self.refusal = ""  # why the controller does not let this launcher join
        self.is_spare = False  # this launcher waits for a place
        self.imports: wire.Imports | None = None  # what standbys of a spare are to import
        self.elector: Elector | None = None  # its vote, where the controller can move to another node
        self.is_void = False  # the connected controller has been replaced by a newer one

    def vote(self, seat: wire.Seat, elector: Elector | None) -> None:
        """Take part in elections from now on."""
        self._join, self.elector = structs.replace(self._join, seat=seat), elector

    @property
    def incarnation(self) -> int:
        """The incarnation of the newest placement; -1 without one."""
        return self.placement.incarnation if self.placement is not None else -1

    @property
    def node(self) -> str:
        """The name by which the job knows this node."""
        return self._join.node

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
        """The messages to a controller that has just been connected, in this order."""
        node_rank = self.placement.node_rank if self.placement is not None else -1
        join = structs.replace(self._join, unix_s=self._unix_s())
        if self.placement is not None:
            join = structs.replace(join, node_rank=node_rank, incarnation=self.incarnation)
        if self.elector is not None and self.elector.term:
            join = structs.replace(join, hosts_controller=self.elector.leads > 0)
        said: list[wire.Message] = [
            wire.Hello("launcher", join.node, node_rank, self._pid, max(self.incarnation, 0)),
            join,
            *(wire.Found(finding) for finding in self._findings),
        ]
        said += [*self._failures.values(), *([self._ended] if self._ended is not None else [])]
        said += [self._imported] if self._imported is not None else []
        if self._halted >= max(self.incarnation, 0):
            said.append(self._said_halted())
        return said

    def received(self, message: wire.Message) -> list[wire.Message]:
        """Note an order; returns what is to be answered at once."""
        if isinstance(message, wire.Welcome):
            self.is_void = self.elector is not None and message.term < self.elector.term
        handler = None if self.is_void else self._HANDLERS.get(type(message))
        return (handler(self, message) if handler is not None else None) or []

    def _placed(self, placement: wire.Placement) -> None:
        if placement.incarnation > self.incarnation:
            self.placement, self.is_spare, self._suspended = placement, False, False
            self._unfit = ""
            self.begins_fresh = False
            self._findings, self._ended = [], None

    def _ordered_halt(self, order: wire.Halt) -> list[wire.Message]:
        self._halt = max(self._halt, order.incarnation)
        self._suspended, self.begins_fresh = order.suspend, order.suspend or order.fresh
        answers = order.incarnation >= self.incarnation and self._running <= self._halted
        return self.halted() if answers else []

    def _seals(self, order: wire.Seal) -> None:
        self.seal = order

    def _is_spare(self, _: wire.Spare) -> None:
        self.is_spare = True

    def _is_told_imports(self, imports: wire.Imports) -> None:
        self.imports = imports

    def _stops(self, order: wire.Stop) -> None:
        self.stop = order

    def _renamed(self, order: wire.Renamed) -> list[wire.Message]:
        if self.placement is not None:  # everybody knows this node by its name
            return []
        self._join = structs.replace(self._join, node=order.node)
        return self.greet()

    def _refused(self, refused: wire.Refused) -> None:
        if self.placement is None:
            self.refusal = refused.reason

    _HANDLERS: ClassVar[dict[type[Any], Callable[[Any, Any], list[wire.Message] | None]]] = {
        wire.Placement: _placed,
        wire.Halt: _ordered_halt,
        wire.Seal: _seals,
        wire.Kill: lambda self, order: self.kills.append(order),
        wire.Spare: _is_spare,
        wire.Imports: _is_told_imports,
        wire.Stop: _stops,
        wire.Renamed: _renamed,
        wire.Refused: _refused,
    }

    def place(self, placement: wire.Placement) -> None:
        """Take a place that is known without asking, as it is on one node, and whose workers run."""
        self.placement, self._running = placement, placement.incarnation

    def started(self) -> None:
        """Note that workers of the newest placement run."""
        self._running, self._rigid = self.incarnation, ""

    def found(self, finding: Finding) -> list[wire.Message]:
        """Tell of a failure now, and again a controller that is started later."""
        self._findings.append(finding)
        return [wire.Found(finding)]

    def told_to_end(self, row: str, text: str, unix_s: float) -> list[wire.Message]:
        """Tell that the scheduler ends the job; ``row``: of the tables of messages, by its name."""
        if self.placement is None:
            return []
        said = wire.Said(-1, row, text[:_MOST_TEXT], "launcher", 0, unix_s)
        return [wire.Words(self.placement.node_rank, (said,))]

    def kernel_told(self, lines: Sequence[tuple[str, float]]) -> list[wire.Message]:
        """Tell lines of this node's kernel, with their Unix times: its agent may be too late for the verdict."""
        if self.placement is None or not lines:
            return []
        said = [wire.Said(-1, "", line[:_MOST_TEXT], KERNEL_SOURCES[0], 0, unix_s) for line, unix_s in lines]
        return [wire.Words(self.placement.node_rank, tuple(said))]

    def imported(self, imports: wire.Imports) -> list[wire.Message]:
        """Tell what this node's workers import, for standbys of spares."""
        self._imported = imports
        return [imports]

    def recovered(self, recovery: Recovery) -> list[wire.Message]:
        """Tell that all ranks of this node train again after a restart."""
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
        """Tell that a worker of this incarnation failed; said again, it names the worker that was to blame."""
        failed = wire.Failed(self.incarnation, exit_code, text, rank, step, unix_s, by_keepstep)
        self._failures[self.incarnation] = failed
        if len(self._failures) > _MOST_FAILURES:
            del self._failures[min(self._failures)]
        return [failed]

    def _said_halted(self) -> wire.Halted:
        return wire.Halted(self._halted, self._free_port(), self._suspended, self._unfit, self._rigid)

    def halted(self, unfit: str = "", rigid: str = "") -> list[wire.Message]:
        """Tell that no worker runs here any more, whether by order or not.

        ``unfit``: why workers should not begin again on this node. ``rigid``: why they cannot in a job of another size.
        """
        self._unfit = self._unfit or unfit[:_MOST_TEXT]
        self._rigid = self._rigid or rigid[:_MOST_TEXT]
        self._halted = max(self._halted, self._halt, self._running)
        self._halt, self._ended = self._halted, None
        return [self._said_halted()]

    def leaves(self, text: str) -> list[wire.Message]:
        """Tell that this node leaves a job that goes on: its place is free as soon as the connection ends."""
        return [wire.Bye(text[:_MOST_TEXT])]

    def ended(self, exit_code: int, text: str, kind: TemporaryKind = "") -> list[wire.Message]:
        """Tell that this node's workers have ended, and begin again only by order; or that a spare leaves."""
        by_operator = self.stop is not None and self.stop.by_operator
        if self.placement is None and self.is_spare:
            return [wire.Bye(text)]
        node_rank = self.placement.node_rank if self.placement is not None else -1
        self._ended = wire.Ended(node_rank, exit_code, text, max(self.incarnation, 0), by_operator, kind)
        return [self._ended]

    # The connection.

    def connected(self) -> None:
        """Note that the controller is connected."""
        self._alone_since_s = self._away_since_s = None

    def disconnected(self, now_s: float) -> None:
        """Note that the connection has ended."""
        if not self.is_void or self._away_since_s is None:  # a replaced controller counts as away
            self._alone_since_s = self._away_since_s = now_s
        self.is_void = False

    def trouble(self, error: Exception, now_s: float) -> None:
        """Note that an attempt to connect failed."""
        silence = isinstance(error, OSError) and error.errno in _UNANSWERED
        silence = silence or (isinstance(error, wire.Violation) and error.reason == "handshake-timeout")
        if self._away_since_s is not None and not silence and self.elector is None:
            self._alone_since_s = now_s  # the host answers, so that only the controller is away

    def led(self, now_s: float) -> None:
        """Note that the controller's launcher has the lease: no other controller gives this node's place away."""
        if self._away_since_s is not None:
            self._alone_since_s = now_s

    def away_s(self, now_s: float) -> float:
        """For how long no controller could order anything: without a connection, or on its own node without a lease."""
        if self._away_since_s is not None:
            return now_s - self._away_since_s
        return self.elector.idle_s(now_s) if self.elector is not None else 0.0

    @property
    def missing(self) -> str:
        """What a node lacks that is cut off, in words."""
        if self.elector is not None and self.elector.leads:
            return "no majority of the nodes that elect answers the controller's node"
        return "no way to the controller"

    def is_cut_off(self, now_s: float) -> bool:
        """Whether another node may have this one's place, so that the workers here have to end.

        Where the controller's host answers that no controller is there, no place is given away, and training goes on
        without one. Where the controller can move to another node, its lease has to stand.
        """
        if not self.begins_again:
            return False
        if self.elector is not None and self.elector.leads:
            return self.elector.idle_s(now_s) >= LEASE_S
        return self.is_alone(now_s)

    def is_alone(self, now_s: float) -> bool:
        """Whether the controller's host has been silent for `LEASE_S`: it does not even refuse a connection."""
        return self._alone_since_s is not None and now_s - self._alone_since_s >= LEASE_S
