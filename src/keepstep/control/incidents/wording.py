"""What cases say alike: when a verdict is news, what goes on its timeline, and what stands in when nothing is known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from keepstep.control.incidents.desk import Desk
from keepstep.core.incident import Action, Diagnosis, Event, Incident, IncidentKind
from keepstep.core.summary import PeerTraffic
from keepstep.report.wording import named

_MOST_EVENTS = 32
_FIRST_ACTIONS, _LAST_ACTIONS = 4, 12  # an incident keeps its first and its last actions


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


def with_action(desk: Desk, incident: Incident, action: Action, instead: Action | None) -> Incident:
    """With what was done about it, ``instead`` of what was noted before, which began when that did."""
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
