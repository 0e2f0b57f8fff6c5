"""An operator's orders on one node: whether its ranks are watched, and which of them are traced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from keepstep.agent.node import NodeAgent
from keepstep.agent.services.trace_orders import Tracing
from keepstep.wire.messages import Message, Standing, TraceRanks

logger = logging.getLogger("keepstep.agent")


class Obeying:
    """Carries such orders out, and tells them to a controller that is started later."""

    def __init__(
        self, agent: NodeAgent, node_rank: int, run_dir: Path, send: Callable[[Message], None]
    ) -> None:
        self._agent, self._send = agent, send
        self._standing = Standing(0)
        self._tracing = Tracing(agent.pages, node_rank, run_dir, agent.base)
        agent.is_left_alone = self._is_left_alone

    def again(self) -> list[Message]:
        """What a new controller must hear before anything that was found."""
        return [self._standing] if self._standing.number else []

    def stand(self, order: Standing) -> None:
        """Take the standing orders, if they are newer than those that are known."""
        if order.number <= self._standing.number:
            return
        before, self._standing = self._standing, order
        if bool(order.off_since_unix_s) == bool(before.off_since_unix_s):
            return
        logger.info("watching is %s by order of an operator", "off" if order.off_since_unix_s else "on")
        self._agent.forget_standstills()
        if not order.off_since_unix_s:
            for message in self._agent.standing():
                self._send(message)

    def trace(self, order: TraceRanks) -> None:
        """Have ranks traced."""
        for message in self._tracing.receive(order):
            self._send(message)

    def poll(self) -> None:
        """Send what has changed; to be called about 20 times a second."""
        for message in self._tracing.poll():
            self._send(message)

    def _is_left_alone(self, rank: int) -> bool:
        return self._standing.off_since_unix_s > 0 or self._tracing.disturbs(rank)
