"""What an incident's case may ask of the controller."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from keepstep.control.cluster import Cluster
from keepstep.control.incidents.locators import Locators
from keepstep.core.incident import Action, Diagnosis, Event, Incident, IncidentKind
from keepstep.core.summary import PeerTraffic
from keepstep.report.wording import named
from keepstep.wire.messages import Message

if TYPE_CHECKING:
    from keepstep.control.incidents.slow_case import SlowCase

_MOST_EVENTS = 32


class Desk(Protocol):
    """The controller as its cases see it."""

    cluster: Cluster
    locators: Locators

    def ask_profiles(
        self,
        first_step: int,
        last_step: int,
        now_s: float,
        onset_step: int = -1,
        blocks_of: tuple[int, ...] = (),
    ) -> int:
        """Ask all agents for iterations and traffic around the onset; the number the answers will come under."""
        ...

    def ask_states(self, stacks: bool, now_s: float, nodes: Collection[int] | None = None) -> int:
        """Ask all agents where their ranks are; the number the answers will come under."""
        ...

    def ask_probes(self, pairs: Sequence[tuple[str, str]], now_s: float, load_bytes: int = 0) -> int | None:
        """Have the agents of these pairs of nodes probe each other; the number of the answers, None if none can.

        ``load_bytes`` go along, which shows how fast the path is.
        """
        ...

    def validate(self, case: SlowCase, groups: Sequence[Sequence[int]], now_s: float) -> bool:
        """Hold the job and test these groups for ``case``; False when that may not be, or not now."""
        ...

    def order(self, message: Message, node: int | None = None) -> None:
        """Send to all connected agents, or to one node's."""
        ...

    def exchange(self, takers: Mapping[int, int], why: str, now_s: float) -> str:
        """Have nodes take others' ranks at the next step that all have sealed; why not, or "".

        ``takers``: who takes a node's ranks, by that node; each once (node ranks).
        """
        ...

    def irreplaceable(self, nodes: Collection[int]) -> str:
        """Why spares cannot take these nodes' ranks (by rank); "": they can."""
        ...

    def replace(self, nodes: Mapping[int, str], why: str, now_s: float) -> str:
        """Have spares take these nodes' ranks (by rank, and why each) once all have sealed a step; why not, or ""."""
        ...

    def hold_number(self, now_s: float) -> int:
        """A number for a hold or its tests that no controller of this run has given out before."""
        ...

    def next_number(self) -> int:
        """A number for a new incident, never given out before in this run."""
        ...

    def publish(self, incident: Incident, say: Literal["verdict", "sharper", "acts", "closes", ""]) -> None:
        """Write the incident and, if wanted, print it."""
        ...

    def open_slow(self, incident: Incident, now_s: float) -> SlowCase:
        """A slowdown that the mitigation has found out of itself: say it, and follow it."""
        ...

    def unix_s(self, now_s: float) -> float:
        """Unix time of a moment on the controller's clock."""
        ...

    def stamped(self, action: Action) -> Action:
        """It was begun now."""
        ...

    def clocks(self) -> Any:
        """Clock offsets as the locators understand them; None when they cannot be told."""
        ...

    def previous_change(self, step: int) -> int:
        """The last step before ``step`` at which another incident began or ended; -1 when there is none."""
        ...

    def next_change(self, step: int) -> int:
        """The first step after ``step`` at which another incident began or ended; beyond all steps if there is none."""
        ...


def noted(
    desk: Desk,
    incident: Incident,
    what: Literal["verdict", "sharper", "validation", ""],
    now_s: float,
    detail: str = "",
) -> Incident:
    """With this on its timeline, if it is anything."""
    if not what or len(incident.events) >= _MOST_EVENTS:
        return incident
    step = max(desk.cluster.newest_step, incident.detected_step or 0)
    event = Event(what, desk.unix_s(now_s), step, detail or named(incident))
    return replace(incident, events=(*incident.events, event))


def unlocated(kind: IncidentKind, error: Exception) -> Diagnosis:
    """When a locator fails: an incident without a culprit is better than none."""
    return Diagnosis(kind, (), (), (), (f"a location: it failed with {type(error).__name__}: {error}"[:200],))


def is_traffic(one: PeerTraffic) -> bool:
    """Possible numbers: what agents send is believed, but not so far that it breaks the locators."""
    times = (one.before_s, one.before_busy_s, one.after_s, one.after_busy_s)
    return all(0 <= time_s < math.inf for time_s in times) and min(one.before_bytes, one.after_bytes) >= 0


def how_to_say(old: Incident | None, diagnosis: Diagnosis) -> Literal["verdict", "sharper", ""]:
    """Print what is new: the first verdict, and later ones only when they blame somebody else or more surely."""
    if old is None:
        return "verdict"
    return "" if same_culprits(old, diagnosis) else "sharper"


def same_culprits(one: Incident, other: Diagnosis) -> bool:
    """They blame the same ranks and links with the same confidence."""
    blamed = {(culprit.rank, culprit.link, culprit.confidence) for culprit in one.culprits}
    return blamed == {(culprit.rank, culprit.link, culprit.confidence) for culprit in other.culprits}
