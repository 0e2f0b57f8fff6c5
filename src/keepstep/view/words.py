"""In words first: what is wrong with a run, who, since when, what was done, what you should do."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

import numpy as np

from keepstep.core.exit_codes import Category
from keepstep.core.incident import Incident
from keepstep.core.log_lines import one_line
from keepstep.core.ranges import fold_nodes, fold_ranks
from keepstep.report.wording import closing, done
from keepstep.view.advice import Step, clean, command
from keepstep.view.incident_words import (
    Answer,
    Mood,
    answer_about,
    clock,
    for_how_long,
    headline,
    worst_first,
)
from keepstep.view.run_snapshot import RunEnd, RunSnapshot

__all__ = ["Answer", "Mood", "Step", "answer", "answer_about", "for_how_long", "headline", "worst_first"]

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
_MOST_OTHERS, _MOST_NOTES = 8, 8


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


def _with(about: Answer, mood: Mood, notes: Sequence[str], others: Sequence[str]) -> Answer:
    more = [f"and {len(others) - _MOST_OTHERS} more"] if len(others) > _MOST_OTHERS else []
    return Answer(
        mood, about.headline, about.what, about.who, about.since, about.done, about.advice, tuple(notes),
        (*others[:_MOST_OTHERS], *more), about.incident,
    )  # fmt: skip


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
    if not any(step.command.startswith("keepstep why") for step in about.advice):
        advice.append(command("what the ranks said", "why", run))
    others = [f"{count - 1} earlier incident{'s' * (count != 2)}"] if count > 1 else []
    return Answer(
        "failed", clean(f"{told}; {about.headline.removeprefix('over: ')}"), about.what, about.who, about.since,
        about.done, (*advice, *about.advice), tuple(notes), tuple(others), last.number,
    )  # fmt: skip


def _ended_at(snapshot: RunSnapshot) -> str:
    when = clock(snapshot.unix_s, time.time()) if snapshot.unix_s else ""
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
    last = clock(snapshot.unix_s, snapshot.unix_s + snapshot.age_s) if snapshot.unix_s else ""
    advice = [
        Step("See whether its launchers live: if not, it was killed, and nothing of it runs on."),
        command("asks again; a job that lives shows within seconds", "status", run),
    ]
    if snapshot.folder:
        log = shlex.quote(one_line(f"{snapshot.folder}/controller.log"))
        advice.append(Step("the controller's last words", f"tail {log}"))
    return Answer(
        "unknown", clean(f"no news for {for_how_long(snapshot.age_s)}: cause unknown{step}"),
        since=clean(f"{last}, for {for_how_long(snapshot.age_s)}" if last else ""), advice=tuple(advice),
        notes=tuple(notes), others=tuple(headline(one) for one in open_ones[:_MOST_OTHERS]),
    )  # fmt: skip


def _of_no_incident(snapshot: RunSnapshot, run: str, notes: Sequence[str]) -> Answer:
    past, step = len(snapshot.incidents), snapshot.newest_step
    others: tuple[str, ...] = ()
    acted: tuple[str, ...] = ()
    if past:
        last = snapshot.incidents[-1]
        others = (
            clean(f"{past} before, the last {last.number:04d}: {headline(last)}; {closing(last).replace('  ', ', ')}"),
        )  # fmt: skip
        taken = [action for action in last.actions if action.name != "none"]
        acted = tuple(clean(f"about {last.number:04d}: {done(action)}") for action in taken[-1:])
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
    if snapshot.unwatched_since_unix_s:
        at = "" if step < 0 else f": step {step}"
        return Answer(
            "unknown", f"an operator has it not watched{at}, no verdicts, no remedies",
            since=clean(clock(snapshot.unwatched_since_unix_s, snapshot.unix_s)), notes=tuple(notes), others=others,
            advice=(command("when it is to be watched again", "ctl", run, "watch", "on"),),
        )  # fmt: skip
    if unread := sorted(snapshot.unread_open)[:_MOST_OTHERS]:
        told = f"incidents open, but not to be read: {fold_ranks(unread)}; cause unknown"
        advice = (command("whether it trains", "status", run),)
        return Answer("unknown", told, notes=tuple(notes), others=others, advice=advice)
    ranks, unwatched = len(snapshot.ranks or ()), _unwatched(snapshot)
    told = "healthy" if step < 0 else f"healthy: step {step}, nothing is wrong"
    if 0 < unwatched == ranks:
        told = f"none of its {ranks} ranks is watched" + (f"; newest step {step}" if step >= 0 else "")
        return Answer("unknown", told, notes=tuple(notes), others=others)
    if unwatched:
        told = f"healthy as far as it is watched: {unwatched} of {ranks} ranks are not"
    return Answer("healthy", told, done=acted, notes=tuple(notes), others=others)


def _unwatched(snapshot: RunSnapshot) -> int:
    """Ranks that are not watched: their agents say so, or are not heard of themselves."""
    ranks = snapshot.ranks
    if ranks is None:
        return 0
    unheard = [node.node_rank for node in snapshot.nodes if node.agent != "ok"]
    return int((~ranks.is_watched | np.isin(ranks.node, unheard)).sum())


def _notes(snapshot: RunSnapshot) -> list[str]:
    """What is not as it should be beside incidents, each once."""
    told: list[str] = []
    if snapshot.end is None and snapshot.unwatched_since_unix_s:
        since = clock(snapshot.unwatched_since_unix_s, snapshot.unix_s)
        told.append(f"watching is off since {since}, by order of an operator: no verdicts, no remedies")
    if snapshot.thresholds:
        ordered = ", ".join(f"{name}={word}" for name, word in sorted(snapshot.thresholds.items()))
        told.append(f"thresholds by order of an operator: {ordered}")
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
