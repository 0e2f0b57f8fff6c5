"""In words first: what is wrong with a run, who, since when, what was done, what you should do.

The sentences about incidents are those of the verdict (`keepstep.report.wording`).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from keepstep.core.exit_codes import Category
from keepstep.core.incident import Incident
from keepstep.core.log_lines import one_line
from keepstep.core.ranges import fold_nodes
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
from keepstep.view.advice import Step, advice_for, clean, command
from keepstep.view.snapshot import RunEnd, RunSnapshot

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
_CHANGES = {
    "created": "waits for its nodes",
    "warming up": "starts: not all ranks have made a step",
    "checking": "ends its workers, or decides with which nodes it goes on",
    "recovering": "begins again: not all ranks have made a step",
}
_AGAIN: dict[Category, str] = {
    "finished": "Nothing needs to be done.",
    "unusable": "It would fail again: correct the command line, the script or the node first.",
    "infrastructure": "Start it again elsewhere.",
    "scheduler": "Start it again.",
    "stopped": "An operator stopped it: start it again when it is wanted.",
    "signal": "Somebody who is not the scheduler sent its launcher the signal: ask who.",
    "training": "See why it failed before you start it again.",
}
_MOST_GROUPS, _MOST_DONE, _MOST_OTHERS, _MOST_NOTES = 4, 6, 8, 8
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


def answer(snapshot: RunSnapshot, run: str = "") -> Answer:
    """The answer for a run as it stands. ``run``: how commands are to name it, else by its name."""
    run = run or snapshot.name
    notes = tuple(_notes(snapshot))
    if snapshot.end is not None or snapshot.state in ("done", "failed", "ended"):
        return _of_end(snapshot, snapshot.end or _end_by_state(snapshot), run, notes)
    now_s = snapshot.unix_s + snapshot.age_s
    open_ones = worst_first(snapshot.incidents)
    if snapshot.state == "silent":
        return _of_silence(snapshot, open_ones, run, notes)
    if open_ones:
        worst, *others = open_ones
        about = answer_about(worst, run, now_s, world=snapshot.world_size, spares=snapshot.spares)
        mood = "changing" if snapshot.state == "recovering" and worst.has_deaths else about.mood
        return _with(about, mood, notes, [headline(one) for one in others])
    return _of_no_incident(snapshot, run, notes)


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
    return clean(f"{over}{_WRONG[incident.kind]}: {named(incident)}")


def worst_first(incidents: Sequence[Incident]) -> list[Incident]:
    """The open incidents, that which costs the job most first; of equals the newest."""
    open_ones = [one for one in incidents if one.status == "open"]
    return sorted(open_ones, key=lambda one: (-_GRAVITY[one.kind], -(one.job_slowdown or 0.0), -one.number))


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


def _with(about: Answer, mood: Mood, notes: Sequence[str], others: Sequence[str]) -> Answer:
    more = [f"and {len(others) - _MOST_OTHERS} more"] if len(others) > _MOST_OTHERS else []
    return Answer(
        mood, about.headline, about.what, about.who, about.since, about.done, about.advice, tuple(notes),
        (*others[:_MOST_OTHERS], *more), about.incident,
    )  # fmt: skip


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
    if began_s and (told := _clock(began_s, now_s)):
        parts.append(f"{'≈ ' if estimated else ''}{told}")
        if until_s is not None:
            parts.append(f"for {for_how_long(until_s - began_s)}")
    if incident.status != "open" or incident.lost_s is not None:
        parts.append(closing(incident).replace("  ", ", "))
    return ", ".join(parts)


def _clock(unix_s: float, now_s: float) -> str:
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


def _of_end(snapshot: RunSnapshot, end: RunEnd, run: str, notes: Sequence[str]) -> Answer:
    step = f" after step {snapshot.newest_step}" if snapshot.newest_step >= 0 else ""
    failed = end.exit_code != 0
    reason = f" ({end.reason})" if end.reason else ""
    told = f"ended with exit code {end.exit_code}{reason}{step}" if failed else f"finished{step}"
    last = snapshot.incidents[-1] if snapshot.incidents else None
    again = next((text for category, text in _AGAIN.items() if category == end.category), "")
    advice = [Step(again)] if again else []
    count = len(snapshot.incidents)
    if not failed or last is None or not (last.has_deaths or last.status == "ended"):
        if failed:
            advice.append(command("what the ranks said", "why", run))
        elif count:
            advice.append(command("what went wrong meanwhile", "report", run))
        others = (f"{count} incident{'s' * (count != 1)} in this run",) if count else ()
        mood: Mood = "failed" if failed else "ended"
        return Answer(
            mood, clean(told), advice=tuple(advice), notes=tuple(notes), others=others,
            since=clean(_ended_at(snapshot)),
        )  # fmt: skip
    about = answer_about(last, run, snapshot.unix_s, world=snapshot.world_size)
    others = [f"{count - 1} earlier incident{'s' * (count != 2)}"] if count > 1 else []
    return Answer(
        "failed", clean(f"{told}; {about.headline.removeprefix('over: ')}"), about.what, about.who, about.since,
        about.done, (*advice, *about.advice), tuple(notes), tuple(others), last.number,
    )  # fmt: skip


def _ended_at(snapshot: RunSnapshot) -> str:
    when = _clock(snapshot.unix_s, time.time()) if snapshot.unix_s else ""
    if not when or not snapshot.started_unix_s:
        return when
    return f"{when}, {for_how_long(snapshot.unix_s - snapshot.started_unix_s)} after its start"


def _end_by_state(snapshot: RunSnapshot) -> RunEnd:
    """What is known of the end where ``end.json`` does not say it, or not yet."""
    category: Category = "finished" if snapshot.state == "done" else "training"
    return RunEnd(int(snapshot.state == "failed"), category if snapshot.state != "ended" else "", "")


def _of_silence(
    snapshot: RunSnapshot, open_ones: Sequence[Incident], run: str, notes: Sequence[str]
) -> Answer:
    step = f"; newest step {snapshot.newest_step}" if snapshot.newest_step >= 0 else ""
    last = _clock(snapshot.unix_s, snapshot.unix_s + snapshot.age_s) if snapshot.unix_s else ""
    advice = (
        Step("See whether its launchers live: if not, it was killed, and nothing of it runs on."),
        command("asks again; a job that lives shows within seconds", "status", run),
        Step("the controller's last words", f"tail {shlex.quote(one_line(run))}/controller.log"),
    )
    return Answer(
        "unknown", clean(f"no news for {for_how_long(snapshot.age_s)}: cause unknown{step}"),
        since=clean(f"{last}, for {for_how_long(snapshot.age_s)}" if last else ""), advice=advice,
        notes=tuple(notes), others=tuple(headline(one) for one in open_ones[:_MOST_OTHERS]),
    )  # fmt: skip


def _of_no_incident(snapshot: RunSnapshot, run: str, notes: Sequence[str]) -> Answer:
    past, step = len(snapshot.incidents), snapshot.newest_step
    others: tuple[str, ...] = ()
    if past:
        last = snapshot.incidents[-1]
        others = (
            clean(f"{past} before, the last {last.number:04d}: {headline(last)}; {closing(last).replace('  ', ', ')}"),
        )  # fmt: skip
    if snapshot.state == "suspended":
        told = f"suspended by an operator for {for_how_long(snapshot.state_s)}"
        return Answer(
            "changing", told, notes=tuple(notes), others=others,
            advice=(command("when it is to go on", "ctl", run, "resume"),),
        )  # fmt: skip
    if snapshot.state in _CHANGES:
        told = f"{_CHANGES[snapshot.state]}, for {for_how_long(snapshot.state_s)}"
        return Answer("changing", told, notes=tuple(notes), others=others)
    if not snapshot.state:
        told = "no status yet: the controller writes it within a second of the job's start"
        return Answer("changing", told, notes=tuple(notes))
    unwatched = 0 if snapshot.ranks is None else int((~snapshot.ranks.is_watched).sum())
    told = "healthy" if step < 0 else f"healthy: step {step}, nothing is wrong"
    if unwatched:
        told = f"healthy as far as it is watched: {unwatched} of {len(snapshot.ranks or ())} ranks are not"
    return Answer("healthy", told, notes=tuple(notes), others=others)


def _notes(snapshot: RunSnapshot) -> list[str]:
    """What is not as it should be beside incidents, each once."""
    told: list[str] = []
    if snapshot.end is None:
        for how, text in (("silent", "no heartbeat from"), ("gone", "no agent watches")):
            nodes = [one.name for one in snapshot.nodes if one.agent == how]
            if nodes:
                told.append(f"{text} {fold_nodes(nodes)}")
    if snapshot.backup_trouble:
        told.append(f"not backed up: {snapshot.backup_trouble}")
    for node in snapshot.nodes:
        told += [f"{node.name}: {text}" for text in node.storage_troubles]
        told += node.notices
    found = list(dict.fromkeys((*told, *snapshot.troubles)))
    more = [f"and {len(found) - _MOST_NOTES} more"] if len(found) > _MOST_NOTES else []
    return [*map(clean, found[:_MOST_NOTES]), *more]
