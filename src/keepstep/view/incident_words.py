"""One incident in words: what is wrong, who, since when, what was done, what you should do.

The sentences are those of the verdict (`keepstep.report.wording`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from keepstep.core.incident import Incident
from keepstep.core.log_lines import one_line
from keepstep.report.folding import alike
from keepstep.report.wording import (
    blamed,
    closing,
    done,
    named,
    nobody_blamed,
    outlook,
    what_happened,
    who_waits,
)
from keepstep.view.advice import Step, advice_for, clean

Mood = Literal["healthy", "changing", "trouble", "unknown", "ended", "failed"]
"""How the run is. ``unknown``: something is wrong, or there is no news, and the cause is not known."""

_WRONG = {
    "slow": "the job is slow",
    "hang": "the job hangs",
    "crash": "the job crashed",
    "desync": "ranks make calls that do not fit",
    "corrupt": "a state is wrong",
}
_GRAVITY = {"crash": 4, "hang": 3, "desync": 3, "corrupt": 2, "slow": 1}
_NO_STEPS = frozenset({"hang", "crash", "desync"})
_MOST_GROUPS, _MOST_DONE = 4, 6
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What an operator wants to know. Every text is one line that is safe for a terminal; empty: nothing to say."""

    mood: Mood
    headline: str  # what is wrong, and who
    what: str = ""  # the same in figures: steps and times
    who: tuple[str, ...] = ()  # those to blame, then those who only wait
    since: str = ""  # since which step and time, for how long, and what that has cost
    done: tuple[str, ...] = ()  # what was done about it, or comes next
    advice: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()  # what is not watched, not backed up or cannot be read
    others: tuple[str, ...] = ()  # other incidents, worst first
    incident: int | None = None  # number of the incident that this is about

    @property
    def lines(self) -> list[tuple[str, str]]:
        """All of it as labels and texts; a label is empty where a row goes on."""
        rows: list[tuple[str, str]] = [("", self.headline)]
        listed: tuple[tuple[str, Sequence[str]], ...] = (
            ("what", [self.what]),
            ("who", self.who),
            ("since", [self.since]),
            ("done", self.done),
            ("do", [str(step) for step in self.advice]),
            ("note", self.notes),
            ("also", self.others),
        )
        for label, texts in listed:
            told = [text for text in texts if text]
            rows += [("" if place else label, text) for place, text in enumerate(told)]
        return rows


def answer_about(
    incident: Incident, run: str, now_unix_s: float, *, world: int = 0, spares: Sequence[str] = ()
) -> Answer:
    """The answer about one incident, open or not.

    ``now_unix_s``: the time now on the controller's clock, in seconds. ``spares``: nodes that wait for a place.
    """
    is_open = incident.status == "open"
    return Answer(
        mood=("trouble" if _is_known(incident) else "unknown") if is_open else "ended",
        headline=headline(incident),
        what=clean(what_happened(incident).replace("  ", ", ")),
        who=tuple(clean(text) for text in _who(incident, world or incident.world_size)),
        since=clean(_since(incident, now_unix_s)),
        done=tuple(clean(text) for text in _done(incident, now_unix_s)),
        advice=tuple(advice_for(incident, run, spares)),
        incident=incident.number,
    )


def headline(incident: Incident) -> str:
    """What is wrong and who: ``the job is slow: rank 3 gpu-1, compute, confidence high``; that it is over, if so."""
    over = "" if incident.status == "open" else "over: "
    return one_line(f"{over}{_WRONG[incident.kind]}: {named(incident)}")


def worst_first(incidents: Sequence[Incident]) -> list[Incident]:
    """The open incidents, that which costs the job most first; of equals the newest."""
    open_ones = [one for one in incidents if one.status == "open"]
    return sorted(open_ones, key=lambda one: (-_GRAVITY[one.kind], -(one.job_slowdown or 0.0), -one.number))


def lost_share(open_incidents: Sequence[Incident]) -> float:
    """The share of the time that open incidents cost, 0 to 1: all of it where no step is made meanwhile."""
    if any(one.kind in _NO_STEPS for one in open_incidents):
        return 1.0
    slowest = max((one.job_slowdown or 1.0 for one in open_incidents), default=1.0)
    return max(1 - 1 / slowest, 0.0)


def for_how_long(seconds: float) -> str:
    """A time as people say it: ``40 s``, ``12 min``, ``3 h 20 min``, ``2 days``."""
    if seconds < 100:
        return f"{max(seconds, 0.0):.0f} s"
    if seconds < 5940:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * _DAY_S:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{seconds / _DAY_S:.0f} days" if seconds < 1e9 else "very long"


def _is_known(incident: Incident) -> bool:
    told = incident.cause is not None and incident.cause.first is not None
    return told or any(one.cause or one.slowdown > 0 for one in incident.culprits)


def _who(incident: Incident, world: int) -> Iterator[str]:
    cause = incident.cause
    if cause is not None and cause.first is not None:
        yield f"{cause.cause_class}: {cause.title}, confidence {cause.confidence}"
    groups = alike(incident.culprits)
    if not groups:
        yield nobody_blamed(incident)
    for ones in groups[:_MOST_GROUPS]:
        yield f"{blamed(ones).replace('  ', ' ', 1)}, confidence {ones[0].confidence}"
    if hidden := sum(len(ones) for ones in groups[_MOST_GROUPS:]):
        yield f"and {hidden} more"
    if incident.victims:
        yield f"not to blame: {who_waits(incident, world)}"


def _since(incident: Incident, now_s: float) -> str:
    """``step 25, 02:51:07 UTC, for 12 min``, and what it has cost; of one that is over how it ended."""
    estimated = incident.onset_unix_s is not None
    began_s = incident.onset_unix_s if incident.onset_unix_s is not None else incident.detected_unix_s
    until_s = incident.closed_unix_s if incident.status != "open" else now_s
    parts = [f"step {incident.onset_step}"] if incident.onset_step is not None else []
    if began_s and (told := clock(began_s, now_s)):
        parts.append(f"{'≈ ' if estimated else ''}{told}")
        if until_s is not None:
            parts.append(f"for {for_how_long(until_s - began_s)}")
    if incident.status != "open" or incident.lost_s is not None:
        parts.append(closing(incident).replace("  ", ", "))
    return ", ".join(parts)


def clock(unix_s: float, now_s: float) -> str:
    """The time of day, with the date where that is not today's; empty for a number that no clock shows."""
    form = "%H:%M:%S %Z" if abs(now_s - unix_s) < _DAY_S / 2 else "%Y-%m-%d %H:%M:%S %Z"
    try:
        return time.strftime(form, time.localtime(unix_s))
    except (ValueError, OverflowError, OSError):
        return ""


def _done(incident: Incident, now_s: float) -> Iterator[str]:
    left_out = len(incident.actions) - _MOST_DONE
    if left_out > 0:
        yield f"{left_out} earlier actions: see the report"
    for action in incident.actions[-_MOST_DONE:]:
        yield done(action)
    if not incident.actions:
        try:
            yield outlook(incident, now_s)
        except (ValueError, OverflowError, OSError):  # a time that no clock shows
            yield incident.next_action
