"""The words of a notice: what is wrong, who, since when, what was done, what to do."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.core.incident import Incident
from keepstep.report.wording import done
from keepstep.view.notify.notice import What, plain
from keepstep.view.notify.told_state import Folded
from keepstep.view.run_snapshot import RunSnapshot
from keepstep.view.words import Answer, answer, answer_about, for_how_long, headline

_MOST_LINES = 24


@dataclass(frozen=True, slots=True)
class Subject:
    """What a notice is about."""

    what: What
    snapshot: RunSnapshot
    incident: Incident | None = None
    key: str = ""  # of what flaps
    count: int = 0  # how many were held back
    folded: Folded | None = None


def words(subject: Subject, window_s: float) -> tuple[str, tuple[str, ...]]:
    """Title and lines. ``window_s``: how long what flaps must be calm."""
    title, told = _words(subject, window_s)
    rows = [] if told is None else told.lines[1:]  # the first is the headline
    lines = [f"{label}: {text}" if label else f"  {text}" for label, text in rows[:_MOST_LINES]]
    name = plain(subject.snapshot.name, 60)
    return plain(f"{name}: {title}" if name else title, 300), tuple(plain(line, 1000) for line in lines)


def _words(subject: Subject, window_s: float) -> tuple[str, Answer | None]:
    what, snapshot, incident = subject.what, subject.snapshot, subject.incident
    window = for_how_long(window_s)
    if what == "test":
        return "a test of keepstep: notices arrive here", None
    if subject.folded is not None:
        return _summary(subject.folded), answer(snapshot)
    if what == "calm":
        again = f"came {subject.count} more times, held back" if subject.count else "came no more"
        if incident is None:
            return f"calm for {window}: {subject.key} {again}", None
        return f"{headline(incident)}; has stayed for {window}; {again}", _about(snapshot, incident)
    if what == "heard":
        return f"news again: {answer(snapshot).headline}", answer(snapshot)
    often = f"; again and again: its next times are held back until it is calm for {window}"
    if incident is None:
        told = answer(snapshot)
        return told.headline + (often if what == "flapping" else ""), told
    told = _about(snapshot, incident)
    if what == "sharper":
        return f"another verdict: {told.headline}", told
    if what == "action" and incident.actions:
        newest = max(incident.actions, key=lambda one: one.begun_unix_s or 0.0)
        return f"{done(newest)}; {told.headline}", told
    return told.headline + (often if what == "flapping" else ""), told


def _about(snapshot: RunSnapshot, incident: Incident) -> Answer:
    now_s = snapshot.unix_s + snapshot.age_s
    return answer_about(incident, snapshot.name, now_s, world=snapshot.world_size, spares=snapshot.spares)


def _summary(folded: Folded) -> str:
    many = sorted(folded.counts.items(), key=lambda item: (-item[1], item[0]))
    counts = ", ".join(f"{count} {about}" for about, count in many)
    numbers = f" (incidents {folded.first:04d} to {folded.last:04d})" if folded.first else ""
    return f"too much at once to be told one by one: {counts}{numbers}"
