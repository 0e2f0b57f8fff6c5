"""What viewers that follow the job are shown: a part of the nodes at a time, and the incidents that have changed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from keepstep.control.cluster import Node
from keepstep.control.controller import Controller
from keepstep.control.overview import answer_to_look, elsewhere
from keepstep.control.run_status import job_status, node_status, packed_list, rank_rows
from keepstep.report.incidents import incident_to_json
from keepstep.wire.messages import Follow, Followed, Message, Moved, Overview, PathRate, RankBeat
from keepstep.wire.messages.looking import MOST_INCIDENTS

_MOST_NODES = 1024  # nodes in one answer, few enough that the controller's loop stands still for milliseconds
_MOST_BYTES = (
    4 << 20
)  # when an answer has so many bytes of rows, no more nodes are added; its incidents likewise
_MOST_NODE_BYTES = 1 << 20  # a node with more bytes of rows has a faulty agent: they are left out
_FEW_NODES, _FEW_PATHS = 1024, 8  # a job with more nodes tells only the busiest paths of each
_encode = msgspec.msgpack.encode


@dataclass(slots=True)
class Window:
    """Answers those who look. ``layout``: as it was declared; ``counters``: of the controller's server."""

    controller: Controller
    layout: str
    counters: Callable[[], dict[str, int]]
    clock: Callable[[], float]
    unix_s: Callable[[], float]
    register: int = field(default_factory=lambda: secrets.randbits(61) + 1)

    def answer(self, question: Message) -> Overview | Followed | Moved:
        """The answer to `Look` or `Follow`."""
        if (moved := elsewhere(self.controller)) is not None:
            return moved
        if isinstance(question, Follow):
            return self._followed(question)
        return answer_to_look(self.controller, self.clock())

    def _followed(self, question: Follow) -> Followed:
        cluster, now_s, unix_s = self.controller.cluster, self.clock(), self.unix_s()
        last = max(cluster.nodes, default=-1)
        known = [rank for rank in range(question.first_node, last + 1) if rank in cluster.nodes]
        nodes: list[bytes] = []
        ranks: list[bytes] = []
        links: list[bytes] = []
        size = 0
        for node in map(cluster.nodes.__getitem__, known[:_MOST_NODES]):
            rows = _bounded(node.rank, rank_rows(node)[1])
            paths = self._paths(node) if question.with_links else b""
            nodes.append(_encode(node_status(self.controller, node, now_s, with_ranks=False)))
            ranks.append(rows)
            links += [paths] if paths else []
            size += len(nodes[-1]) + len(rows) + len(paths)
            if size > _MOST_BYTES:
                break
        status = self._of_job(now_s, unix_s) if question.first_node == 0 else b""
        version, incidents = self._incidents(question)
        return Followed(
            unix_s,
            packed_list(nodes),
            packed_list(ranks),
            packed_list(links),
            known[len(nodes)] if len(nodes) < len(known) else -1,
            status,
            self.layout,
            self.register,
            version,
            incidents,
            more_incidents=version < self.controller.cases.desk.register.version,
        )

    def _of_job(self, now_s: float, unix_s: float) -> bytes:
        status = job_status(self.controller, now_s, unix_s, self.counters())
        encoded = _encode(status)
        if len(encoded) > _MOST_BYTES:  # thousands of nodes have much to say about themselves
            encoded = _encode(msgspec.structs.replace(status, checks={}))
        return encoded

    def _paths(self, node: Node) -> bytes:
        few = len(self.controller.cluster.nodes) <= _FEW_NODES
        return _bounded(node.rank, node.paths if few else node.paths[:_FEW_PATHS])

    def _incidents(self, question: Follow) -> tuple[int, tuple[bytes, ...]]:
        """The incidents that have changed since the viewer's version, and the version up to which they are told."""
        register = self.controller.cases.desk.register
        version = question.version if question.register == self.register else 0
        told: list[bytes] = []
        size = 0
        for at, incident in register.changed_since(version):
            text = incident_to_json(incident, indent=0)
            if (told and size + len(text) > _MOST_BYTES) or len(told) == MOST_INCIDENTS:
                return version, tuple(told)
            version = at
            if len(text) <= _MOST_BYTES:
                told.append(text)
                size += len(text)
        return register.version, tuple(told)


def _bounded(node_rank: int, rows: Sequence[RankBeat | PathRate]) -> bytes:
    """The rows of a node as msgpack, or none where they are too many to be true."""
    encoded = _encode((node_rank, rows))
    return encoded if len(encoded) <= _MOST_NODE_BYTES else _encode((node_rank, ()))
