"""What is known of a hang, for all that judges it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from keepstep.core.summary import OpInFlight, RankState
from keepstep.locate._paths import Pair, Paths, pairs_among
from keepstep.locate._waiting import Pending
from keepstep.locate.clocks import Clocks

MAX_CULPRITS = 64
FEW = 4  # more roots than this are hardly all at fault
STOPPED = ("T", "t")
UNKNOWN_PROCESS = "?"  # process state of a rank known from a trace only
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class HangEvidence:
    """What is known of the hang; ``blocked`` are the ranks that wait in some operation."""

    states: Mapping[int, RankState]
    pending: Sequence[Pending]
    nodes: Mapping[int, str]
    silent_nodes: frozenset[str]
    clocks: Clocks | None
    paths: Paths

    @property
    def silent(self) -> list[int]:
        return sorted(set(self.nodes) - set(self.states))

    def pairs(self, operation: Pending) -> list[Pair]:
        """The pairs of nodes between which the operation's data goes, as far as that can be told."""
        nodes = [self.nodes[rank] for rank in sorted(members_of(operation)) if self.nodes.get(rank)]
        around = {self.nodes.get(rank, "") for rank in operation.waiting} if operation.through else ()
        return pairs_among(nodes, around)


@dataclass(frozen=True, slots=True)
class Roots:
    ranks: tuple[int, ...]
    blocked: frozenset[int]
    sure: bool  # found with every wait taken as one, not by leaving some out


def waits_in(known: HangEvidence, rank: int, p: Pending) -> bool:
    return any(flight.waits and is_of(flight, p) for flight in known.states[rank].in_flight)


def is_of(flight: OpInFlight, p: Pending) -> bool:
    return flight.group == p.group and flight.seq == p.seq and (flight.peer < 0) == p.collective


def members_of(p: Pending) -> tuple[int, ...]:
    return p.members if p.collective else (p.source, p.target)
