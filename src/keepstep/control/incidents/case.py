"""What the cases of all kinds of incidents have in common: what they work with, and how a verdict is published."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

from keepstep.control.cluster import Cluster
from keepstep.control.incidents.agents import Agents
from keepstep.control.incidents.hang_evidence import Patience
from keepstep.control.incidents.job_words import JobWords
from keepstep.control.incidents.locators import Locators
from keepstep.control.incidents.register import Register, Saying
from keepstep.control.incidents.validations import Validations
from keepstep.control.membership.pauses import RankMoves
from keepstep.core.events import SET_UP
from keepstep.core.evidence import Evidence
from keepstep.core.incident import LEFT_LOOP, Action, Culprit, Diagnosis, Event, Incident, IncidentKind
from keepstep.core.port_counters import PortTraffic
from keepstep.core.summary import LASTING_CAUSES, GroupInfo, PeerTraffic
from keepstep.report.wording import named

Status = Literal["relieved", "transient", "ended"]

# Fields of an incident that are taken from a diagnosis.
_CONCLUDED = ("kind", "culprits", "victims", "evidence", "missing", "summary")
_MOST_EVENTS = 32
_FIRST_ACTIONS, _LAST_ACTIONS = 4, 12  # an incident keeps its first and its last actions


@dataclass(frozen=True, slots=True)
class Desk:
    """What every case works with; made once for a job, before its first case."""

    cluster: Cluster
    locators: Locators
    agents: Agents
    validations: Validations
    rank_moves: RankMoves  # has ranks play on other nodes
    register: Register  # gives incidents their numbers, and publishes them
    words: JobWords  # what ranks and kernels have said
    unix_s: Callable[[float], float]  # Unix time of a moment on the controller's clock

    @property
    def patience(self) -> Patience:
        """How long processes that hang are left alone."""
        return self.register.patience

    def evidence(self, now_s: float, **known: Any) -> Evidence:
        """Evidence for the locators: what is ``known``, with the job's groups, nodes, clocks and host causes.

        With the states of ranks its set-up counts as a group of all.

        And with the ranks that have left, where no other ``findings`` are known.
        """
        clocks = None
        with suppress(Exception):  # without clocks the locators still have durations
            clocks = self.locators.offsets(self.cluster.clock_samples())
        causes = self.cluster.causes(now_s)
        known.setdefault("findings", tuple(self.cluster.left.values()))
        if "states" in known:
            set_up = GroupInfo(SET_UP, tuple(range(self.cluster.known_ranks)))
            groups = {SET_UP: set_up, **self.cluster.groups}
        else:
            groups = self.cluster.transfer_groups
        return Evidence(groups, self.cluster.node_of, clocks, causes=causes, **known)


class Case:
    """One incident while the controller works on it."""

    _desk: Desk
    incident: Incident | None  # None until it is confirmed
    closed: bool = False  # nothing more can come of it
    question: int | None = None  # the open question to agents about iterations or states
    probing: int | None = None  # the open question to agents about paths between nodes

    def acted(self, action: Action) -> None:
        """Note what was done about the incident."""
        if self.incident is not None and action not in self.incident.actions:
            actions = (*self.incident.actions, self._desk.register.stamped(action))
            self.incident = replace(self.incident, actions=actions)
            self._publish("")

    def _conclude(self, diagnosis: Diagnosis, now_s: float, began: Mapping[str, Any], **known: Any) -> None:
        """Publish a diagnosis.

        ``began``: fields of a new incident that later diagnoses leave as they are; ``known``: further fields.
        """
        incident = self.incident or new_incident(self._desk, diagnosis.kind, now_s, **began)
        known["world_size"] = self._desk.cluster.known_ranks
        known |= {name: getattr(diagnosis, name) for name in _CONCLUDED}
        self._tell(replace(incident, **known), diagnosis, now_s)

    def _tell(self, incident: Incident, diagnosis: Diagnosis, now_s: float) -> None:
        """Publish the incident, and print it if the diagnosis is news."""
        say = how_to_say(self.incident, diagnosis)
        if not self._is_news(diagnosis) and say == "sharper":
            say = ""
        self.incident = noted(self._desk, incident, say, now_s)
        self._publish(say)

    def _is_news(self, diagnosis: Diagnosis) -> bool:
        """Whether another diagnosis is worth printing."""
        return True

    def _finish(self, status: Status, now_s: float, say: Literal["closes", ""], **known: Any) -> None:
        """Close the case, and its incident with these further fields."""
        self.closed = True
        if self.incident is not None:
            closed_unix_s = self._desk.unix_s(now_s)
            self.incident = replace(self.incident, status=status, closed_unix_s=closed_unix_s, **known)
            self._publish(say)

    def _publish(self, say: Saying) -> None:
        if self.incident is not None:
            self._desk.register.publish(self.incident, say)


def new_incident(desk: Desk, kind: IncidentKind, now_s: float, **known: Any) -> Incident:
    """An incident with a number of its own, detected now, with these fields."""
    empty = Incident(desk.register.next_number(), kind, None, None, None, None, (), (), (), ())
    return replace(empty, detected_unix_s=desk.unix_s(now_s), **known)


def noted(
    desk: Desk,
    incident: Incident,
    what: Literal["verdict", "sharper", "validation", "deaths", ""],
    now_s: float,
    detail: str = "",
) -> Incident:
    """The incident with one more event on its timeline, unless ``what`` is empty."""
    if not what or len(incident.events) >= _MOST_EVENTS:
        return incident
    step = max(desk.cluster.newest_step, incident.detected_step or 0)
    event = Event(what, desk.unix_s(now_s), step, detail or named(incident))
    return replace(incident, events=(*incident.events, event))


def with_action(desk: Desk, incident: Incident, action: Action, instead: Action | None) -> Incident:
    """The incident with an action added; one that stands ``instead`` of another began when that one did."""
    old = next((one for one in incident.actions if one == instead), None)
    action = (
        replace(action, step=old.step, begun_unix_s=old.begun_unix_s)
        if old is not None
        else desk.register.stamped(action)
    )
    actions = tuple(one for one in incident.actions if one not in (action, instead))
    kept = (*actions[:_FIRST_ACTIONS], *actions[_FIRST_ACTIONS:][-_LAST_ACTIONS:], action)
    return replace(incident, actions=kept)


def unlocated(kind: IncidentKind, error: Exception) -> Diagnosis:
    """The diagnosis when a locator fails: an incident without a culprit is better than none."""
    return Diagnosis(kind, (), (), (), (f"a location: it failed with {type(error).__name__}: {error}"[:200],))


def is_traffic(one: PeerTraffic) -> bool:
    """Whether the numbers are possible: impossible ones, which an agent may send, would break the locators."""
    times = (one.before_s, one.before_busy_s, one.after_s, one.after_busy_s)
    return all(0 <= time_s < math.inf for time_s in times) and min(one.before_bytes, one.after_bytes) >= 0


def is_port(one: PortTraffic) -> bool:
    """Whether a port's numbers are possible."""
    return all(
        0 <= counts.seconds < math.inf and min(astuple(counts)[1:]) >= 0 for counts in (one.before, one.after)
    )


def how_to_say(old: Incident | None, diagnosis: Diagnosis) -> Literal["verdict", "sharper", ""]:
    """What to print: the first verdict, and a later one only if it blames somebody else, or knows more of them."""
    if old is None:
        return "verdict"
    why = {(one.rank, one.cause) for one in diagnosis.culprits if one.cause in LASTING_CAUSES}
    is_known = why <= {(one.rank, one.cause) for one in old.culprits}
    return "" if is_known and same_culprits(old, diagnosis) else "sharper"


def same_culprits(one: Incident, other: Diagnosis) -> bool:
    """Whether both blame the same ranks and links, with the same confidence."""
    return _confidences(one.culprits) == _confidences(other.culprits)


def blamed(culprits: Iterable[Culprit]) -> frozenset[object]:
    """The ranks and links that are blamed, and which of them are known to have left the training loop."""
    return frozenset((one.rank, one.link, one.cause == LEFT_LOOP) for one in culprits)


def _confidences(culprits: Iterable[Culprit]) -> set[object]:
    return {(blamed([one]), one.confidence) for one in culprits}
