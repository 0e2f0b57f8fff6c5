"""What is known about a hang: the input of every function that diagnoses one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.core.evidence import Evidence
from keepstep.core.summary import OpInFlight, RankState
from keepstep.locate._paths import Pair, Paths, pairs_among
from keepstep.locate._waiting import Pending

MAX_CULPRITS = 64  # ranks that are named in one diagnosis
FEW = 4  # suspects; more than this are unlikely all at fault
STOPPED = ("T", "t")  # states of Linux processes: stopped by a signal, stopped by a debugger
UNKNOWN_PROCESS = "?"  # process state of a rank that is known only from a trace


@dataclass(frozen=True, slots=True)
class HangEvidence:
    """The evidence about a hang, arranged for the questions that the diagnosing functions ask."""

    given: Evidence
    states: Mapping[int, RankState]  # state by rank, of the ranks that reported
    pending: Sequence[Pending]  # operations that some rank is still in
    paths: Paths  # network paths between nodes, as far as probed or seen in traffic

    @property
    def nodes(self) -> Mapping[int, str]:
        """Node name by rank, of all ranks of the job."""
        return self.given.nodes

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

    ranks: tuple[int, ...]  # ranks that others wait for, and that wait for nobody
    blocked: frozenset[int]  # ranks that wait in some operation
    sure: bool  # whether the roots were found without ignoring any wait


def waits_in(known: HangEvidence, rank: int, p: Pending) -> bool:
    """Whether the rank has been seen to wait for the operation to end, not only to have it in flight."""
    return any(flight.waits and is_of(flight, p) for flight in known.states[rank].in_flight)


def is_of(flight: OpInFlight, p: Pending) -> bool:
    """Whether this operation in flight is the rank's part of ``p``."""
    return flight.group == p.group and flight.seq == p.seq and (flight.peer < 0) == p.collective


def members_of(p: Pending) -> tuple[int, ...]:
    """All ranks of the operation: the group of a collective, or the two ends of a message."""
    return p.members if p.collective else (p.source, p.target)
