"""The slowdowns of the compound run, and the simulated job that they happen to.

What injects reads this; nothing that detects, plans or judges does, but for the offline optimum, which knows them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.simulate import Durations, Fault, Workload

from keepstep.core.layout import ParallelLayout

FILE = Path(__file__).with_name("schedule.json")
PAPER_HEALTHY, PAPER_SLOWED, PAPER_TREATED = 37.4, 18.9, 29.8  # iterations a minute, GREYHOUND §7.5

TP, DP, PP = 8, 16, 2
MICRO_BATCHES = 16  # of each replica, when shares are equal; the paper does not say
# 37.4 iterations a minute with the jitter of `simulate`; a tenth of an iteration reduces gradients.
DURATIONS = Durations(
    forward_s=0.0257,
    backward_s=0.0514,
    data_s=0.002,
    optimizer_s=0.03,
    message_s=0.002,
    tp_s=0.0003,
    dp_s=0.16,
)


@dataclass(frozen=True, slots=True)
class Event:
    """One slowdown, from iteration ``first`` to ``last``, of a rank (``tp`` None: of its whole node) or of a link."""

    number: int
    kind: Literal["compute", "link"]
    severity: Literal["weak", "medium", "severe"]
    times: float  # as long
    first: int
    last: int
    replica: int
    stage: int
    tp: int | None = None
    to_replica: int = -1
    to_stage: int = -1


@dataclass(frozen=True, slots=True)
class Schedule:
    """All of them, ``scale`` applied."""

    iterations: int
    events: tuple[Event, ...]

    @property
    def edges(self) -> list[int]:
        """The iterations at which something begins or ends, with 0 and the end."""
        ends = {one.first for one in self.events} | {one.last + 1 for one in self.events}
        return sorted({0, self.iterations, *(edge for edge in ends if edge < self.iterations)})

    def at(self, iteration: int) -> list[Event]:
        """Those in force."""
        return [one for one in self.events if one.first <= iteration <= one.last]


def load(path: Path = FILE, scale: float | None = None) -> Schedule:
    """Read the schedule; ``scale`` in place of the one that it has."""
    told = json.loads(path.read_text())
    factor = told["scale"] if scale is None else scale
    events = [Event(**one) for one in told["events"]]
    scaled = tuple(replace(one, times=1 + factor * (one.times - 1)) for one in events)
    return Schedule(told["iterations"], scaled)


def workload(seed: int, jitter: float = 1.0) -> Workload:
    """The simulated job: 256 ranks, 8 on each node, so that a node is a stage of a replica."""
    layout = ParallelLayout(tp=TP, dp=DP, pp=PP)
    return Workload(layout, "1f1b", MICRO_BATCHES, 2, DURATIONS, TP, seed, jitter)


def faults(events: Sequence[Event], place_of: Sequence[int]) -> list[Fault]:
    """What is slow, by the ranks that play there now. ``place_of``: by node, as they were at the start."""

    def rank(replica: int, stage: int, tp: int | None) -> int:
        return place_of[stage * DP + replica] * TP + (tp or 0)

    found: list[Fault] = []
    for one in events:
        here = rank(one.replica, one.stage, one.tp)
        span = {"factor": one.times, "first_step": one.first, "last_step": one.last}
        if one.kind == "compute":
            found.append(Fault("compute", here, node=one.tp is None, **span))
        else:
            found.append(Fault("link", here, peer=rank(one.to_replica, one.to_stage, 0), **span))
    return found
