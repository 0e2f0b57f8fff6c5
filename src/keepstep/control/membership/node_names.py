"""Names of nodes, by which all else tells them apart: where two machines have one name, the later gets another."""

from __future__ import annotations

from itertools import count

from keepstep.control.membership.rendezvous import MOST_NODES
from keepstep.wire.messages import Join

_LONGEST = 255


class NodeNames:
    """Which machine has which name."""

    def __init__(self) -> None:
        self._machines: dict[str, str] = {}  # by name

    def another(self, join: Join) -> str:
        """The name that a joining node is to have, as another machine has its own; "": it keeps its own.

        It tells the node's address, and a number where two have one address.
        """
        if not join.machine or self._is_its(join.node, join.machine):
            return ""
        base = f"{join.node[: _LONGEST - 64]}@{join.address[:48]}"
        names = (base if number == 1 else f"{base}#{number}" for number in count(1))
        return next(name for name in names if self._is_its(name, join.machine))

    def told(self, join: Join, name: str) -> str:
        """The line that tells the operator of another name."""
        told = f"two nodes are named {join.node}: the one at {join.address} is called {name} from now on"
        return f"{told}; give each its own name with KEEPSTEP_NODE_NAME"

    def _is_its(self, name: str, machine: str) -> bool:
        if len(self._machines) >= 2 * MOST_NODES:
            return True  # more than any job has
        return self._machines.setdefault(name, machine) == machine
