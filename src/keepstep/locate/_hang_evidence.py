"""What is known about a hang: the input of every function that diagnoses one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from keepstep.core.summary import OpInFlight, RankState
from keepstep.locate._paths import Pair, Paths, pairs_among
from keepstep.locate._waiting import Pending
from keepstep.locate.clocks import Clocks

MAX_CULPRITS = 64  # named in one diagnosis
FEW = 4  # if there are more suspects than this, they are unlikely all at fault
STOPPED = ("T", "t")  # process states in Linux: stopped by a signal, stopped by a debugger
UNKNOWN_PROCESS = "?"  # process state of a rank that is known only from a trace
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class HangEvidence:
    """What is known about a hang."""

    states: Mapping[int, RankState]  # by rank, of the ranks that reported
    pending: Sequence[Pending]  # operations that some rank is still in
    nodes: Mapping[int, str]  # node name by rank, of all ranks of the job
    silent_nodes: frozenset[str]  # nodes whose agent does not answer
    clocks: Clocks | None
    paths: Paths  # network paths between nodes, as far as probed or seen in traffic

    @property
    def silent(self) -> list[int]:
        """Ranks that have not reported, ascending."""
        return sorted(set(self.nodes) - set(self.states))

    def pairs(self, operation: Pending) -> list[Pair]:
        """The pairs of nodes between which the operation sends data, as far as that is known."""
        nodes = [self.nodes[rank] for rank in sorted(members_of(operation)) if self.nodes.get(rank)]
        around = {self.nodes.get(rank, "") for rank in operation.waiting} if operation.through else ()
        return pairs_among(nodes, around)


@dataclass(frozen=True, slots=True)
class Roots:
    """The roots of the wait-for graph."""

    ranks: tuple[int, ...]  # others wait for them, and they wait for nobody
    blocked: frozenset[int]  # ranks that wait in some operation
    sure: bool  # whether they were found without ignoring any wait


def waits_in(known: HangEvidence, rank: int, p: Pending) -> bool:
    """Whether the rank has been seen to wait for the operation to end, not only to have it in flight."""
    return any(flight.waits and is_of(flight, p) for flight in known.states[rank].in_flight)


def is_of(flight: OpInFlight, p: Pending) -> bool:
    """Whether this operation in flight is the rank's part of ``p``."""
    return flight.group == p.group and flight.seq == p.seq and (flight.peer < 0) == p.collective


def members_of(p: Pending) -> tuple[int, ...]:
    """All ranks of the operation: the group of a collective, or the two ends of a message."""
    return p.members if p.collective else (p.source, p.target)
