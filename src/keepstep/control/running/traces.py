"""Traces of chosen ranks for a few steps, ordered by an operator: one order at a time, carried out by agents."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from keepstep.control.cluster import Cluster, Node
from keepstep.control.effects import Effect, Send, Tell
from keepstep.control.incidents.agents import Agents
from keepstep.control.incidents.held_back import HeldBack
from keepstep.core.ranges import fold_ranks
from keepstep.wire.messages import RankTrace, RankTraces, Traced, TraceFile, TraceRanks, TraceSteps

logger = logging.getLogger("keepstep.control")

TRACE_S = 60.0  # a trace ends by itself at the first step after so long
_WRITE_S = 300.0  # longest wait for the files after that, whatever the operator waits for
_AGAIN_S = 1.0  # how often an order is repeated to a node that has not answered
_SETTLE_S = 5.0  # seconds after a trace in which slowness is told only if it lasts
_SETTLE_STEPS = 8
_OVER = ("written", "failed")


@dataclass(slots=True)
class _Order:
    """The order that is under way."""

    number: int
    peer: int  # the operator's connection
    steps: int
    until_s: float  # until when the operator waits
    over_s: float  # when it is given up
    homes: dict[int, tuple[int, str]]  # node rank and node name by rank
    watchers: dict[int, tuple[int, int]]  # incarnation and agent's process by rank, when it was ordered
    traces: dict[int, RankTrace] = field(default_factory=dict[int, RankTrace])
    repeat_s: float = 0.0
    is_answered: bool = False


class Traces:
    """The traces of one job."""

    def __init__(
        self,
        cluster: Cluster,
        agents: Agents,
        held_back: HeldBack,
        effects: list[Effect],
    ) -> None:
        self._cluster, self._agents = cluster, agents
        self._held_back, self._effects = held_back, effects
        self._order: _Order | None = None

    def asked(self, peer: int, message: TraceSteps, standstill: str, now_s: float) -> None:
        """An operator wants traces. ``standstill``: why the job runs no more, "" while it does."""
        ranks = tuple(sorted(set(message.ranks)))
        if why := standstill or self._objection(ranks):
            self._effects.append(Send((peer,), Traced(refused=why)))
            return
        if message.only_say:
            told = (
                f"would trace {message.steps} steps of ranks {fold_ranks(ranks)}, for {TRACE_S:g} s at most"
            )
            self._effects.append(Send((peer,), Traced(done=f"{told}; nothing was done")))
            return
        homes = {rank: home for rank in ranks if (home := self._cluster.home(rank)) is not None}
        self._order = _Order(
            self._agents.order_number(now_s),
            peer,
            message.steps,
            until_s=now_s + message.within_s,
            over_s=now_s + TRACE_S + _WRITE_S,
            homes={rank: (home.rank, home.name) for rank, home in homes.items()},
            watchers={rank: (home.incarnation, home.agent_pid) for rank, home in homes.items()},
        )
        logger.info(
            "by order of an operator: trace %d of %d steps of ranks %s",
            self._order.number,
            message.steps,
            fold_ranks(ranks),
        )
        self._settle(now_s)
        self._send(self._order, now_s)

    def told(self, node: Node, message: RankTraces, now_s: float) -> None:
        """Take how far the ranks of a node are."""
        order = self._order
        if order is None or message.number != order.number:
            return
        for one in message.ranks:
            if one.rank in order.homes and one.rank in node.ranks:
                order.traces[one.rank] = one
        self._consider(order, now_s)

    def tick(self, standstill: str, now_s: float) -> None:
        """Time passes."""
        order = self._order
        if order is None:
            return
        self._settle(now_s)
        if why := standstill or self._lost(order):
            self._end(order, f"it did not end: {why}", now_s)
        elif now_s >= order.over_s:
            self._end(order, "nothing more was heard of it", now_s)
        else:
            if not order.is_answered and now_s >= order.until_s:
                late = [rank for rank in order.homes if not self._is_over(order, rank)]
                how = "goes on; its file comes to the folder traces of the run"
                self._answer(
                    order, Traced(refused=f"not done in time: the trace of ranks {fold_ranks(late)} {how}")
                )
            if now_s >= order.repeat_s:
                self._send(order, now_s)
            self._consider(order, now_s)

    # --- in parts -------------------------------------------------------------------------------------------------

    def _objection(self, ranks: Collection[int]) -> str:
        if self._order is not None:
            return f"ranks {fold_ranks(self._order.homes)} are being traced already"
        if not ranks:
            return "give the ranks that are to be traced"
        unknown = [rank for rank in ranks if rank not in self._cluster.node_of]
        if unknown:
            there = fold_ranks(self._cluster.node_of) if self._cluster.node_of else "none yet"
            return f"there is no rank {fold_ranks(unknown)}; the job has {there}"
        for rank in ranks:
            home = self._cluster.home(rank)
            if home is None or home.agent is None or home.silent:
                return f"no agent answers for rank {rank}, on {self._cluster.node_of[rank]}"
        if any(self._cluster.step_of(rank) < 0 for rank in ranks):
            return "the job has not done its first steps"
        return ""

    def _lost(self, order: _Order) -> str:
        """Why nothing more will be heard of a trace that is not over; "": it will."""
        for rank, before in order.watchers.items():
            home = self._cluster.home(rank)
            if self._is_over(order, rank) or home is None or before == (home.incarnation, home.agent_pid):
                continue
            if home.incarnation != before[0]:
                return f"the process of rank {rank} was replaced"
            return f"the agent of rank {rank} was started again"
        return ""

    @staticmethod
    def _is_over(order: _Order, rank: int) -> bool:
        return rank in order.traces and order.traces[rank].state in _OVER

    def _send(self, order: _Order, now_s: float) -> None:
        """Give, or repeat, the order to the nodes that have not said that they have it."""
        order.repeat_s = now_s + _AGAIN_S
        waiting = [rank for rank in order.homes if rank not in order.traces]
        for node in {order.homes[rank][0] for rank in waiting}:
            ranks = tuple(rank for rank in waiting if order.homes[rank][0] == node)
            self._agents.order(TraceRanks(order.number, ranks, order.steps, TRACE_S), node)

    def _settle(self, now_s: float) -> None:
        """Have slowness held back while ranks are traced, and for a few steps more: a traced step takes longer."""
        iteration_s = max((beat.iteration_s for beat in self._cluster.beats()), default=0.0)
        self._held_back.hold(now_s + max(_SETTLE_S, _SETTLE_STEPS * iteration_s))

    def _consider(self, order: _Order, now_s: float) -> None:
        if all(self._is_over(order, rank) for rank in order.homes):
            self._end(order, "", now_s)

    def _end(self, order: _Order, why: str, now_s: float) -> None:
        """The order is over. ``why`` there is nothing of ranks that have said nothing."""
        self._order = None
        self._settle(now_s)
        self._agents.order(TraceRanks(order.number))
        files: list[TraceFile] = []
        for rank, (_, node) in order.homes.items():
            told = order.traces.get(rank, RankTrace(rank))
            fault = "" if told.state == "written" else told.why or why or "it failed"
            files.append(TraceFile(rank, node, told.step, told.file, told.nbytes, fault))
        is_late = order.is_answered  # the operator's wait was over before
        self._answer(order, Traced(tuple(files)))
        written = [one for one in files if not one.why]
        for one in files:
            logger.info("trace of rank %d on %s: %s", one.rank, one.node, one.why or one.file)
        if is_late and written:
            names = ", ".join(one.file for one in written[:4])
            self._effects.append(Tell(f"traces are written: {names}"))

    def _answer(self, order: _Order, answer: Traced) -> None:
        if not order.is_answered:
            self._effects.append(Send((order.peer,), answer))
            order.is_answered = True
