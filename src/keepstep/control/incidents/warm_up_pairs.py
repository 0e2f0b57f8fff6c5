"""At warm-up: once all nodes are there, their agents probe each other in pairs, and the operator is told who does not
reach whom. So it is again when a new node has come.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.control.cluster import Cluster
from keepstep.control.effects import Effect, Tell
from keepstep.control.incidents.agents import Agents
from keepstep.control.incidents.pair_probes import PairProbes, ask, first_of
from keepstep.core.summary import PathProbe
from keepstep.validate.node_pairs import Pair, merged

_LOOK_S = 5.0
_AGAIN_S = (
    10.0  # A node that starts is busy: who does not answer is probed again so long after, before it is told.
)
_MOST_NODES = 1 << 14


class WarmUpPairs:
    """Asks agents once for each new set of nodes. ``question``: the number of what they are asked now, or None."""

    def __init__(self, cluster: Cluster, agents: Agents, effects: list[Effect]) -> None:
        self._cluster, self._agents, self._effects = cluster, agents, effects
        self._asked: PairProbes | None = None
        self._known: frozenset[str] = frozenset()  # nodes that were probed
        self._first: PairProbes | None = (
            None  # a question in whose answers pairs were broken, which are asked again
        )
        self._pairs: list[Pair] = []  # what was answered to that
        self._next_s = 0.0

    @property
    def question(self) -> int | None:
        return self._asked.number if self._asked is not None else None

    def tick(self, now_s: float) -> None:
        """Let time pass; to be called while the job is not made to wait."""
        if self._asked is not None or now_s < self._next_s:
            return
        self._next_s = now_s + _LOOK_S
        if self._first is not None:
            names = self._first.names
            broken = [(names[one.one], names[one.other]) for one in self._pairs if not one.works]
            number = self._agents.ask_probes(broken, now_s)
            self._asked = PairProbes(number, names) if number is not None else None
            if self._asked is None:
                self._first = None
            return
        nodes = self._cluster.nodes.values()
        names = frozenset(node.name for node in nodes)
        if (
            len(nodes) < 2
            or names <= self._known
            or not all(node.agent is not None and node.endpoints for node in nodes)
            or sum(len(node.ranks) for node in nodes) != self._cluster.known_ranks
        ):
            return
        self._known = names
        self._asked = ask(self._cluster, self._agents, (), now_s, _MOST_NODES)

    def probed(self, probes: Sequence[PathProbe], now_s: float) -> None:
        """Take the answers to the question."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        pairs = asked.pairs(probes)
        if self._first is None:
            if not all(pair.works for pair in pairs):
                self._first, self._pairs, self._next_s = asked, pairs, now_s + _AGAIN_S
            return
        self._first = None
        if lines := asked.troubles(merged([*self._pairs, *pairs])):
            self._effects.append(Tell(f"warm-up: {first_of(lines)}"))
