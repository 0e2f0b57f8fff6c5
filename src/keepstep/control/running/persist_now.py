"""A step on storage now, as an operator orders it: the next one that all ranks save, due or not.

Agents first say which step was saved last; the order then names one ahead of it, so that every rank has heard when it
comes there. Ranks agree on it as on a step that the script asks for: one that has not heard costs no more than a save.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from keepstep.checkpoint.memory.slots import Key
from keepstep.control.cluster import Cluster, Node
from keepstep.control.effects import Effect, Send
from keepstep.control.incidents.agents import Agents
from keepstep.core.ranges import fold_nodes
from keepstep.wire.messages import Operated, Persist, Persisting, PersistNow

logger = logging.getLogger("keepstep.control")

_ANSWER_S = 10.0  # longest wait for what agents know
_AHEAD_S = 1.5  # how far ahead of the newest saved step the order is, at the pace of the saves
_AGAIN_S = 1.0


@dataclass(slots=True)
class _Order:
    """The order that is under way."""

    number: int
    peer: int
    until_s: float
    asked_s: float
    only_say: bool
    nodes: dict[int, str]  # names by node rank
    told: dict[int, Persisting] = field(default_factory=dict[int, Persisting])
    key: int = 0  # the order, once all agents have said what was saved
    repeat_s: float = 0.0


class PersistNows:
    """Such orders of one job, one at a time."""

    def __init__(self, cluster: Cluster, agents: Agents, effects: list[Effect]) -> None:
        self._cluster, self._agents, self._effects = cluster, agents, effects
        self._order: _Order | None = None

    def asked(self, peer: int, message: PersistNow, standstill: str, now_s: float) -> None:
        """An operator wants a step on storage. ``standstill``: why the job runs no more, "" while it does."""
        nodes = {node.rank: node for node in self._cluster.nodes.values() if node.ranks}
        silent = sorted(node.name for node in nodes.values() if node.agent is None or node.silent)
        why = standstill
        if self._order is not None:
            why = "a step is on its way to storage already, by order"
        elif not why and silent:
            why = f"no agent answers on {fold_nodes(silent)}"
        elif not why and not nodes:
            why = "no rank has been heard of yet"
        if why:
            self._effects.append(Send((peer,), Operated(refused=why)))
            return
        self._order = _Order(
            self._agents.order_number(now_s),
            peer,
            until_s=now_s + message.within_s,
            asked_s=now_s,
            only_say=message.only_say,
            nodes={rank: node.name for rank, node in nodes.items()},
        )
        self._send(self._order, now_s)

    def told(self, node: Node, message: Persisting, now_s: float) -> None:
        """Take how far a node is."""
        order = self._order
        if order is None or message.number != order.number or node.rank not in order.nodes:
            return
        if message.state == "unable":
            self._end(
                order,
                Operated(refused=f"{node.name}: {message.why}" if len(order.nodes) > 1 else message.why),
            )
            return
        if order.key and message.state == "ready":
            return  # the answer to the question once more, as that was repeated
        order.told[node.rank] = message
        if not order.key:
            if order.told.keys() >= order.nodes.keys():
                self._choose(order, now_s)
        elif message.state == "there":
            step = _step(message.key)
            logger.info("by order of an operator: step %d is on storage", step)
            self._end(order, Operated(f"step {step} is on storage"))

    def tick(self, peers: Collection[int], standstill: str, now_s: float) -> None:
        """Time passes. ``peers``: the connections that stand."""
        order = self._order
        if order is None:
            return
        if order.peer not in peers:
            self._end(order, Operated(refused="who ordered it has gone"))
        elif standstill:
            self._end(order, Operated(refused=f"{standstill}; say it again once the job trains"))
        elif not order.key and now_s - order.asked_s > _ANSWER_S:
            missing = fold_nodes(sorted(name for rank, name in order.nodes.items() if rank not in order.told))
            self._end(order, Operated(refused=f"no answer came from the agents of {missing}"))
        elif now_s >= order.until_s:
            self._end(order, Operated(refused=self._late(order)))
        elif now_s >= order.repeat_s:
            self._send(order, now_s)

    # --- in parts -------------------------------------------------------------------------------------------------

    def _choose(self, order: _Order, now_s: float) -> None:
        """Name the step from which on the first one saved is to go to storage."""
        newest = Key.unpack(max(one.key for one in order.told.values()))
        pace = max(one.steps_s for one in order.told.values())
        if newest is None or not 0 <= pace < math.inf:
            self._end(order, Operated(refused="no rank has saved a step yet"))
            return
        key = Key(newest.incarnation, newest.step + 1 + math.ceil(_AHEAD_S * pace))
        if order.only_say:
            told = f"the first step that is saved from {key.step} on would go to storage; nothing was done"
            self._end(order, Operated(told))
            return
        order.key, order.told = key.pack(), {}
        logger.info("by order of an operator: the first step saved from %d on goes to storage", key.step)
        self._send(order, now_s)

    @staticmethod
    def _late(order: _Order) -> str:
        if not order.key:
            return "the agents have not said in time what was saved"
        from_step = _step(order.key)
        waiting = sorted(name for rank, name in order.nodes.items() if _waits(order.told.get(rank)))
        if waiting:
            return f"no step from {from_step} on was saved in time on {fold_nodes(waiting)}; it is called off"
        on_way = max((one.key for one in order.told.values()), default=0)
        why = next((one.why for one in order.told.values() if one.why), "it is being written")
        return f"step {_step(on_way)} is on its way to storage, and was not there in time: {why}; it goes on"

    def _send(self, order: _Order, now_s: float) -> None:
        order.repeat_s = now_s + _AGAIN_S
        for rank in order.nodes:
            if rank not in order.told:
                self._agents.order(Persist(order.number, order.key), rank)

    def _end(self, order: _Order, answer: Operated) -> None:
        self._order = None
        self._agents.order(Persist(0))  # what no rank has begun with is not to be done
        self._effects.append(Send((order.peer,), answer))


def _waits(told: Persisting | None) -> bool:
    return told is None or told.state == "waits"


def _step(packed: int) -> int:
    key = Key.unpack(packed)
    return key.step if key is not None else -1
