"""What agents are to do with the ranks of a job that runs: hold them, test them, divide micro-batches otherwise."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.control.cluster import Cluster
from keepstep.control.effects import Effect, Send
from keepstep.wire.messages import Message


class AgentOrders:
    """``effects``: what the controller is about to do; ``unix_s``: Unix time of a moment on the controller's clock."""

    def __init__(self, cluster: Cluster, effects: list[Effect], unix_s: Callable[[float], float]) -> None:
        self._cluster, self._effects, self._unix_s = cluster, effects, unix_s
        self._newest = 0

    def give(self, message: Message, node: int | None = None) -> None:
        """Send to all connected agents, or to one node's."""
        agents = self._cluster.agents()
        peers = tuple(peer for rank, peer in agents.items() if node is None or rank == node)
        if peers:
            self._effects.append(Send(peers, message))

    def number(self, now_s: float) -> int:
        """A number for an order that no controller of this run has given out before."""
        self._newest = max(self._newest + 1, int(self._unix_s(now_s) * 1000))
        return self._newest
