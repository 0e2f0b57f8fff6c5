"""Remedy S4: spares take the ranks of slow nodes, which leave the job (GREYHOUND §5.2, checkpoint and restart).

All ranks seal a step and the job begins anew from what is in memory, as after the loss of these nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keepstep.control.remedies.moves import Look, Move
from keepstep.core.incident import Culprit
from keepstep.core.ranges import fold_nodes

if TYPE_CHECKING:
    from keepstep.control.incidents.case import Desk
    from keepstep.control.incidents.slow_case import SlowCase
    from keepstep.mitigate import Remedy

RESTART = "S4, replacement of nodes"


class Replacement(Move):
    """Of one job."""

    name = RESTART

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._found: dict[int, str] = {}  # nodes by rank, and why each
        self._names: tuple[str, ...] = ()

    def may_help(self, cases: Sequence[SlowCase]) -> bool:
        """See `Move`."""
        return bool(self._replaceable(self._blamed(cases)))

    def refused(self, cases: Sequence[SlowCase]) -> str:
        """Why none of the nodes that are blamed can be replaced; "" where one can, or none is blamed."""
        blamed = self._blamed(cases)
        if not blamed or self._replaceable(blamed):
            return ""
        return self._desk.rank_moves.irreplaceable(list(blamed)[:1])

    def remedy(self, look: Look) -> Remedy | None:
        """See `Move`."""
        from keepstep.mitigate import Remedy

        blamed = self._blamed(look.cases)
        self._found = self._replaceable(blamed)
        if not self._found or any(one.link for one in _culprits(look.cases)):
            return None  # of a link the replaced node may be an end or not
        rest = [one.slowdown for one in _culprits(look.cases) if self._rank(one.node) not in self._found]
        return Remedy(RESTART, self.pause_s, min(look.healthy_s * max([1.0, *rest]), look.iteration_s))

    def told(self) -> str:
        """See `Move`."""
        names = [self._desk.cluster.nodes[rank].name for rank in self._found]
        return f"{_which(names)} replaced by spares"

    def is_done(self, exchanged: bool) -> bool:
        """See `Move`."""
        return not set(self._names) & {node.name for node in self._desk.cluster.nodes.values()}

    def _have_done(self, now_s: float) -> str:
        self._names = tuple(self._desk.cluster.nodes[rank].name for rank in self._found)
        return self._desk.rank_moves.replace(self._found, f"{_which(self._names)} slow", now_s)

    def _blamed(self, cases: Sequence[SlowCase]) -> dict[int, str]:
        """Nodes by rank, the slowest first, and what is said of each."""
        surely = [one for one in _culprits(cases) if one.rank is not None and one.confidence != "low"]
        found: dict[int, str] = {}
        for one in sorted(surely, key=lambda one: -one.slowdown):
            if (node := self._rank(one.node)) is not None:
                times = f"takes {one.slowdown:.2g} times as long" if one.slowdown > 1 else "is slow"
                found.setdefault(node, f"rank {one.rank} {times} ({one.cause or 'cause unknown'})")
        return found

    def _replaceable(self, blamed: dict[int, str]) -> dict[int, str]:
        """As many of these as there are spares for."""
        chosen: dict[int, str] = {}
        for rank, why in blamed.items():
            if not self._desk.rank_moves.irreplaceable([*chosen, rank]):
                chosen[rank] = why
        return chosen

    def _rank(self, name: str) -> int | None:
        nodes = self._desk.cluster.nodes.items()
        return next((rank for rank, node in nodes if node.name == name), None)


def _culprits(cases: Sequence[SlowCase]) -> list[Culprit]:
    return [one for case in cases if case.incident is not None for one in case.incident.culprits]


def _which(names: Sequence[str]) -> str:
    return f"{fold_nodes(sorted(names))} {'are' if len(names) > 1 else 'is'}"
