"""Remedies that begin the job anew with its ranks on other nodes: what exchange and replacement have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keepstep.control.incidents.case import Desk
from keepstep.core.summary import PeerTraffic

if TYPE_CHECKING:
    from keepstep.control.incidents.slow_case import SlowCase
    from keepstep.core.microbatches import Split
    from keepstep.mitigate import Remedy, Replicas

_PAUSE_S = 2.5  # what it costs, before one was measured: that of small jobs with warm standbys
_ORDERED_S = 240.0  # an order that has had no effect for so long has none


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of a job that is slow. Seconds of an iteration: before, and now.

    ``seconds``: for a micro-batch, by rank; empty where ranks do not say how they divide these. ``stages``: of the
    pipeline, by rank; None: not known. ``volumes``: bytes an iteration by pair of nodes, as ranks have called for.
    """

    cases: Sequence[SlowCase]
    traffic: Sequence[PeerTraffic]
    replicas: Replicas | None
    healthy_s: float
    iteration_s: float
    splits: Mapping[int, Split] = field(default_factory=dict[int, "Split"])
    seconds: Mapping[int, float] = field(default_factory=dict[int, float])
    stages: Mapping[int, int] | None = None
    volumes: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])


class Move(ABC):
    """One of them, of one job. ``pause_s``: from the order until a step that was new, the last time."""

    name: str

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.pause_s = _PAUSE_S
        self._ordered_s: float | None = None

    @abstractmethod
    def may_help(self, cases: Sequence[SlowCase]) -> bool:
        """Whether it could do anything about them: more has to be known."""

    @abstractmethod
    def remedy(self, look: Look) -> Remedy | None:
        """What it would do; None: nothing."""

    @abstractmethod
    def told(self) -> str:
        """That of which `remedy` spoke, in words."""

    @abstractmethod
    def is_done(self, exchanged: bool) -> bool:
        """Whether the job was formed anew as was ordered; ``exchanged``: with nodes in each other's places."""

    @abstractmethod
    def _have_done(self, now_s: float) -> str: ...

    def order(self, now_s: float) -> str:
        """Have that done of which `remedy` spoke; why not, or ""."""
        refused = self._have_done(now_s)
        self._ordered_s = None if refused else now_s
        return refused

    @property
    def is_ordered(self) -> bool:
        """The job is about to begin anew for it."""
        return self._ordered_s is not None

    def tick(self, now_s: float) -> str:
        """Why an order has come to nothing, or ""."""
        if self._ordered_s is None or now_s - self._ordered_s < _ORDERED_S:
            return ""
        self._ordered_s = None
        return "not all ranks sealed a step"

    def begun_again(self) -> bool:
        """The job was formed anew; whether that was to be expected."""
        was_ordered, self._ordered_s = self._ordered_s is not None, None
        return was_ordered
