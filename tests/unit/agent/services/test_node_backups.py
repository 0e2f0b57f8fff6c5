"""Three nodes' agents and the controller's part, with real caches and sockets: backed up, lost, brought back."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.checkpoint.conftest import Served, serving
from tests.unit.checkpoint.sealed_slots import seal_state, stands

from keepstep.agent.services.checkpoints import FILE, Checkpoints, Place
from keepstep.agent.services.node_backups import NeighbourSource, NodeBackups
from keepstep.checkpoint.memory.cache import Backing
from keepstep.checkpoint.memory.cache_server import Open, Reserve, ask
from keepstep.checkpoint.memory.incoming import Incoming
from keepstep.checkpoint.memory.rank_slots import RankSlots
from keepstep.checkpoint.memory.slot import Board, Slot, backup_of
from keepstep.checkpoint.memory.slots import Key, Record, slot_bytes
from keepstep.control.backup_orders import Backups
from keepstep.control.cluster import Cluster
from keepstep.core.errors import CheckpointError
from keepstep.wire.messages import BackUp, Inventory, Locate, Message
from keepstep.wire.secret import RunKey

RUN = RunKey(bytes(32), "job-a")
PATIENCE_S = 60.0


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {"w": torch.full((5000 + rank,), float(100 * rank + step)), "step": step}


class Nodes:
    """``count`` nodes of two ranks each; the controller's part runs in a thread."""

    def __init__(self, count: int, copies: int = 1, limit_bytes: int = 1 << 30) -> None:
        self.count, self.copies, self.limit_bytes = count, copies, limit_bytes
        self.caches: dict[int, Served] = {}
        self.agents: dict[int, NodeBackups] = {}
        self._stacks: dict[int, ExitStack] = {}
        self._guard = threading.RLock()
        self._stop = threading.Event()
        self.new_controller()
        for node in range(count):
            self.boot(node)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def new_controller(self) -> None:
        with self._guard:
            self.cluster, self.backups = Cluster(self.count), Backups(self.copies, 0.3)
            for node in range(self.count):
                self.cluster.plays(self.cluster.node(node, f"node-{node}"), (2 * node, 2 * node + 1))
            for node, agent in self.agents.items():
                self._greet(node, agent)

    def boot(self, node: int) -> None:
        stack = self._stacks[node] = ExitStack()
        self.caches[node] = stack.enter_context(serving(self.limit_bytes, Backing(2, self.copies)))
        self.start_agent(node)

    def start_agent(self, node: int) -> None:
        agent = NodeBackups(
            self.caches[node].address,
            (2 * node, 2 * node + 1),
            f"node-{node}",
            node,
            RUN,
            lambda message: self._heard(node, agent, message),
        )
        agent.use_addresses(["127.0.0.1"])
        self.agents[node] = agent
        self._greet(node, agent)
        agent.start()

    def stop_agent(self, node: int) -> None:
        with self._guard:
            agent = self.agents.pop(node)
            self.cluster.nodes[node].agent = None
        agent.stop()
        agent._thread.join()

    def age(self, node: int, seconds: float) -> None:
        """Its agent was heard so long ago."""
        with self._guard:
            self.cluster.nodes[node].heard_s = time.monotonic() - seconds

    def lose(self, node: int) -> None:
        self.stop_agent(node)
        with self._guard:
            self.cluster.nodes[node].launcher = None
        self._stacks.pop(node).close()
        del self.caches[node]

    def save(self, step: int, incarnation: int = 0, index: int | None = None) -> dict[int, bytes]:
        """All ranks save, as their workers would."""
        saved: dict[int, bytes] = {}
        for node, cache in self.caches.items():
            for rank in (2 * node, 2 * node + 1):
                rank_slots = RankSlots(cache.address, rank)
                slot = 0
                if rank_slots.slots:
                    taken = rank_slots.take(lambda: Key(incarnation, step))
                    assert taken is not None
                    rank_slots.slots[taken].unlock()
                    slot = taken
                rank_slots.close()
                saved[rank] = seal_state(
                    cache.address, rank, state_of(rank, step), Key(incarnation, step),
                    rank=rank, world_size=2 * self.count, index=slot,
                )  # fmt: skip
        return saved

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, (self.backups.plan.__dict__, self.backups.waits())
            time.sleep(0.02)
        return found

    def until_complete(self, step: int) -> None:
        def complete() -> bool:
            with self._guard:
                key = self.backups.plan.complete
                return key is not None and key.step >= step

        self.until(complete)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for node in list(self.agents):
            self.lose(node)
        for stack in self._stacks.values():
            stack.close()

    def _greet(self, node: int, agent: NodeBackups) -> None:
        with self._guard:
            self.backups.forget(node)
            here = self.cluster.nodes[node]
            here.agent, here.launcher, here.heard_s = id(agent), node, time.monotonic()
            for message in agent.again():
                self._heard(node, agent, message)

    def _heard(self, node: int, agent: NodeBackups, message: Message) -> None:
        with self._guard:
            if self.agents.get(node) is not agent:
                return
            if isinstance(message, Inventory):
                self.backups.heard(self.cluster.nodes[node], message)
            elif isinstance(message, Locate):
                located = self.backups.locate(message, self.cluster, self.count, time.monotonic())
                if located is not None:
                    agent.received(located)

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            with self._guard:
                said = self.backups.tick(self.cluster, self.count, time.monotonic())
                by_peer = {id(agent): agent for agent in self.agents.values()}
            for peer, order in said:
                assert isinstance(order, BackUp)
                if peer in by_peer:
                    by_peer[peer].received(order)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes(3)
    yield made
    made.close()


def backed_up_on(nodes: Nodes, node: int, rank: int) -> dict[Key, bytes]:
    return stands(nodes.caches[node].address, backup_of(rank))


def room_for_own(address: str, rank: int, stack: ExitStack) -> Callable[[Record], Incoming]:
    def room(record: Record) -> Incoming:
        answer = ask(address, Reserve(rank, slot_bytes(record), 2))
        board, slots = Board(answer.board), [Slot(descriptor, apart=True) for descriptor in answer.slots]
        stack.callback(board.close)
        for slot in slots:
            stack.callback(slot.close)
        return Incoming(slots[0], board, rank, 0, record)

    return room


def test_every_rank_is_backed_up_on_the_next_node(nodes: Nodes) -> None:
    saved = nodes.save(1)
    nodes.until_complete(1)
    for rank, data in saved.items():
        assert backed_up_on(nodes, (rank // 2 + 1) % 3, rank)[Key(0, 1)] == data
    later = {}
    for step in (2, 3, 4, 5):
        later = nodes.save(step)
    nodes.until_complete(3)  # of 2 to 5 one that all had kept
    nodes.until_complete(5)
    for rank, data in later.items():
        assert backed_up_on(nodes, (rank // 2 + 1) % 3, rank)[Key(0, 5)] == data


def test_what_is_backed_up_stays_in_the_own_cache_until_the_next_is(nodes: Nodes) -> None:
    nodes.save(1)
    nodes.until_complete(1)
    board = Board(ask(nodes.caches[0].address, Open(0)).board)
    nodes.until(lambda: board.kept()[0] == Key(0, 1))
    nodes.stop_agent(1)  # so that no later one can be
    for step in range(2, 9):
        nodes.save(step)
        assert Key(0, 1) in stands(nodes.caches[0].address, 0)
    nodes.stop_agent(0)
    nodes.save(9)
    assert Key(0, 1) in stands(nodes.caches[0].address, 0)  # no agent is needed for that
    board.close()


def test_a_lost_node_comes_back_and_everything_is_backed_up_again(nodes: Nodes) -> None:
    saved = nodes.save(1)
    nodes.until_complete(1)
    nodes.lose(1)
    # The ring closes without it: what it backed up goes to the next, what is left of its own is copied once more.
    nodes.until(lambda: Key(0, 1) in backed_up_on(nodes, 2, 0))
    for rank in (2, 3):
        nodes.until(lambda rank=rank: Key(0, 1) in backed_up_on(nodes, 0, rank))
        assert backed_up_on(nodes, 0, rank)[Key(0, 1)] == saved[rank]
    nodes.boot(1)
    source = NeighbourSource(nodes.agents[1])
    for rank in (2, 3):
        assert nodes.until(lambda rank=rank: source.keys(rank)) == {Key(0, 1)}
        with ExitStack() as stack:
            where = source.bring(Key(0, 1), rank, room_for_own(nodes.caches[1].address, rank, stack))
        assert where in ("the backup on node-2", "the backup on node-0")
        assert stands(nodes.caches[1].address, rank) == {Key(0, 1): saved[rank]}
    nodes.until(lambda: Key(0, 1) in backed_up_on(nodes, 1, 0))
    nodes.until(lambda: not backed_up_on(nodes, 2, 0))  # belongs elsewhere again
    with pytest.raises(CheckpointError, match=r"no other node holds step 9"), ExitStack() as stack:
        source.bring(Key(0, 9), 2, room_for_own(nodes.caches[1].address, 2, stack))


def test_ranks_that_come_back_before_they_were_elsewhere_go_on_with_what_they_left(nodes: Nodes) -> None:
    saved = nodes.save(1)
    nodes.stop_agent(0)
    nodes.caches[0].cache.leave((0, 1))
    nodes.start_agent(0)
    source = NeighbourSource(nodes.agents[0])
    assert nodes.until(lambda: source.keys(0)) == {Key(0, 1)}
    with ExitStack() as stack:
        where = source.bring(Key(0, 1), 0, room_for_own(nodes.caches[0].address, 0, stack))
    assert where == "the backup on node-0"
    assert stands(nodes.caches[0].address, 0) == {Key(0, 1): saved[0]}


def test_a_node_that_had_no_part_is_given_what_all_ranks_have_alike(nodes: Nodes) -> None:
    saved = nodes.save(1)
    nodes.until_complete(1)
    source = NeighbourSource(nodes.agents[2])
    assert source.keys(9) == frozenset()
    answer = ask(nodes.caches[0].address, Open(1))
    slots = [Slot(descriptor) for descriptor in answer.slots]
    for slot in slots:
        if slot.record():
            slot.say_alike(Key(0, 1))
        slot.close()
    assert nodes.until(lambda: source.keys(9)) == {Key(0, 1)}
    address = nodes.caches[2].address
    with ExitStack() as stack:
        assert source.bring(Key(0, 1), 9, room_for_own(address, 9, stack)) == "the cache of node-0"
    assert stands(address, 9) == {Key(0, 1): saved[1]}
    offers, refused = RankSlots(address, 9).offers(world_size=10)
    assert (offers.keys(), refused) == ({Key(0, 1)}, [])
    _, refused = RankSlots(address, 4).offers(world_size=10)
    assert refused == ["the snapshot of rank 4 at step 1 is not restored: it is of rank 4 of 6"]
    os.close(answer.board)


def test_a_new_controller_and_new_agents_go_on(nodes: Nodes) -> None:
    nodes.save(1)
    nodes.until_complete(1)
    nodes.new_controller()
    nodes.until_complete(1)
    assert nodes.backups.plan.keep == Key(0, 1)
    nodes.stop_agent(2)
    nodes.start_agent(2)
    nodes.save(2)
    nodes.until_complete(2)


def test_who_asks_waits_for_an_agent_that_comes_back(nodes: Nodes) -> None:
    nodes.save(1)
    nodes.until_complete(1)
    nodes.lose(0)
    nodes.until(lambda: Key(0, 1) in backed_up_on(nodes, 2, 0))
    holders = [node for node in (1, 2) if Key(0, 1) in backed_up_on(nodes, node, 0)]
    nodes.boot(0)
    for node in holders:
        nodes.stop_agent(node)
    asked: list[frozenset[Key]] = []
    asking = threading.Thread(target=lambda: asked.append(NeighbourSource(nodes.agents[0]).keys(0)))
    asking.start()
    asking.join(0.3)
    assert not asked
    for node in holders:
        nodes.age(node, 20)  # its launcher is there, and starts it again
    asking.join(1.5)
    assert not asked
    for node in holders:
        nodes.start_agent(node)
    asking.join()
    assert asked == [{Key(0, 1)}]


def test_two_copies_stand_on_both_other_nodes() -> None:
    nodes = Nodes(3, copies=2)
    try:
        saved = nodes.save(1)
        nodes.until_complete(1)
        for node in (1, 2):
            assert backed_up_on(nodes, node, 0)[Key(0, 1)] == saved[0]
    finally:
        nodes.close()


def test_without_memory_for_backups_training_keeps_what_it_has_and_that_is_said() -> None:
    nodes = Nodes(2, limit_bytes=200_000)
    try:
        for step in (1, 2, 3):
            nodes.save(step)
        assert "no memory for the slots that backups take" in nodes.until(nodes.backups.waits)
        assert nodes.backups.plan.complete is None
    finally:
        nodes.close()


def test_a_damaged_source_is_said_and_never_counts(nodes: Nodes) -> None:
    nodes.save(1)
    answer = ask(nodes.caches[0].address, Open(0))
    Board(answer.board).close()
    slots = [Slot(descriptor, apart=True) for descriptor in answer.slots]
    for slot in slots:
        if slot.record():
            slot.memory[4096] ^= 255
    assert "came damaged" in nodes.until(nodes.backups.waits)
    assert backed_up_on(nodes, 1, 0) == {}
    for slot in slots:
        slot.close()


def test_a_cache_that_cannot_be_looked_at_is_told_and_what_was_told_before_stands(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.save(1)
    nodes.until_complete(1)
    agent = nodes.agents[1]

    def fails(owner: int) -> frozenset[Key]:
        raise CheckpointError("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(agent.states, "held", fails)
        assert nodes.until(nodes.backups.waits) == "node 1: too many open files"
        assert nodes.backups.plan.complete == Key(0, 1)
        place = Place(nodes.caches[1].address, (2, 3), 1, 6, tmp_path)
        told_by = Checkpoints(place, agent)
        told_by.look()
        told_by.stop()
        told = json.loads((tmp_path / FILE).read_text())
        assert told["troubles"] == ["backups: too many open files"]
    nodes.until(lambda: not nodes.backups.waits())
