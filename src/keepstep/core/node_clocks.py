"""The clocks of a job's nodes, as far as they could be compared with each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class NodeClock:
    """One node's clock against the reference: reference time = t + offset_s + drift * (t - at_s)."""

    offset_s: float
    drift: float  # seconds per second
    at_s: float  # the moment on the node's clock for which ``offset_s`` holds
    bound_s: float  # the offset's greatest possible error at ``at_s``; infinite when nothing bounds it
    drift_bound: float  # the drift's greatest possible error


@dataclass(frozen=True, slots=True)
class ClockOffsets:
    """The clocks of all nodes against that of ``reference``. Unknown nodes have offset 0 and an infinite bound."""

    reference: str
    nodes: Mapping[str, NodeClock]

    def among(self, nodes: Collection[str]) -> ClockOffsets:
        """All clocks are known already, whatever ``nodes`` are asked for."""
        return self

    def offset_s(self, node: str, at_s: float | None = None) -> float:
        """What to add to ``node``'s clock to get the reference's.

        ``at_s`` is a time on the node's clock; without it, the newest sample's.
        """
        clock = self.nodes.get(node)
        if clock is None:
            return 0.0
        return clock.offset_s + (0.0 if at_s is None else clock.drift * (at_s - clock.at_s))

    def bound_s(self, node: str, at_s: float | None = None) -> float:
        """The greatest possible error of `offset_s`, in seconds."""
        clock = self.nodes.get(node)
        if clock is None:
            return math.inf
        return clock.bound_s + (0.0 if at_s is None else clock.drift_bound * abs(at_s - clock.at_s))

    def to_reference_s(self, node: str, time_s: float) -> float:
        """A time on ``node``'s clock as time on the reference's."""
        return time_s + self.offset_s(node, time_s)


class Clocks(Protocol):
    """Clock offsets that may have to be computed first: those of a large job's nodes, only when asked for."""

    def among(self, nodes: Collection[str]) -> ClockOffsets | None:
        """Offsets of these nodes' clocks, perhaps of others too; None when that would take too long."""
        ...
