"""Backups go to nodes of another failure domain: what agents say of theirs reaches the plan."""

from __future__ import annotations

from keepstep.checkpoint.memory.slots import Key
from keepstep.control.controller import Controller
from keepstep.control.effects import Send
from keepstep.control.settings import Settings
from keepstep.core.summary import Endpoint
from keepstep.wire.messages import BackUp, Heartbeat, Hello, Inventory, RankBeat, RankKeys

DOMAINS = {0: "rack-1", 1: "rack-1", 2: "rack-2", 3: "rack-2"}


def backed_up_on(domains: dict[int, str]) -> dict[int, tuple[int, ...]]:
    """By node, the ranks of which it is told to hold backups; rank and node are of one number."""
    controller, key = Controller(Settings(nodes=4, backups=1)), Key(0, 1).pack()
    for node in range(4):
        controller.connected(node, "agent")
        hello = Hello("agent", f"gpu-{node}", node, 100 + node, failure_domain=domains.get(node, ""))
        beat = Heartbeat(node, 0, 0.0, (RankBeat(node, 0, 0, 0),))
        here = (Endpoint("10.0.0.1", 1 + node),)
        for message in (hello, beat, Inventory(node, (RankKeys(node, (key,)),), (), endpoints=here)):
            controller.message(node, message, 0.0)
    return {
        effect.peers[0]: effect.message.ranks
        for effect in controller.tick(0.1)
        if isinstance(effect, Send) and isinstance(effect.message, BackUp)
    }


def test_without_labels_the_next_node_backs_up() -> None:
    assert backed_up_on({}) == {0: (3,), 1: (0,), 2: (1,), 3: (2,)}


def test_with_labels_a_node_of_another_domain_does() -> None:
    found = backed_up_on(DOMAINS)
    assert sorted(found) == [0, 1, 2, 3]
    assert all(DOMAINS[node] != DOMAINS[rank] for node, (rank,) in found.items())
