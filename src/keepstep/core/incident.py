"""Diagnoses and incidents: what is decided, and what is kept of it under ``RUN/incidents/NNNN.json``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

INCIDENT_SCHEMA = 1

IncidentKind = Literal["slow", "hang", "crash", "desync"]
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Link:
    """Two ends of a network path, as ranks and as node names."""

    ranks: tuple[int, int]
    nodes: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Culprit:
    """Who is to blame: a ``rank`` or a ``link``, never both."""

    rank: int | None = None
    link: Link | None = None
    node: str = ""
    stage: str = ""  # where in the step: "forward", "backward", "optimizer", "data", "transfer"
    slowdown: float = 0.0  # its own time over its healthy time; 0 where it does not apply
    confidence: Confidence = "low"
    cause: str = ""  # "compute", "cpu quota", "data loading", "network", "stopped", "never entered", ...
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a locator concludes from the evidence it was given."""

    kind: IncidentKind
    culprits: tuple[Culprit, ...]
    victims: tuple[int, ...]
    evidence: tuple[str, ...]
    missing: tuple[str, ...]  # what would be needed to say more
    summary: str = ""  # e.g. the operation that everybody waits in
    paths: tuple[tuple[str, str], ...] = ()  # pairs of nodes between which a probe would tell more

    def doubted(self, missing: str, apart_from: Collection[int] = ()) -> Diagnosis:
        """The same with nobody blamed for sure, because of what is ``missing``, ``apart_from`` these ranks."""
        if all(one.confidence == "low" or one.rank in apart_from for one in self.culprits):
            return self
        culprits = tuple(
            one if one.rank in apart_from else replace(one, confidence="low") for one in self.culprits
        )
        return replace(self, culprits=culprits, missing=(*self.missing, missing))


@dataclass(frozen=True, slots=True)
class Action:
    """What was done (or advised) about an incident."""

    name: str
    expected_cost_s: float | None = None
    detail: str = ""
    before_iteration_s: float | None = None  # when it was begun
    expected_iteration_s: float | None = None  # once it is done
    measured_iteration_s: float | None = None
    step: int | None = field(default=None, compare=False)  # the newest when it was begun, and when that was
    begun_unix_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Event:
    """What became known of an incident, and when."""

    what: Literal["noticed", "verdict", "sharper", "validation"]
    unix_s: float
    step: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Recovery:
    """From the failure of a rank until every rank of its node has made a step again."""

    incarnation: int  # that began
    rank: int  # that failed
    what: str  # "was killed", "failed"
    seconds: float
    phases: tuple[tuple[str, float], ...]  # what it was spent on, in order; they add up
    standbys: int  # ranks that were taken over by warm standbys
    ranks: int
    survived: int = 0  # ranks whose process outlived the incarnation


@dataclass(frozen=True, slots=True)
class Incident:
    """One incident of a run, from onset to relief. Times are Unix seconds on the controller's host."""

    number: int
    kind: IncidentKind
    onset_step: int | None
    detected_step: int | None
    relief_step: int | None
    job_slowdown: float | None  # iteration time over its healthy value; None for hangs and crashes
    culprits: tuple[Culprit, ...]
    victims: tuple[int, ...]
    evidence: tuple[str, ...]
    missing: tuple[str, ...]
    actions: tuple[Action, ...] = ()
    status: Literal["open", "relieved", "transient", "ended"] = "open"
    summary: str = ""
    iteration_before_s: float | None = None
    iteration_after_s: float | None = None
    stuck_s: float | None = None
    ranks_reporting: int = 0
    world_size: int = 0
    detected_unix_s: float = 0.0
    closed_unix_s: float | None = None
    incarnation: int = 0  # of the job, in which it began
    recovery: Recovery | None = None
    lost_s: float | None = (
        None  # seconds of training that a slowdown has cost the job, until now if it is open
    )
    saved_s: float = 0.0  # and would have cost besides, without what was done
    onset_unix_s: float | None = None  # estimated
    events: tuple[Event, ...] = ()
    next_action: str = ""  # what is done about it next, as long as nothing changes
    next_unix_s: float | None = None  # when `next_action` is due; None: it has no time
    schema: int = INCIDENT_SCHEMA
