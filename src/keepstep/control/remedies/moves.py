"""Remedies that re-form the job with its ranks on other nodes: what they have in common, and how they are told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keepstep.control.incidents.case import Desk
from keepstep.control.remedies.device_speeds import Devices, Look
from keepstep.core.incident import Action, Culprit
from keepstep.core.ranges import fold_ranks

if TYPE_CHECKING:
    from keepstep.control.incidents.slow_case import SlowCase
    from keepstep.mitigate import Remedy

_PAUSE_S = 2.5  # assumed cost until one was measured: that of a small job with warm standbys
_ORDERED_S = 240.0  # an order without an effect for so long has failed


class Move(ABC):
    """One kind of move in one job. ``pause_s``: how long the last one took, from the order to the first new step."""

    name: str

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.pause_s = _PAUSE_S
        self._ordered_s: float | None = None

    @abstractmethod
    def may_help(self, cases: Sequence[SlowCase]) -> bool:
        """Whether it could help against these slowdowns, so that measuring is worth while."""

    @abstractmethod
    def remedy(self, look: Look) -> Remedy | None:
        """The remedy that this move is now, with its cost and effect; None: it cannot help."""

    @abstractmethod
    def told(self) -> str:
        """What the last `remedy` would do, in words."""

    @abstractmethod
    def is_done(self, exchanged: bool) -> bool:
        """Whether the job was re-formed as was ordered; ``exchanged``: with nodes in each other's places."""

    @abstractmethod
    def _have_done(self, now_s: float) -> str:
        """Order what the last `remedy` would do; why that is refused, or ""."""

    def order(self, now_s: float) -> str:
        refused = self._have_done(now_s)
        self._ordered_s = None if refused else now_s
        return refused

    @property
    def is_ordered(self) -> bool:
        """Whether the job is about to be re-formed for this move."""
        return self._ordered_s is not None

    def tick(self, now_s: float) -> str:
        """Let time pass. Returns why the order has failed, or ""."""
        if self._ordered_s is None or now_s - self._ordered_s < _ORDERED_S:
            return ""
        self._ordered_s = None
        return "not all ranks sealed a step"

    def begun_again(self) -> bool:
        """Note that the job was re-formed; returns whether that was ordered here."""
        was_ordered, self._ordered_s = self._ordered_s is not None, None
        return was_ordered

    def _rank_of(self) -> dict[str, int]:
        """Node ranks by name."""
        return {node.name: rank for rank, node in self._desk.cluster.nodes.items()}

    def _names(self, nodes: Iterable[int]) -> list[str]:
        """The names of these node ranks."""
        return [self._desk.cluster.nodes[rank].name for rank in nodes]


@dataclass(slots=True)
class Moved:
    """A move that was ordered for a slowdown."""

    move: Move
    case: SlowCase
    action: Action
    since_s: float  # time of the order; once the job is halted for it, time of the halt
    devices: Devices | None = None  # device speeds before the move; None once fitting shares were ordered
    halted: bool = False
    step: int = -1  # the last step before the move
    agent: int | None = None  # peer number of the agent that watched rank 0 until the move
    done: bool = False
    pause_s: float | None = None  # how long the move took, up to the first new step


def culprits_of(cases: Sequence[SlowCase]) -> list[Culprit]:
    """All culprits of these slowdowns."""
    return [one for case in cases if case.incident is not None for one in case.incident.culprits]


def movable_culprits(look: Look) -> list[Culprit]:
    """All culprits, without ranks that are not, or no longer, the slow ones in most iterations."""
    return [one for one in culprits_of(look.cases) if one.rank is None or look.may_be_moved(one.rank)]


def shares_in_words(shares: Sequence[int]) -> str:
    """Shares in a line: ``13 to replicas 0-2, 7 to replica 3``."""
    by_share: dict[int, list[int]] = {}
    for replica, share in enumerate(shares):
        by_share.setdefault(share, []).append(replica)
    told = [
        f"{share} to replica{'s' if len(those) > 1 else ''} {fold_ranks(those)}"
        for share, those in sorted(by_share.items(), reverse=True)
    ]
    return ", ".join(told[:6]) + (", …" if len(told) > 6 else "")
