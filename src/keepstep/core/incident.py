"""Diagnoses and incidents: what locators conclude, and what is kept under ``RUN/incidents/NNNN.json``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from keepstep.core.told import CauseClass

INCIDENT_SCHEMA = 2

IncidentKind = Literal["slow", "hang", "crash", "desync", "corrupt"]
Confidence = Literal["high", "medium", "low"]

NETWORK = "network"  # the cause of a culprit that is a path; without a link it is not known which one
LEFT_LOOP = "left the training loop"  # the cause of a culprit whose stack shows where it went


@dataclass(frozen=True, slots=True)
class Link:
    """Two ends of a network path, as ranks and as node names."""

    ranks: tuple[int, int]
    nodes: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Culprit:
    """Who is to blame: a ``rank`` or a ``link``, never both; neither for a node, or a path that is not known."""

    rank: int | None = None
    link: Link | None = None
    node: str = ""
    stage: str = ""  # where in the step: "forward", "backward", "optimizer", "data", "transfer"
    slowdown: float = 0.0  # own time now over the healthy own time; 0 where that does not apply
    confidence: Confidence = "low"
    cause: str = ""  # "compute", "cpu quota", "data loading", "network", "stopped", "never entered", ...
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a locator concludes from the evidence it was given."""

    kind: IncidentKind
    culprits: tuple[Culprit, ...] = ()
    victims: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # evidence that would be needed to say more
    summary: str = ""  # e.g. the operation that everybody waits in
    paths: tuple[tuple[str, str], ...] = ()  # pairs of nodes between which a probe would tell more

    def doubted(self, missing: str, apart_from: Collection[int | None] = ()) -> Diagnosis:
        """The diagnosis with nobody but the ranks ``apart_from`` blamed for sure, because evidence is ``missing``.

        None among them stands for links.
        """
        if all(one.confidence == "low" or one.rank in apart_from for one in self.culprits):
            return self
        culprits = [c if c.rank in apart_from else replace(c, confidence="low") for c in self.culprits]
        return replace(self, culprits=tuple(culprits), missing=(*self.missing, missing))


REPLACEMENT = "S4, replacement of nodes"  # the action by which spares take the ranks of slow nodes
LEAST_GAIN = 0.05  # a remedy that shortens an iteration by less than this share has not helped


@dataclass(frozen=True, slots=True)
class Action:
    """A remedy that was taken, or advised, against an incident."""

    name: str
    expected_cost_s: float | None = None
    detail: str = ""
    before_iteration_s: float | None = None  # iteration time when the action was begun
    expected_iteration_s: float | None = None  # iteration time that is expected once the action is done
    measured_iteration_s: float | None = None
    step: int | None = field(default=None, compare=False)  # the newest step when the action was begun
    begun_unix_s: float | None = field(default=None, compare=False)

    @property
    def has_helped(self) -> bool:
        """Whether iterations were measured to be shorter than before it; False while they were not measured."""
        before_s, after_s = self.before_iteration_s, self.measured_iteration_s
        return before_s is not None and after_s is not None and after_s < (1 - LEAST_GAIN) * before_s


@dataclass(frozen=True, slots=True)
class Event:
    """Something that became known about an incident, and when."""

    what: Literal["noticed", "verdict", "sharper", "validation", "deaths"]
    unix_s: float
    step: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FreedMemory:
    """Memory of a GPU that a rank's process had which has ended, as NVIDIA's driver tells it."""

    gpu: int  # its number on the node
    rank: int
    held_bytes: int  # Bytes that the process had when the driver was last asked while it ran
    free_bytes: int  # Bytes of the GPU that were free when the rank's successor could begin


@dataclass(frozen=True, slots=True)
class Recovery:
    """The time from the failure of a rank until every rank of its node has made a step again."""

    incarnation: int  # the incarnation that began
    rank: int  # the rank that failed
    what: str  # how the rank failed: "was killed", "failed", "left early"
    seconds: float
    phases: tuple[
        tuple[str, float], ...
    ]  # names and seconds of its parts, in order, which add up to ``seconds``
    standbys: int  # how many ranks were taken over by warm standbys
    ranks: int
    survived: int = 0  # how many ranks' processes outlived the incarnation
    # GPU memory of the processes that did not survive; empty where no driver tells.
    gpu_memory: tuple[FreedMemory, ...] = ()


@dataclass(frozen=True, slots=True)
class SpokenLine:
    """A line of a rank, a node's kernel or a launcher."""

    text: str
    rank: int | None = None
    node: str = ""
    source: str = ""  # the log's name
    number: int = 0  # number of the line in its log, from 1
    unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Why processes died, as the words of ranks and of the nodes' kernels tell (``docs/design/why.md``)."""

    cause_class: CauseClass  # a class of TRANSOM's table I
    kind: str  # the finer kind within the class; "echo-only", "timeout-only": nobody told a cause
    title: str
    confidence: Confidence
    advice: str = ""
    row: str = ""  # the row of the tables that the first line matches
    first: SpokenLine | None = None  # the line that tells the cause
    then: tuple[SpokenLine, ...] = ()  # what was told of the same cause later
    following: int = 0  # how many lines only tell of others
    following_ranks: tuple[int, ...] = ()  # ranks whose lines only tell of others
    missing: tuple[str, ...] = ()  # what would tell more
    path: str = ""  # the file or folder that it is about
    tables: str = ""  # version of keepstep's tables
    followed: tuple[SpokenLine, ...] = ()  # the first lines that only tell of others, one of each rank


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
    incarnation: int = 0  # incarnation of the job in which the incident began
    recovery: Recovery | None = None
    lost_s: float | None = None  # seconds that a slowdown has cost the job, until now if it is open
    saved_s: float = 0.0  # seconds that the slowdown would have cost besides, without the remedies
    onset_unix_s: float | None = None  # estimated time of the onset
    events: tuple[Event, ...] = ()
    next_action: str = ""  # what will be done about the incident next, if nothing changes
    next_unix_s: float | None = None  # when `next_action` is due; None when it has no time
    cause: FailureCause | None = None  # where processes died, and words tell why; since schema 2
    schema: int = INCIDENT_SCHEMA

    @property
    def has_deaths(self) -> bool:
        """Whether processes died in it: it is a crash, or a hang that ended in deaths."""
        return self.kind == "crash" or any(event.what == "deaths" for event in self.events)
