"""Backups between nodes under seeds: messages late, lost with their connection, agents, nodes and controllers dying.

The controller's part and the rules for slots are the real ones; caches, workers, agents and the network are virtual.
What was told to be backed up must be had from the nodes that are left, whatever node is lost then. ``-k seed7`` replays
one.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from tests.effort import many

from keepstep.checkpoint.memory.slots import Key, free_slots, kept_slots, newest_common, next_slot
from keepstep.control.backup_orders import Backups
from keepstep.control.cluster import Cluster
from keepstep.core.summary import Endpoint
from keepstep.wire.messages import BackUp, Inventory, RankKeys

SLOTS = 4


@dataclass
class Weather:
    delay_s: tuple[float, float] = (0.001, 0.01)
    transfer_s: tuple[float, float] = (0.2, 1.5)
    step_s: float = 0.3
    breaks_per_s: float = 0.0
    agent_deaths_per_s: float = 0.0
    controller_deaths_per_s: float = 0.0


CALM = Weather()
FAST = Weather(step_s=0.02, delay_s=(0.01, 0.1))  # many steps are made while a message is under way
FAIR = Weather(delay_s=(0.001, 0.1), breaks_per_s=0.02, agent_deaths_per_s=0.02, transfer_s=(0.1, 4.0))
ROUGH = Weather(delay_s=(0.001, 0.5), breaks_per_s=0.3, agent_deaths_per_s=0.1, transfer_s=(0.1, 4.0))
DEADLY = Weather(breaks_per_s=0.1, agent_deaths_per_s=0.1, controller_deaths_per_s=0.15)


@dataclass
class Node:
    rank: int
    ranks: tuple[int, ...]
    life: int = 0  # counts its memories
    alive: bool = True
    own: dict[int, list[Key | None]] = field(default_factory=dict)
    backups: dict[int, list[Key | None]] = field(default_factory=dict)
    read: dict[tuple[bool, int, int], int] = field(
        default_factory=dict
    )  # readers of a slot: backup?, rank, index
    keep: Key | None = None
    first: Key | None = None
    agent: int = 0  # counts its agents; 0: none is there
    connection: int = 0
    order: BackUp | None = None
    told: Inventory | None = None
    bringing: set[int] = field(default_factory=set)

    def held(self, rank: int) -> set[Key]:
        return {key for key in (*self.own.get(rank, ()), *self.backups.get(rank, ())) if key}


class Job:
    """The whole of it in virtual time."""

    def __init__(self, seed: int, nodes: int, per_node: int, copies: int, weather: Weather) -> None:
        self.random = random.Random(seed)
        self.weather, self.copies = weather, copies
        self.now_s, self._count = 0.0, itertools.count(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.nodes = [Node(n, tuple(range(n * per_node, (n + 1) * per_node))) for n in range(nodes)]
        self.world = nodes * per_node
        self.key = Key(0, 0)
        self.told_of: dict[int, int] = {}  # life of each node as the controller heard of it
        self.promised: Key | None = None
        self.protected = self.halted = False
        self.completed: list[Key] = []
        for node in self.nodes:
            self.boot(node)
        self.new_controller()
        self.after(0.1, self.tick)
        self.after(0.2, self.step)
        self.after(0.1, self.trouble)

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._count), call))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, call = heapq.heappop(self._events)
            call()
        self.now_s = end_s

    # The controller.

    def new_controller(self) -> None:
        self.cluster, self.backups = Cluster(len(self.nodes)), Backups(self.copies, 3.0)
        self.peers: dict[int, Node] = {}
        self.told_of = {}
        for node in self.nodes:
            self.cluster.plays(self.cluster.node(node.rank, f"n{node.rank}"), node.ranks)
            self.lose_connection(node)

    def tick(self) -> None:
        for peer, order in self.backups.tick(self.cluster, len(self.nodes), self.now_s):
            node = self.peers[peer]
            self.say(node, lambda node=node, order=order: self.ordered(node, order))
        complete = self.backups.plan.complete
        seen = all(self.told_of.get(node.rank) == node.life for node in self.nodes if node.alive)
        if complete and seen and self.backups._lost == {node.rank for node in self.nodes if not node.alive}:
            if not self.completed or self.completed[-1] != complete:
                self.completed.append(complete)
            self.promised = max(self.promised or complete, complete)
            self.protected = True
        self.after(0.1, self.tick)

    # The network: in order on one connection, lost with it.

    def say(self, node: Node, call: Callable[[], None]) -> None:
        connection = node.connection
        self._free_s = getattr(self, "_free_s", {})
        at_s = max(self.now_s + self.random.uniform(*self.weather.delay_s), self._free_s.get(connection, 0.0))
        self._free_s[connection] = at_s
        self.after(at_s - self.now_s, lambda: call() if node.connection == connection else None)

    def lose_connection(self, node: Node) -> None:
        node.connection = 0
        seen = self.cluster.nodes[node.rank]
        seen.agent = None
        self.peers = {peer: one for peer, one in self.peers.items() if one is not node}
        if node.agent:
            self.after(self.random.uniform(0.05, 1.5), lambda agent=node.agent: self.connect(node, agent))

    def connect(self, node: Node, agent: int) -> None:
        if node.connection or node.agent != agent or not node.alive:
            return
        node.connection = next(self._count)
        node.told = None
        connection = node.connection

        def hello() -> None:
            self.backups.forget(node.rank)
            self.told_of.pop(node.rank, None)
            self.cluster.nodes[node.rank].agent = connection
            self.peers[connection] = node

        self.say(node, hello)

    # Agents.

    def boot(self, node: Node) -> None:
        node.life, node.alive = node.life + 1, True
        node.own, node.backups, node.read = {}, {}, {}
        node.keep = node.first = None
        self.start_agent(node)

    def start_agent(self, node: Node) -> None:
        if not node.alive:
            return
        node.agent, node.order, node.told, node.bringing = next(self._count), None, None, set()
        self.after(self.random.uniform(0.05, 0.5), lambda agent=node.agent: self.connect(node, agent))
        self.after(0.1, lambda agent=node.agent: self.look(node, agent))

    def ordered(self, node: Node, order: BackUp) -> None:
        node.order = order

    def look(self, node: Node, agent: int) -> None:
        if not node.alive or node.agent != agent:
            return
        if node.order:
            node.keep, node.first = Key.unpack(node.order.keep), Key.unpack(node.order.first)
            self.carry_out(node, node.order)
        now = Inventory(
            node.rank,
            self.rows((rank, self.board(node.own, rank)) for rank in node.ranks),
            self.rows((rank, self.board(node.backups, rank)) for rank in sorted(node.backups)),
            node.keep.pack() if node.keep else 0,
            node.first.pack() if node.first else 0,
            True,
            (Endpoint("10.0.0.1", 1 + node.rank),),
        )
        if now != node.told and node.connection:
            node.told = now
            life = node.life

            def heard() -> None:
                self.backups.heard(self.cluster.nodes[node.rank], now)
                self.told_of[node.rank] = life

            self.say(node, heard)
        self.after(self.random.uniform(0.05, 0.15), lambda: self.look(node, agent))

    @staticmethod
    def board(slots: dict[int, list[Key | None]], rank: int) -> set[Key]:
        return {key for key in slots.get(rank, ()) if key}

    @staticmethod
    def rows(held: Iterable[tuple[int, set[Key]]]) -> tuple[RankKeys, ...]:
        return tuple(RankKeys(rank, tuple(sorted(key.pack() for key in keys))) for rank, keys in held if keys)

    def carry_out(self, node: Node, order: BackUp) -> None:
        target = Key.unpack(order.target)
        for pull in order.pulls:
            for rank in pull.ranks:
                if target and rank not in node.bringing and target not in self.board(node.backups, rank):
                    source = self.nodes[pull.endpoints[0][0].port - 1] if pull.endpoints else None
                    if source:
                        self.bring(node, source, rank, target)
        if order.settled and not node.bringing:
            for rank in set(node.backups) - set(order.ranks):
                if rank not in node.ranks or node.keep in self.board(node.own, rank):
                    del node.backups[rank]

    def bring(self, node: Node, source: Node, rank: int, key: Key) -> None:
        """A transfer: the receiver's slot is empty meanwhile, the source's is locked."""
        places = [
            (backup, rank, index)
            for backup, slots in ((False, source.own), (True, source.backups))
            for index, held in enumerate(slots.get(rank, ()))
            if held == key
        ]
        slots = node.backups.setdefault(rank, [None, None])
        busy = {i for i in range(2) if node.read.get((True, rank, i))}
        needed = (Key.unpack(node.order.keep) if node.order else None, key)
        index = next((i for i in free_slots(slots, needed) if i not in busy), None)
        if not places or not source.alive or not source.agent or index is None:
            return
        place = places[0]
        slots[index] = None
        source.read[place] = source.read.get(place, 0) + 1
        node.bringing.add(rank)
        lives = (node.agent, source.agent, node.life, source.life)

        def done() -> None:
            if source.life == lives[3] and source.alive:
                source.read[place] = max(0, source.read.get(place, 0) - 1)
            if lives == (node.agent, source.agent, node.life, source.life) and node.alive and source.alive:
                node.bringing.discard(rank)
                still = node.order is not None and node.order.target == key.pack()
                if still and rank in node.backups:
                    node.backups[rank][index] = key
            elif node.alive and node.agent == lives[0] and node.life == lives[2]:
                node.bringing.discard(rank)

        self.after(self.random.uniform(*self.weather.transfer_s), done)

    # Training.

    def step(self) -> None:
        if not self.halted and all(node.alive for node in self.nodes):
            self.key = Key(self.key.incarnation, self.key.step + 1)
            for node in self.nodes:
                for rank in node.ranks:
                    self.after(self.random.uniform(0, 0.3 * self.weather.step_s),
                               lambda node=node, rank=rank, key=self.key: self.save(node, rank, key))  # fmt: skip
        self.after(self.weather.step_s, self.step)

    def save(self, node: Node, rank: int, key: Key) -> None:
        if self.halted or not node.alive or key.incarnation != self.key.incarnation:
            return
        slots = node.own.setdefault(rank, [None] * SLOTS)
        busy = {i for i in range(SLOTS) if node.read.get((False, rank, i))}
        busy |= kept_slots(slots, node.keep, node.first)
        complete = newest_common(
            self.board(one.own, other) for one in self.nodes if one.alive for other in one.ranks
        )
        index = next_slot(slots, complete, busy)
        if index is not None:
            slots[index] = key

    def restore(self) -> None:
        """All ranks go on from the newest snapshot that all can have; nothing else is kept but what is backed up."""
        key = self.best()
        for node in self.nodes:
            if node.keep is None and node.first is None:
                node.first = key
            for rank in node.ranks:
                slots = node.own.setdefault(rank, [None] * SLOTS)
                older = node.keep if node.keep and key and node.keep < key else None
                slots[:] = [held if held and held in (key, older) else None for held in slots]
                if key and key not in slots:
                    slots[slots.index(None)] = key
        self.key = Key(self.key.incarnation + 1, key.step if key else 0)
        self.halted = False

    # What is lost.

    def best(self) -> Key | None:
        """The newest snapshot that every rank can have from the nodes that are there."""
        held = [
            set().union(*(node.held(rank) for node in self.nodes if node.alive)) for rank in range(self.world)
        ]
        return newest_common(held)

    def kill(self, nodes: Iterable[int]) -> None:
        self.protected = False
        for number in nodes:
            node = self.nodes[number]
            node.alive, node.agent = False, 0
            self.lose_connection(node)

    def come_back(self) -> None:
        self.protected = False
        for node in self.nodes:
            if not node.alive:
                self.boot(node)
        self.restore()

    def exchange(self, one: int, other: int) -> None:
        """Two nodes take each other's ranks: what they have of their own is left there as backups (`Cache.leave`)."""
        self.halted, self.protected = True, False
        first, second = self.nodes[one], self.nodes[other]
        for node in (first, second):
            for rank in node.ranks:
                own = node.own.get(rank, [])
                newest = sorted(self.board(node.own, rank))[-2:]
                needed = kept_slots(own, node.keep, node.first)
                left = [key for index, key in enumerate(own) if index in needed or (key and key in newest)]
                if left:
                    earlier = node.keep if node.keep in self.board(node.backups, rank) else None
                    node.backups[rank] = left + ([earlier] if earlier and earlier not in left else [])
            node.own, node.read = {}, {}
        first.rank, first.ranks, second.rank, second.ranks = (
            second.rank,
            second.ranks,
            first.rank,
            first.ranks,
        )
        self.nodes[one], self.nodes[other] = second, first
        self.new_controller()
        for node in self.nodes:
            self.start_agent(node)

    def kill_agent(self, node: Node) -> None:
        node.agent = 0
        self.lose_connection(node)
        self.after(self.random.uniform(0.1, 1.0), lambda: self.start_agent(node) if not node.agent else None)

    def trouble(self) -> None:
        for node in self.nodes:
            if node.alive and node.agent and self.random.random() < 0.1 * self.weather.agent_deaths_per_s:
                self.kill_agent(node)
            elif node.alive and node.connection and self.random.random() < 0.1 * self.weather.breaks_per_s:
                self.lose_connection(node)
        if self.random.random() < 0.1 * self.weather.controller_deaths_per_s:
            self.new_controller()
        self.after(0.1, self.trouble)

    def until_protected(self, patience_s: float = 300.0) -> None:
        end_s = self.now_s + patience_s
        while not self.protected:
            assert self.now_s < end_s, f"nothing is backed up at {self.now_s}: {self.backups.plan}"
            self.run(0.05)


def sets_that_may_go(job: Job) -> list[int]:
    """Any ``copies`` nodes, or, with one copy, a set of nodes of which no two are neighbours."""
    count = len(job.nodes)
    if job.random.random() < 0.5 or job.copies > 1:
        return job.random.sample(range(count), min(job.copies, count - 1))
    first, chosen = job.random.randrange(count), list[int]()
    for node in range(first, first + count - 1):
        if (not chosen or node - chosen[-1] > 1) and job.random.random() < 0.6:
            chosen.append(node)
    return [node % count for node in chosen] or [first]


@pytest.mark.parametrize("weather", [CALM, FAST, ROUGH, DEADLY], ids=["calm", "fast", "rough", "deadly"])
@pytest.mark.parametrize("seed", range(many(3)), ids=lambda seed: f"seed{seed}")
def test_what_was_told_to_be_backed_up_survives(seed: int, weather: Weather) -> None:
    chosen = random.Random(seed)
    job = Job(seed, chosen.choice([2, 3, 4, 7]), chosen.choice([1, 2]), chosen.choice([1, 1, 2]), weather)
    for _ in range(4):
        job.until_protected()
        job.run(chosen.uniform(0, 8))
        if not job.protected:
            continue
        promised = job.promised
        lost = sets_that_may_go(job)
        job.kill(lost)
        best = job.best()
        assert best is not None, (lost, promised)
        assert promised is not None
        assert best >= promised, lost
        if chosen.random() < 0.5 and len(job.nodes) - len(lost) > job.copies:
            # The ring closes without them, and survives the next loss.
            job.until_protected()
            promised = job.promised
            job.run(chosen.uniform(0, 3))
            left = [node.rank for node in job.nodes if node.alive]
            job.kill([chosen.choice(left)])
            best = job.best()
            assert best is not None
            assert promised is not None
            assert best >= promised
        else:
            job.run(chosen.uniform(0, 6))
        job.come_back()
    job.until_protected()


@pytest.mark.parametrize("weather", [CALM, FAST, FAIR], ids=["calm", "fast", "fair"])
@pytest.mark.parametrize("seed", range(4), ids=lambda seed: f"seed{seed}")
def test_backups_go_on_and_on(seed: int, weather: Weather) -> None:
    job = Job(seed, 4, 2, 1, weather)
    job.run(120)
    assert len(job.completed) >= 8
    assert job.completed == sorted(job.completed)


@pytest.mark.parametrize("weather", [CALM, FAST, ROUGH, DEADLY], ids=["calm", "fast", "rough", "deadly"])
@pytest.mark.parametrize("seed", range(many(3)), ids=lambda seed: f"seed{seed}")
def test_nothing_is_lost_when_nodes_exchange_their_ranks(seed: int, weather: Weather) -> None:
    chosen = random.Random(seed)
    job = Job(seed, chosen.choice([2, 3, 4, 7]), chosen.choice([1, 2]), chosen.choice([1, 1, 2]), weather)
    for _ in range(4):
        job.until_protected()
        job.run(chosen.uniform(0, 8))
        promised, newest = job.promised, job.best()
        assert promised is not None
        assert newest is not None
        job.exchange(*chosen.sample(range(len(job.nodes)), 2))
        job.run(chosen.uniform(0, 6))
        assert job.best() == newest
        if chosen.random() < 0.3:  # again before anything was restored: only what is backed up is sure
            job.exchange(*chosen.sample(range(len(job.nodes)), 2))
            job.run(chosen.uniform(0, 6))
            again = job.best()
            assert again is not None
            assert again >= promised
        if chosen.random() < 0.5:
            job.kill(chosen.sample(range(len(job.nodes)), min(job.copies, len(job.nodes) - 1)))
            best = job.best()
            assert best is not None
            assert best >= promised
            job.run(chosen.uniform(0, 3))
        job.come_back()
    job.until_protected()
