"""Which nodes a scheduler should keep other jobs from, as a run's incidents tell. Pure: incidents in, faults out.

A fault needs a proof that is not a rank's word: what the kernel says, or that the scheduler cannot reach the node
either, or that its ranks were measured to be slow and are not on a spare. See docs/design/schedulers.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from keepstep.core.incident import REPLACEMENT, Incident
from keepstep.core.log_lines import one_line
from keepstep.core.told import KERNEL_SOURCES
from keepstep.launch.node.checks.kernel_log import tell_of_broken_hardware
from keepstep.report.validation import clears

_MOST_REASON = 200  # characters
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class NodeFault:
    """What is wrong with a node.

    ``kind`` "lost": only where the scheduler cannot reach it either; "told": an operator says so, and no incident.
    """

    node: str
    kind: Literal["hardware", "lost", "slow", "told"]
    incident: int
    text: str

    def reason(self, run: str) -> str:
        """The reason as a scheduler shows it: one line without quotation marks."""
        proof = "by hand:" if self.kind == "told" else f"incident={self.incident:04d}"
        said = f"[node_problem] keepstep run={run} {proof} {self.text}"
        return one_line(said).replace('"', "'")[:_MOST_REASON]


def faults_of(incident: Incident, members: Collection[str]) -> Iterator[NodeFault]:
    """The faults of nodes that an incident tells of, one each. ``members``: names of the nodes that play ranks now."""
    number, cause = incident.number, incident.cause
    spoken = [] if cause is None else [one for one in (cause.first, *cause.then) if one is not None]
    by_kernel = [one for one in spoken if one.source in KERNEL_SOURCES and one.node]
    if by_kernel and incident.has_deaths and cause is not None and cause.confidence == "high":
        node = by_kernel[0].node
        if tell_of_broken_hardware([one.text for one in by_kernel if one.node == node]):
            rank = next((f"rank={one.rank} " for one in incident.culprits if one.rank is not None), "")
            yield NodeFault(node, "hardware", number, f"{rank}{cause.title}")
        return
    slow: set[str] = set()
    is_nodes = _is_nodes(incident)
    for one in incident.culprits:
        if incident.kind == "crash" and one.rank is None and one.cause == "node lost" and one.node:
            yield NodeFault(one.node, "lost", number, "node lost")
        replaced = is_nodes and bool(members) and one.node not in members
        if incident.kind == "slow" and one.rank is not None and one.confidence == "high" and replaced:
            if one.node in slow:
                continue  # all ranks of a slow node are slow
            slow.add(one.node)
            yield NodeFault(one.node, "slow", number, f"rank={one.rank} slow x{one.slowdown:.1f}")


def _is_nodes(incident: Incident) -> bool:
    """Whether a slowness is the node's, not that of what its ranks do: on a spare the same ranks were faster.

    Not where a validation has found devices and links to be alike.
    """
    replaced = [one for one in incident.actions if one.name == REPLACEMENT]
    alike = any(one.what == "validation" and clears(one.detail) for one in incident.events)
    return bool(replaced) and replaced[-1].has_helped and not alike


class DrainBudget:
    """How many nodes may be taken from other jobs: within an hour a tenth of the job's, and one at least."""

    def __init__(self, nodes: int, taken_s: Iterable[float] = ()) -> None:
        """``taken_s``: when nodes were taken before, by the clock that `take` is given."""
        self.most = max(1, nodes // 10)
        self._taken_s = list(taken_s)

    @property
    def taken_s(self) -> tuple[float, ...]:
        """When nodes were taken, as far as it still counts."""
        return tuple(self._taken_s)

    def take(self, now_s: float) -> bool:
        """Whether one more may be taken now; it counts as taken then."""
        self._taken_s = [one for one in self._taken_s if now_s - one < _HOUR_S]
        if len(self._taken_s) >= self.most:
            return False
        self._taken_s.append(now_s)
        return True
