"""Asks the controller of a living run how it stands, again and again, as a viewer that only looks."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from keepstep import wire
from keepstep.core.errors import LayoutError, RunError
from keepstep.core.incident import Incident
from keepstep.core.layout import ParallelLayout
from keepstep.core.log_lines import one_line
from keepstep.report.incidents import incident_from_json
from keepstep.traces import Run
from keepstep.view.controller_of import ControllerOf, controller_of
from keepstep.view.node_links import links_between
from keepstep.view.rank_table import rank_table
from keepstep.view.run_snapshot import LinkRate, RankTable
from keepstep.wire.blocking import BlockingConnection
from keepstep.wire.violation import Violation

T = TypeVar("T")

_LINKS_S = 10.0  # how often agents tell what was sent
_MOST_MOVES = 3  # how often an answer may say that the controller is elsewhere
_ONLY = "only a running job can be followed"
_NODES = msgspec.msgpack.Decoder(list[dict[str, Any]])
_STATUS = msgspec.msgpack.Decoder(dict[str, Any])
_RANKS = msgspec.msgpack.Decoder(list[tuple[int, tuple[wire.RankBeat, ...]]])
_PATHS = msgspec.msgpack.Decoder(list[tuple[int, tuple[wire.PathRate, ...]]])


@dataclass(frozen=True, slots=True)
class LiveView:
    """What a controller has answered.

    Attributes:
        status: what `Run.status` gives, but with no rows in the ``ranks`` of its nodes.
        ranks: the newest heartbeat of every rank.
        links: what nodes lately sent each other.
        incidents: those that are new or have changed since the last answer, the first change first. The first answer
            of a controller has the last 64.
        layout: the declared layout; None: none was declared.
        started_unix_s: when the run was started, on the clock of the node whose folder this is; 0: not known.
    """

    status: dict[str, Any]
    ranks: RankTable
    links: tuple[LinkRate, ...]
    incidents: list[Incident]
    layout: ParallelLayout | None
    started_unix_s: float


@dataclass(slots=True)
class Gathered:
    """The answers to one round of questions, as far as they have come."""

    status: dict[str, Any] = field(default_factory=dict[str, Any])
    nodes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ranks: list[tuple[int, tuple[wire.RankBeat, ...]]] = field(
        default_factory=list[tuple[int, tuple[wire.RankBeat, ...]]]
    )
    paths: dict[int, Sequence[wire.PathRate]] = field(default_factory=dict[int, Sequence[wire.PathRate]])
    incidents: list[Incident] = field(default_factory=list[Incident])
    layout: str = ""
    more_incidents: bool = False

    def take(self, answer: wire.Followed) -> None:
        """Add one answer. Raises MsgspecError, UnicodeDecodeError or RunError where it makes no sense."""
        if answer.status:
            self.status = _STATUS.decode(answer.status)
        self.nodes += _NODES.decode(answer.nodes)
        self.ranks += _RANKS.decode(answer.ranks)
        self.paths.update(_PATHS.decode(answer.links))
        self.incidents += [
            incident_from_json(one, where="an answer of the controller") for one in answer.incidents
        ]
        self.layout = answer.layout
        self.more_incidents = answer.more_incidents


class Follower:
    """A connection to the controller of one run, which is made again when it broke, also where the controller moved.

    Blocks, for at most ``patience_s`` while nothing comes. Not for several threads at once.
    """

    def __init__(self, run: Run, patience_s: float = 10.0) -> None:
        self._run, self._patience_s = run, patience_s
        self._connection: BlockingConnection | None = None
        self._known: tuple[int | None, int] = (None, 0)  # register and version of incidents
        self._links: tuple[LinkRate, ...] = ()
        self._links_s = float("-inf")
        logging.getLogger("keepstep.wire").addHandler(logging.NullHandler())  # the error raised says it

    def ask(self) -> LiveView:
        """How the run stands now.

        Raises RunError where it is not watched or has ended, or its controller refuses or does not answer, and other
        KeepstepErrors where its secret or the certificate cannot be used.
        """
        return self._tried(self._asked)

    def gather_all(self) -> Gathered:
        """All that the controller tells of the run as it stands, with all its incidents. Raises as `ask` does."""
        gathered = self._tried(self._gathered)
        while gathered.more_incidents:
            more = self._tried(self._gathered)
            gathered.incidents += more.incidents
            gathered.more_incidents = more.more_incidents
        return gathered

    def _tried(self, question: Callable[[], T]) -> T:
        """What ``question`` gives, which is put again where the connection had been made before and broke."""
        was_connected = self._connection is not None
        try:
            return question()
        except (OSError, Violation) as error:
            self.close()
            if not was_connected:
                raise self._unanswered(error) from error
        try:  # it may have been started again, here or elsewhere
            return question()
        except (OSError, Violation) as error:
            self.close()
            raise self._unanswered(error) from error

    def close(self) -> None:
        """Close the connection; the next question makes another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def _name(self) -> str:
        return self._run.path.name

    def _unanswered(self, error: Exception) -> RunError:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, wire.AnotherJob):
            why = f"another job is there, {wire.job_named(error.theirs)}"
        elif isinstance(error, BlockingIOError | TimeoutError):
            why = f"it says nothing for {self._patience_s:g} s"
        return RunError(one_line(f"{self._name}: no answer from its controller: {why}"))

    def _asked(self) -> LiveView:
        now_s = time.monotonic()
        with_links = now_s - self._links_s >= _LINKS_S
        gathered = self._gathered(with_links=with_links)
        table = rank_table(gathered.ranks)
        if with_links:
            self._links, self._links_s = links_between(gathered.paths, table), now_s
        return LiveView(
            gathered.status | {"nodes": [node | {"ranks": []} for node in gathered.nodes]},
            table,
            self._links,
            gathered.incidents,
            _declared(gathered.layout),
            _number(self._run.describe().get("started_unix_s")),
        )

    def _gathered(self, *, with_links: bool = False) -> Gathered:
        """The answers that together tell how the run stands now, and the incidents that have changed since the last."""
        gathered = Gathered()
        known, first = self._known, 0
        while first >= 0:
            answer = self._answer(wire.Follow(first, *known, with_links))
            try:
                gathered.take(answer)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise Violation("malformed", f"an answer that makes no sense: {error}") from error
            if 0 <= answer.next_node <= first:
                raise Violation("malformed", "an answer that repeats its rows")
            known, first = (answer.register, answer.version), answer.next_node
        self._known = known
        return gathered

    def _answer(self, question: wire.Follow) -> wire.Followed:
        """The answer to one question, from wherever the controller is. Raises OSError, Violation and RunError."""
        if self._connection is None:
            found = controller_of(self._run, self._name, _ONLY)
            self._connection = self._connected(found, found.host_and_port)
        for _ in range(_MOST_MOVES):
            self._connection.send(question)
            answer = self._connection.receive()
            if isinstance(answer, wire.Followed):
                return answer
            if isinstance(answer, wire.Refused):
                self.close()
                raise RunError(one_line(f"{self._name}: its controller refuses: {answer.reason}"))
            self.close()
            if isinstance(answer, wire.Moved):
                found = controller_of(self._run, self._name, _ONLY)
                self._connection = self._connected(found, (answer.address, answer.port))
            else:
                raise Violation("malformed", f"{type(answer).__name__} is no answer")
        raise Violation("malformed", "every controller says that it is elsewhere")

    def _connected(self, found: ControllerOf, address: tuple[str, int]) -> BlockingConnection:
        """A connection whose other end has proved itself."""
        connection = BlockingConnection(socket.create_connection(address, self._patience_s))
        try:
            connection.socket.settimeout(None)
            connection.patience(self._patience_s)
            ends = connection.ends()
            if found.tls is not None:
                connection.encrypt(found.tls, server_side=False)
            connection.prove(wire.ClientChannel(found.key, "viewer", ends))
            connection.patience(self._patience_s)
            connection.send(wire.Hello("viewer", os.uname().nodename, -1, os.getpid()))
            return connection
        except BaseException:
            connection.close()
            raise


def _declared(text: str) -> ParallelLayout | None:
    with contextlib.suppress(LayoutError):
        return ParallelLayout.declared(text) if text else None
    return None


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
