"""Real rings of this process, the agents that watch them, and the controller's core: a job without its processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import pytest

from keepstep.agent import node as node_module
from keepstep.agent.node import NodeAgent
from keepstep.agent.sensors.flight_recorder import Answer, RecorderSensor
from keepstep.control.controller import Controller
from keepstep.control.effects import Effect, Send, WriteIncident
from keepstep.control.settings import Settings
from keepstep.core.incident import Incident
from keepstep.ring import RingWriter, create
from keepstep.wire.messages import Hello, Message, ProfileRequest, StateRequest

_Job = TypeVar("_Job", bound="WatchedJob")


class Clock(Protocol):
    """What agents need of the module ``time``."""

    def monotonic(self) -> float: ...

    def monotonic_ns(self) -> int: ...


class WatchedJob:
    """``clock``: the time of the agents and of the controller. All ranks are of this process.

    Attributes:
        writers: the ring of each rank, to be written to.
        incidents: the latest state of each incident, by number.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        folder: Path,
        patch: pytest.MonkeyPatch,
        clock: Clock,
        *,
        per_node: int = 8,
        records: int = 4096,
    ) -> None:
        patch.setattr(node_module, "time", clock)
        self.clock, self._folder, self._per_node = clock, folder, per_node
        self.incidents: dict[int, Incident] = {}
        self._rings = {rank: create(records) for rank in ranks}
        size = max(self._rings) + 1
        self.writers = {
            rank: RingWriter(ring, rank=rank, world_size=size) for rank, ring in self._rings.items()
        }
        nodes = sorted({rank // per_node for rank in self._rings})
        self.controller = Controller(Settings(nodes=len(nodes), validate=False), unix_s=lambda now_s: now_s)
        self._mail: list[tuple[int, Message]] = []
        self.agents = {node: self._agent(node) for node in nodes}

    def __enter__(self: _Job) -> _Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self.agents.values():
            agent.close()
        for writer in self.writers.values():
            writer.close()
        for ring in self._rings.values():
            os.close(ring)

    def ask(self, run_dir: Path, process: int, rank: int) -> tuple[Answer, float]:
        """What a rank answers that is asked what torch's flight recorder holds."""
        return None, 0.0

    def look(self) -> None:
        """Let the agents read the rings."""
        for agent in self.agents.values():
            agent.poll(self.clock.monotonic_ns())
        self._deliver()

    def beat(self) -> None:
        """Let the agents send a heartbeat."""
        for node, agent in self.agents.items():
            self._mail.append((node, agent.heartbeat(self.clock.monotonic_ns())))
        self._deliver()

    def tick(self) -> None:
        """Let the controller look at the time."""
        self._carry_out(self.controller.tick(self.clock.monotonic()))

    def _agent(self, node: int) -> NodeAgent:
        paths = {
            rank: f"/proc/{os.getpid()}/fd/{ring}"
            for rank, ring in self._rings.items()
            if rank // self._per_node == node
        }
        folder = self._folder / f"node-{node}"
        folder.mkdir(parents=True)

        def send(message: Message) -> None:
            self._mail.append((node, message))

        agent = NodeAgent(paths, f"node-{node}", node, folder, send)
        agent._recorder = RecorderSensor(folder, self.ask, lambda *_: None)  # pyright: ignore[reportPrivateUsage]
        self.controller.connected(node, "agent")
        self.controller.message(
            node, Hello("agent", f"node-{node}", node, os.getpid()), self.clock.monotonic()
        )
        return agent

    def _deliver(self) -> None:
        while self._mail:
            node, message = self._mail.pop(0)
            self._carry_out(self.controller.message(node, message, self.clock.monotonic()))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, WriteIncident):
                self.incidents[effect.incident.number] = effect.incident
            elif isinstance(effect, Send) and isinstance(effect.message, StateRequest):
                for node in effect.peers:
                    answer = asyncio.run(self.agents[node].states(effect.message))
                    self._mail.append((node, answer))
            elif isinstance(effect, Send) and isinstance(effect.message, ProfileRequest):
                self._mail += [(node, self.agents[node].profile(effect.message)) for node in effect.peers]
        if self._mail:
            self._deliver()
