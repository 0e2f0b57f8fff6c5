"""What an operator orders of a job that goes on training, and who of the controller's parts carries it out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from keepstep.control.cases import Cases
from keepstep.control.cluster import Node
from keepstep.control.effects import Effect
from keepstep.control.membership.ending import Ending
from keepstep.control.membership.pauses import Pauses
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.reforming_orders import Order
from keepstep.control.running.persist_now import PersistNows
from keepstep.control.running.standing_orders import StandingOrders
from keepstep.control.running.thresholds import LiveSettings
from keepstep.control.running.traces import Traces
from keepstep.wire.messages import (
    Message,
    Persisting,
    PersistNow,
    RankTraces,
    Standing,
    TraceSteps,
    Tune,
    Watch,
)


class RunningOrders:
    """Such orders of one job."""

    def __init__(
        self,
        settings: LiveSettings,
        cases: Cases,
        ending: Ending,
        reforming: Reforming,
        pauses: Pauses,
        effects: list[Effect],
        carry_out: Callable[[Sequence[Order], float], None],
    ) -> None:
        """``carry_out`` is given what comes of a remedy that was to be and will not."""
        desk, self._cases = cases.desk, cases
        self._ending, self._reforming, self._pauses = ending, reforming, pauses
        self._carry_out = carry_out
        self.standing = StandingOrders(settings, desk.cluster, effects, desk.unix_s, self._watch)
        self._traces = Traces(desk.cluster, desk.agents, cases.held_back, effects)
        self._persists = PersistNows(desk.cluster, desk.agents, effects)

    def ordered(self, peer: int, message: Message, now_s: float) -> None:
        """Take an operator's order."""
        self.BY_OPERATOR[type(message)](self, peer, message, now_s)

    def told(self, node: Node, message: Message, now_s: float) -> None:
        """Take what an agent tells of such an order."""
        self.BY_AGENT[type(message)](self, node, message, now_s)

    def tick(self, peers: Collection[int], now_s: float) -> None:
        """Time passes. ``peers``: the connections that stand."""
        self.standing.tick(now_s)
        why = self._standstill
        self._traces.tick(why, now_s)
        self._persists.tick(peers, why, now_s)

    @property
    def _standstill(self) -> str:
        """Why the job does not go on by itself; "" while it trains, or only hangs."""
        if self._ending.under_way:
            return "the job is ending"
        if self._reforming.suspended:
            return "the job is suspended"
        return "its workers are being ended" if self._reforming.under_way else ""

    def _watch(self, on: bool, now_s: float) -> None:
        if not on and self._pauses.wanted is not None and self._pauses.wanted.is_remedy:
            self._carry_out(self._pauses.give_up("watching was switched off"), now_s)
        self._cases.watch(on, now_s)

    @property
    def _end(self) -> str:
        return "the job is ending" if self._ending.under_way else ""

    BY_OPERATOR: ClassVar[Mapping[type, Callable[[Any, int, Any, float], None]]] = {
        Tune: lambda self, peer, order, now_s: self.standing.tune(peer, order, self._end, now_s),
        Watch: lambda self, peer, order, now_s: self.standing.watch(peer, order, self._end, now_s),
        TraceSteps: lambda self, peer, order, now_s: self._traces.asked(peer, order, self._standstill, now_s),
        PersistNow: lambda self, peer, order, now_s: self._persists.asked(
            peer, order, self._standstill, now_s
        ),
    }
    BY_AGENT: ClassVar[Mapping[type, Callable[[Any, Node, Any, float], None]]] = {
        Standing: lambda self, node, message, now_s: self.standing.learn(message, now_s),
        RankTraces: lambda self, node, message, now_s: self._traces.told(node, message, now_s),
        Persisting: lambda self, node, message, now_s: self._persists.told(node, message, now_s),
    }
