"""Remedy S4: spares take the ranks of slow nodes, which leave the job (GREYHOUND §5.2, checkpoint and restart).

All ranks seal a step, and the job is re-formed from the snapshots in memory, as after the loss of these nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keepstep.control.remedies.device_speeds import Look
from keepstep.control.remedies.moves import Move, culprits_of, movable_culprits
from keepstep.core.incident import REPLACEMENT, Action, Culprit
from keepstep.core.ranges import fold_nodes

if TYPE_CHECKING:
    from keepstep.control.incidents.case import Desk
    from keepstep.control.incidents.slow_case import SlowCase
    from keepstep.mitigate import Remedy


class Replacement(Move):
    """The replacement of nodes of one job."""

    name = REPLACEMENT

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._found: dict[int, str] = {}  # why each node is to be replaced, by node rank
        self._abandoned: set[tuple[int, int | None]] = set()  # incidents and ranks of which it was said
        self._leaving: list[str] = []  # names of the nodes whose replacement was ordered

    def may_help(self, cases: Sequence[SlowCase]) -> bool:
        return bool(self._replaceable(self._blamed(culprits_of(cases))))

    def refused(self, cases: Sequence[SlowCase]) -> str:
        """Why none of the nodes that are blamed can be replaced; "" where one can, or none is blamed."""
        blamed = self._blamed(culprits_of(cases))
        if not blamed or self._replaceable(blamed):
            return ""
        return self._desk.rank_moves.irreplaceable(list(blamed)[:1])

    def remedy(self, look: Look) -> Remedy | None:
        from keepstep.mitigate import Remedy

        self._abandon(look)
        self._found = self._replaceable(self._blamed(movable_culprits(look)))
        if not self._found or any(one.rank is None for one in culprits_of(look.cases)):
            return None  # it is not known whether the replaced node is at an end of the link
        ranks = self._rank_of()
        rest = [one.slowdown for one in culprits_of(look.cases) if ranks.get(one.node) not in self._found]
        return Remedy(REPLACEMENT, self.pause_s, min(look.healthy_s * max([1.0, *rest]), look.iteration_s))

    def told(self) -> str:
        return f"{_which(self._names(self._found))} replaced by spares"

    def is_done(self, exchanged: bool) -> bool:
        return self._rank_of().keys().isdisjoint(self._leaving)

    def _have_done(self, now_s: float) -> str:
        self._leaving = self._names(self._found)
        return self._desk.rank_moves.replace(self._found, f"{_which(self._leaving)} slow", now_s)

    def _abandon(self, look: Look) -> None:
        """Say, once for each blamed rank, that its node stays, as the rank is not the slow one any more."""
        ranks, would = self._rank_of(), self._replaceable(self._blamed(culprits_of(look.cases)))
        for case in look.cases:
            incident = case.incident
            for one in incident.culprits if incident is not None else ():
                seen = (look.slow_steps or {}).get(one.rank) if one.rank is not None else None
                if incident is None or seen is None or not seen.must_stay or ranks.get(one.node) not in would:
                    continue
                if (incident.number, one.rank) not in self._abandoned:
                    self._abandoned.add((incident.number, one.rank))
                    why = f"rank {one.rank} is the slow one in {seen.slow} of {len(seen.by_step)} slow iterations"
                    told = f"{REPLACEMENT}: {one.node} stays: {why} since it was named"
                    case.acted(Action("none", None, told), say=True)

    def _blamed(self, culprits: Sequence[Culprit]) -> dict[int, str]:
        """Why nodes are blamed, by node rank; the slowest first."""
        ranks = self._rank_of()
        surely = [one for one in culprits if one.rank is not None and one.confidence != "low"]
        found: dict[int, str] = {}
        for one in sorted(surely, key=lambda one: -one.slowdown):
            if (node := ranks.get(one.node)) is not None:
                times = f"takes {one.slowdown:.2g} times as long" if one.slowdown > 1 else "is slow"
                found.setdefault(node, f"rank {one.rank} {times} ({one.cause or 'cause unknown'})")
        return found

    def _replaceable(self, blamed: dict[int, str]) -> dict[int, str]:
        """The first of these nodes, as many as there are spares for."""
        chosen: dict[int, str] = {}
        for rank, why in blamed.items():
            if not self._desk.rank_moves.irreplaceable([*chosen, rank]):
                chosen[rank] = why
        return chosen


def _which(names: Sequence[str]) -> str:
    return f"{fold_nodes(sorted(names))} {'are' if len(names) > 1 else 'is'}"
