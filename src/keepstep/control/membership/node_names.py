"""Names of nodes, by which all else tells them apart: where two machines have one name, the later gets another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from keepstep.control.membership.rendezvous import MOST_NODES, Rendezvous
from keepstep.wire.messages import Join

_LONGEST = 255


@dataclass(slots=True)
class _Owner:
    machine: str
    address: str
    came: bool = False  # whether it has joined by this name


class NodeNames:
    """Which machine has which name.

    A name is free again when its node is gone. A host that booted, or a container that began again, is another machine
    behind the same address: it has its name back as soon as the node's connection is broken.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._owners: dict[str, _Owner] = {}

    def another(self, join: Join) -> str:
        """The name that a joining node is to have, as another machine has its own; "": it keeps its own.

        It tells the node's address, and a number where two have one address.
        """
        if not join.machine:
            return ""
        if self._is_its(join.node, join):
            if join.node in self._owners:
                self._owners[join.node].came = True
            return ""
        base = f"{join.node[: _LONGEST - 64]}@{join.address[:48]}"
        names = (base if number == 1 else f"{base}#{number}" for number in count(1))
        return next(name for name in names if self._is_its(name, join))

    def told(self, join: Join, name: str) -> str:
        """The line that tells the operator of another name."""
        told = f"two nodes are named {join.node}: the one at {join.address} is called {name} from now on"
        return f"{told}; give each its own name with KEEPSTEP_NODE_NAME"

    def _is_its(self, name: str, join: Join) -> bool:
        owner = self._owners.get(name)
        if owner is None:
            if len(self._owners) < 2 * MOST_NODES:  # no job has more
                self._owners[name] = _Owner(join.machine, join.address)
            return True
        if owner.machine == join.machine:
            return True
        if not owner.came or self._rendezvous.is_here(name):
            return False
        if owner.address != join.address and self._rendezvous.is_placed(name):
            return False  # The node may be back within seconds.
        self._owners[name] = _Owner(join.machine, join.address)
        return True
