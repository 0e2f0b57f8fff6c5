"""What somebody is told of a run: one notice, bounded in size, in the form in which a webhook gets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from keepstep.core.incident import Confidence, Culprit, Incident, IncidentKind

NOTICE_SCHEMA = 1

What = Literal[
    "opened",  # an incident has a verdict; also one that was over before anybody could be told
    "sharper",  # its verdict names somebody else
    "action",  # something was done about it
    "over",  # it is over: relieved, or training goes on
    "flapping",  # it came so often that its next times are held back
    "calm",  # it came back no more, or has stayed: how often it was held back
    "summary",  # so much happened at once that one notice stands for it
    "silent",  # nothing is heard of the job
    "heard",  # news come again
    "died",  # the job ended with a failure
    "ended",  # the job ended well, or was stopped by somebody
    "test",  # somebody asked for it
]
Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
CONFIDENCES: tuple[Confidence, ...] = ("low", "medium", "high")

_MOST_CULPRITS, _MOST_ACTIONS = 16, 8
_LONGEST = 500  # characters of a text that was taken over


@dataclass(frozen=True, slots=True)
class BlamedPart:
    """A culprit: a ``rank``, the two nodes of a ``link``, or a ``node``."""

    name: str
    rank: int | None
    node: str
    link: tuple[str, str] | None
    cause: str
    stage: str
    slowdown: float  # own time now over the healthy own time; 0 where that does not apply
    confidence: Confidence


@dataclass(frozen=True, slots=True)
class IncidentBrief:
    """An incident without what grows with the job. Times are Unix seconds on the controller's host."""

    number: int
    kind: IncidentKind
    status: Literal["open", "relieved", "transient", "ended"]
    culprits: tuple[BlamedPart, ...]  # the first 16
    culprit_count: int
    victim_count: int
    onset_step: int | None
    relief_step: int | None
    detected_unix_s: float
    closed_unix_s: float | None
    job_slowdown: float | None  # iteration time over its healthy value
    lost_s: float | None  # seconds that a slowdown has cost the job so far
    recovery_s: float | None  # seconds from a failure until training went on
    cause: str  # why processes died, in a few words
    actions: tuple[str, ...]  # the newest 8, oldest first


@dataclass(frozen=True, slots=True)
class JobBrief:
    """How the job stands."""

    state: str
    newest_step: int
    world_size: int
    restarts: int
    exit_code: int | None = None  # None while it runs
    category: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to tell. All of it is plain text in which others' words are one line without control characters."""

    id: str  # stays the same when it is sent again
    what: What
    severity: Severity
    run: str
    unix_s: float  # when it was to be told, on the host of `keepstep serve`
    title: str  # one line
    lines: tuple[str, ...]  # what is wrong, who, since when, what was done, what to do
    job: JobBrief
    incident: IncidentBrief | None = None
    stands_for: int = 1  # how many notices it stands for: more than 1 in `summary` and `calm`
    undelivered: int = 0  # how many notices before it could not be delivered
    page_url: str = ""
    schema: int = NOTICE_SCHEMA


def plain(text: str, longest: int = _LONGEST) -> str:
    """Foreign text as one line without control characters, cut to ``longest`` characters."""
    shown = "".join(char if char.isprintable() else " " for char in text[: 4 * longest])
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def part_name(culprit: Culprit) -> str:
    """Who is blamed, without why: what makes two verdicts name the same."""
    if culprit.link is not None:
        here, there = culprit.link.nodes
        return plain(f"link {here} - {there}", 200)
    if culprit.rank is not None:
        return f"rank {culprit.rank}"
    return plain(f"node {culprit.node}", 200) if culprit.node else plain(culprit.cause or "somebody", 200)


def brief(incident: Incident) -> IncidentBrief:
    """What a notice holds of an incident."""
    cause = incident.cause
    return IncidentBrief(
        number=incident.number,
        kind=incident.kind,
        status=incident.status,
        culprits=tuple(_blamed(one) for one in incident.culprits[:_MOST_CULPRITS]),
        culprit_count=len(incident.culprits),
        victim_count=len(incident.victims),
        onset_step=incident.onset_step,
        relief_step=incident.relief_step,
        detected_unix_s=incident.detected_unix_s,
        closed_unix_s=incident.closed_unix_s,
        job_slowdown=incident.job_slowdown,
        lost_s=incident.lost_s,
        recovery_s=None if incident.recovery is None else incident.recovery.seconds,
        cause="" if cause is None else plain(cause.title),
        actions=tuple(_action(one.name, one.detail) for one in incident.actions[-_MOST_ACTIONS:]),
    )


def _blamed(culprit: Culprit) -> BlamedPart:
    link = culprit.link
    return BlamedPart(
        name=part_name(culprit),
        rank=culprit.rank,
        node=plain(culprit.node, 200),
        link=None if link is None else (plain(link.nodes[0], 200), plain(link.nodes[1], 200)),
        cause=plain(culprit.cause),
        stage=plain(culprit.stage),
        slowdown=culprit.slowdown,
        confidence=culprit.confidence,
    )


def _action(name: str, detail: str) -> str:
    return plain(f"{name}: {detail}" if detail else name)


def severity_of(incident: Incident) -> Severity:
    """``critical``: the job does not train, or trains wrongly; ``warning``: it is slow."""
    return "warning" if incident.kind == "slow" and not incident.has_deaths else "critical"


def confidence_in(culprits: Sequence[Culprit]) -> Confidence:
    """The confidence in the least sure culprit; ``low`` where nobody is named."""
    found = {one.confidence for one in culprits}
    for word in CONFIDENCES:
        if word in found:
            return word
    return "low"
