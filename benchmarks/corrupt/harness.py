"""All ranks of a job in one process: real snapshots in real caches, the agents' tellers and the controller's core.

What is left out is training, processes and the wire between them: a message goes straight to where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch.distributed import HashStore

from keepstep.agent.services.checksums import ChecksumTeller
from keepstep.checkpoint.memory.cached_states import CachedStates
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.snapshot import Snapshots, Worker
from keepstep.control.controller import Controller
from keepstep.control.effects import Say, Send, WriteIncident
from keepstep.control.settings import Settings
from keepstep.core.incident import Incident
from keepstep.wire.messages import Doubt, Families, Heartbeat, Hello, RankBeat, WhichFamilies


class Rank(Protocol):
    """A rank, made anew in each incarnation."""

    @property
    def state(self) -> dict[str, Any]:
        """What it saves."""
        ...

    def step(self, number: int) -> None:
        """Make one step."""
        ...


R = TypeVar("R", bound=Rank)


class Harness(Generic[R]):
    """A job of ``per_node`` ranks on each node, whose caches have these addresses; ``make`` makes a rank."""

    def __init__(self, caches: Sequence[str], per_node: int, make: Callable[[int], R]) -> None:
        self._caches, self._per_node, self._make = caches, per_node, make
        self.size = per_node * len(caches)
        self.said: list[str] = []  # what is printed of incidents
        self.incidents: dict[int, Incident] = {}  # by number, the newest of each
        self.doubts: list[int] = []  # packed keys of `Doubt`
        self.incarnation = 0
        self.tellers: list[ChecksumTeller] = []
        self._states: list[CachedStates] = []
        for node, cache in enumerate(caches):
            states = CachedStates(cache, self._on(node))
            place = node, self.size
            self.tellers.append(
                ChecksumTeller(
                    states, self._on(node), *place, lambda sent, node=node: self._heard(node, sent)
                )
            )
            self._states.append(states)
        self.new_controller()
        self._begin()

    def new_controller(self) -> None:
        """Have another controller, which knows nothing, in the place of the last one."""
        self.controller = Controller(Settings(nodes=len(self._caches)))
        for node in range(len(self._caches)):
            self.controller.connected(node, "agent")
            self._heard(node, Hello("agent", f"gpu-{node}", node, 100 + node))
            self._heard(
                node, Heartbeat(node, 1, 1.0, tuple(RankBeat(rank, 0, 0, 0) for rank in self._on(node)))
            )

    def train(self, first: int, last: int) -> None:
        """Make these steps, and save each."""
        for number in range(first, last + 1):
            for rank in self.ranks:
                rank.step(number)
            self.save(number)

    def save(self, number: int) -> None:
        """Save all ranks, and have agents look at what they have saved."""
        for rank, snapshots in zip(self.ranks, self.snapshots, strict=True):
            snapshots.save(rank.state, number)
            snapshots.wait()
        for teller in self.tellers:
            teller.look()

    def restart(self) -> int:
        """All ranks begin again; returns the step that they go on from."""
        for snapshots in self.snapshots:
            snapshots.close()
        self.incarnation += 1
        self._begin()
        pairs = zip(self.ranks, self.snapshots, strict=True)
        (step,) = {snapshots.load(rank.state) for rank, snapshots in pairs}
        return step or 0

    def close(self) -> None:
        """Unmap everything."""
        for one in (*self.snapshots, *self._states):
            one.close()

    def _on(self, node: int) -> range:
        return range(node * self._per_node, (node + 1) * self._per_node)

    def _begin(self) -> None:
        self.ranks = [self._make(number) for number in range(self.size)]
        local, size = (self.size if len(self._caches) == 1 else self._per_node), self.size
        store = HashStore()  # each incarnation has one
        self.snapshots = [
            Snapshots(
                self._caches[number // self._per_node],
                Worker(number, size, local, self.incarnation),
                lambda row: [row] * size,  # all ranks have the same
                store=lambda: store,
            )
            for number in range(size)
        ]

    def _heard(self, node: int, message: Any) -> None:
        for effect in self.controller.message(node, message, 1.0):
            if isinstance(effect, Say):
                self.said.append(effect.what)
            elif isinstance(effect, WriteIncident):
                self.incidents[effect.incident.number] = effect.incident
            elif isinstance(effect, Send):
                self._ordered(node, effect)

    def _ordered(self, node: int, order: Send) -> None:
        if isinstance(order.message, WhichFamilies):
            digest = order.message.digest
            self._heard(node, Families(digest, self.tellers[node].families(digest)))
        elif isinstance(order.message, Doubt):
            self.doubts.append(order.message.key)
            for peer in order.peers:
                self.tellers[peer].doubt(Key.unpack(order.message.key))
