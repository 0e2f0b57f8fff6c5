"""A job in virtual time around the controller's core: nodes, their agents, and a network that misbehaves under a seed.

Agents here are stand-ins: they know the iteration times and report a change two or three steps late, as real ones do.
The network delays, loses and repeats messages, breaks connections; agents and the controller die and come back. What
the controller wrote and printed is kept for the tests' invariants.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.unit.control import control_stand_ins as stand_ins

from keepstep.control.controller import Controller
from keepstep.control.effects import Effect, Say, Send, StorePlacement, WriteIncident
from keepstep.control.settings import Settings
from keepstep.core.finding import Finding
from keepstep.core.incident import Incident
from keepstep.core.validation import TransferEndpoint
from keepstep.wire.messages import (
    Ended,
    Found,
    Heartbeat,
    Held,
    HeldRank,
    Hello,
    Hold,
    Join,
    Measured,
    Message,
    Profile,
    ProfileRequest,
    RankBeat,
    Release,
    RunTests,
    StateRequest,
    States,
)


@dataclass(frozen=True, slots=True)
class Network:
    """How the network misbehaves: seconds, and shares of messages or of seconds."""

    delay_s: tuple[float, float] = (0.001, 0.01)
    lost: float = 0.0
    repeated: float = 0.0
    breaks_per_s: float = 0.0  # of one agent's connection
    agent_deaths_per_s: float = 0.0
    controller_deaths_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Slow:
    """From ``onset`` to ``until`` the whole job takes ``factor`` times as long, for one rank's sake.

    ``hidden``: its own time does not show it, only a test of its device.
    """

    rank: int
    onset: int
    until: int
    factor: float = 2.0
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Hang:
    """One rank never enters the collective of a step; until it goes on after ``seconds``."""

    rank: int
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Crash:
    """One rank dies in a step; a few others die of the broken connection a moment later."""

    rank: int
    step: int


@dataclass(slots=True)
class _Agent:
    node: int
    pid: int
    peer: int | None = None
    standing: dict[tuple[str, int], Finding] = field(default_factory=dict[tuple[str, int], Finding])
    sequence: int = 0
    hold: Hold | None = None
    leased_s: float = 0.0
    missed: bool = False
    held: bool = False
    released: int = 0


class VirtualJob:
    """``run()`` plays all steps; afterwards look at ``written``, ``said`` and ``numbers``."""

    def __init__(
        self,
        seed: int,
        *,
        nodes: int = 4,
        ranks: int = 2,
        steps: int = 120,
        iteration_s: float = 0.5,
        network: Network | None = None,
        faults: tuple[Slow | Hang | Crash, ...] = (),
    ) -> None:
        self.random = random.Random(seed)
        self.nodes, self.ranks, self.steps, self.iteration_s = nodes, ranks, steps, iteration_s
        self.network = network or Network()
        self.faults = faults
        self.now_s = 0.0
        self.step = -1
        self.written: dict[int, Incident] = {}
        self.history: list[Incident] = []
        self.said: list[Say] = []
        self.deaths = 0
        self.holds = 0  # times that a node was held
        self.held_s = 0.0  # the longest that the job waited for those that were
        self._waits_since_s: float | None = None
        self._placed: StorePlacement | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._peers: dict[int, _Agent | int] = {}
        self._agents = [_Agent(node, 200 + node) for node in range(nodes)]
        self._stuck: Hang | None = None
        self._over = False
        self._told: dict[int, list[Message]] = {}
        self.controller = self._fresh()

    # --- running --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Play the job, then half a minute more."""
        self._connect_all()
        self._at(0.05, self._step)
        self._at(0.1, self._tick)
        self._at(0.3, self._beat)
        end_s = None
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            if self._over and end_s is None:
                end_s = self.now_s + 30
            if end_s is not None and self.now_s > end_s:
                break

    def _at(self, after_s: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_s + after_s, self._count, event))

    def _step(self) -> None:
        """All ranks finish a step together, as synchronous training does."""
        if self._over:
            return
        if sum(self._is_held(agent) for agent in self._agents):  # each is looked at, and tells
            self._waits_since_s = self.now_s if self._waits_since_s is None else self._waits_since_s
            self.held_s = max(self.held_s, self.now_s - self._waits_since_s)
            self._at(0.05, self._step)
            return
        self._waits_since_s = None
        hang = next((f for f in self.faults if isinstance(f, Hang) and f.step == self.step + 1), None)
        if hang is not None and self._stuck is None:
            self._stuck = hang
            self._at(12.0, lambda: self._find_hang(hang))
            self._at(hang.seconds, self._resume)
            return
        crash = next((f for f in self.faults if isinstance(f, Crash) and f.step == self.step + 1), None)
        if crash is not None:
            self._die(crash)
            return
        self.step += 1
        if self.step >= self.steps:
            self._finish(0)
            return
        self._detect()
        self._at(self._duration(self.step + 1), self._step)

    def _is_held(self, agent: _Agent) -> bool:
        """Whether the ranks of a node wait at the end of the step that was done last."""
        hold = agent.hold
        held = (
            hold is not None and hold.step == self.step and self.now_s < agent.leased_s and not agent.missed
        )
        if held and not agent.held:
            agent.held = True
            self.holds += 1
            self._tell_hold(agent)
        return held

    def _hold_message(self, agent: _Agent, message: Hold | RunTests | Release) -> None:
        if isinstance(message, Hold):
            if message.number == agent.released:
                return
            if agent.hold is None or agent.hold.number != message.number:
                agent.hold, agent.held, agent.missed = message, False, self.step > message.step
            agent.leased_s = self.now_s + message.lease_s
            self._tell_hold(agent)
        elif agent.hold is None or message.number != agent.hold.number:
            return
        elif isinstance(message, Release):
            agent.leased_s, agent.released = 0.0, message.number
        elif agent.held:
            slow = next(
                (f.rank for f in self.faults if isinstance(f, Slow) and f.onset <= self.step < f.until), -1
            )
            for tests in message.ranks:
                self._from_agent(
                    agent,
                    Measured(
                        message.number, message.tests, agent.node, stand_ins.figures(tests, slow_rank=slow)
                    ),
                )

    def _tell_hold(self, agent: _Agent) -> None:
        assert agent.hold is not None
        state = 3 if agent.missed else 2 if agent.held else 1
        end = TransferEndpoint("10.0.0.1", 5000, "00") if state == 2 else None
        ranks = tuple(HeldRank(rank, state, end) for rank in self._ranks(agent.node))
        self._from_agent(agent, Held(agent.hold.number, agent.node, ranks))

    def _duration(self, step: int) -> float:
        factor = 1.0
        for fault in self.faults:
            if isinstance(fault, Slow) and fault.onset <= step < fault.until:
                factor *= fault.factor
        return self.iteration_s * factor

    def _detect(self) -> None:
        for agent in self._agents:
            for rank in self._ranks(agent.node):
                lag = self.random.randint(2, 3)
                for at in {self.step - lag, self.step - 2} if self.step >= 5 else ():
                    before, after = self._duration(at - 1), self._duration(at)
                    if before != after and (at, rank) not in self._seen(agent):
                        self._seen(agent).add((at, rank))
                        kind = "slow" if after > before else "relief"
                        onset = at + self.random.choice((-1, 0, 0, 0, 1))
                        finding = self._finding(kind, rank, onset=onset, before=before, after=after)
                        self._hold(agent, finding)
                        self._from_agent(agent, Found(finding))

    def _seen(self, agent: _Agent) -> set[tuple[int, int]]:
        return self.__dict__.setdefault("seen", {}).setdefault(agent.node, set())

    def _hold(self, agent: _Agent, finding: Finding) -> None:
        if finding.kind in ("slow", "hang"):
            agent.standing[finding.kind, finding.rank] = finding
        else:
            agent.standing.pop(("slow" if finding.kind == "relief" else "hang", finding.rank), None)

    def _finding(
        self, kind: str, rank: int, *, onset: int = -1, before: float = 0.0, after: float = 0.0, code: int = 0
    ) -> Finding:
        stuck = (12.0, 11.0) if kind == "hang" else (0.0, 0.0)
        node = f"gpu-{rank // self.ranks}"
        return Finding(kind, rank, node, self.now_s, self.step, onset, before, after, *stuck, exit_code=code)

    def _find_hang(self, hang: Hang) -> None:
        if self._stuck is hang:
            self._all_find("hang")

    def _resume(self) -> None:
        if self._stuck is not None and not self._over:
            self.step += 1
            self._all_find("resumed")
            self._at(self.iteration_s, self._step)

    def _all_find(self, kind: str) -> None:
        for agent in self._agents:
            for rank in self._ranks(agent.node):
                finding = self._finding(kind, rank)
                self._hold(agent, finding)
                self._from_agent(agent, Found(finding))

    def _die(self, crash: Crash) -> None:
        self._launcher_says(crash.rank // self.ranks, Found(self._finding("crash", crash.rank, code=137)))
        for rank in self.random.sample(range(self.nodes * self.ranks), 3):
            if rank != crash.rank:
                self.now_s += 0.001
                self._launcher_says(rank // self.ranks, Found(self._finding("crash", rank, code=1)))
        self._at(1.0, lambda: self._finish(137))

    def _finish(self, code: int) -> None:
        self._over = True
        for node in range(self.nodes):
            self._launcher_says(node, Ended(node, code))

    # --- the network ----------------------------------------------------------------------------------------------

    def _ranks(self, node: int) -> range:
        return range(node * self.ranks, (node + 1) * self.ranks)

    def _fresh(self) -> Controller:
        self._peers = {}
        for agent in self._agents if hasattr(self, "_agents") else ():
            agent.peer = None
        controller = Controller(
            Settings(nodes=self.nodes, lost_s=20.0), locators=stand_ins.PlainLocators(), unix_s=lambda s: s
        )
        if self.written:
            controller.restore(self.written.values(), self._placed.placements if self._placed else ())
        return controller

    def _connect_all(self) -> None:
        for node in range(self.nodes):
            self._connect_launcher(node)
        for agent in self._agents:
            self._connect_agent(agent)

    def _connect_launcher(self, node: int) -> None:
        self._count += 1
        peer = self._count
        self._peers[peer] = node
        self.controller.connected(peer, "launcher")
        who = f"gpu-{node}"
        self._receive(peer, Hello("launcher", who, -1, 100 + node))
        self._receive(peer, Join(who, f"10.0.0.{node}", self.ranks, 29500, node, self.nodes, self.nodes))
        for message in self._told.get(node, []):
            self._receive(peer, message)

    def _connect_agent(self, agent: _Agent) -> None:
        self._count += 1
        agent.peer = self._count
        self._peers[agent.peer] = agent
        self.controller.connected(agent.peer, "agent")
        self._receive(agent.peer, Hello("agent", f"gpu-{agent.node}", agent.node, agent.pid))
        for finding in list(agent.standing.values()):
            self._from_agent(agent, Found(finding))

    def _from_agent(self, agent: _Agent, message: Message) -> None:
        peer = agent.peer
        if peer is not None:
            self._over_the_wire(lambda: self._receive(peer, message))

    def _launcher_says(self, node: int, message: Message) -> None:
        """Not lost, and said again on every new connection, as launchers do."""
        self._told.setdefault(node, []).append(message)
        peer = next((number for number, who in self._peers.items() if who == node), None)
        if peer is not None:
            self._receive(peer, message)

    def _over_the_wire(self, deliver: Callable[[], None]) -> None:
        times = 1 + (self.random.random() < self.network.repeated)
        for _ in range(times):
            if self.random.random() >= self.network.lost:
                self._at(self.random.uniform(*self.network.delay_s), deliver)

    def _receive(self, peer: int, message: Message) -> None:
        if peer in self._peers:
            self._carry_out(self.controller.message(peer, message, self.now_s))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, WriteIncident):
                self.history.append(effect.incident)
                self.written[effect.incident.number] = effect.incident
            elif isinstance(effect, Say):
                self.said.append(effect)
            elif isinstance(effect, StorePlacement):
                self._placed = effect
            elif isinstance(effect, Send):
                for peer in effect.peers:
                    who = self._peers.get(peer)
                    if isinstance(who, _Agent):
                        self._over_the_wire(
                            lambda who=who, message=effect.message: self._answer(who, message)
                        )

    def _answer(self, agent: _Agent, message: Message) -> None:
        ranks = self._ranks(agent.node)
        if isinstance(message, Hold | RunTests | Release):
            self._hold_message(agent, message)
        elif isinstance(message, ProfileRequest):
            steps = range(max(message.first_step, 0), min(message.last_step, self.step) + 1)
            rows = tuple(row for step in steps for row in self._rows(step, ranks))
            self._from_agent(agent, Profile(message.request, agent.node, rows))
        elif isinstance(message, StateRequest):
            stuck = self._stuck
            idle = 12.0 if stuck is not None else 0.1
            states = tuple(
                stand_ins.state(
                    rank,
                    self.now_s,
                    step=self.step,
                    idle_s=idle,
                    waits=stuck is not None and rank != stuck.rank,
                )
                for rank in ranks
            )
            self._from_agent(agent, States(message.request, agent.node, states))

    def _rows(self, step: int, ranks: range) -> tuple[stand_ins.IterationSummary, ...]:
        active = [f for f in self.faults if isinstance(f, Slow) and f.onset <= step < f.until]
        slow_rank = active[-1].rank if active and not active[-1].hidden else -1
        return stand_ins.iterations(
            ranks,
            step,
            step,
            onset=step if active else step + 1,
            until=step + 1,
            slow_rank=slow_rank,
            before_s=self.iteration_s,
            after_s=self._duration(step),
        )

    # --- time and misfortune --------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._carry_out(self.controller.tick(self.now_s))
        self._misfortune(0.1)
        self._at(0.1, self._tick)

    def _beat(self) -> None:
        for agent in self._agents:
            agent.sequence += 1
            last_s = self._duration(self.step) if self.step >= 0 else 0.0
            beats = tuple(
                RankBeat(rank, self.step, 2, self.step * 10, last_s) for rank in self._ranks(agent.node)
            )
            self._from_agent(agent, Heartbeat(agent.node, agent.sequence, self.now_s, beats))
        self._at(1.0, self._beat)

    def _misfortune(self, seconds: float) -> None:
        network, dice = self.network, self.random.random
        for agent in self._agents:
            died = dice() < network.agent_deaths_per_s * seconds
            if agent.peer is not None and (died or dice() < network.breaks_per_s * seconds):
                self._peers.pop(agent.peer, None)
                self._carry_out(self.controller.disconnected(agent.peer, self.now_s))
                agent.peer = None
                agent.pid += 1000 * died
                self._at(self.random.uniform(0.1, 2.0), lambda agent=agent: self._return(agent))
        if dice() < network.controller_deaths_per_s * seconds and not self._over:
            self.deaths += 1
            self.controller = self._fresh()
            self._at(self.random.uniform(0.2, 1.0), self._connect_all)

    def _return(self, agent: _Agent) -> None:
        if agent.peer is None:
            self._connect_agent(agent)
