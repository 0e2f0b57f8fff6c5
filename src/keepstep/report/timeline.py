"""The timeline of an incident: its onset, what became known, what was done, its end."""

from __future__ import annotations

import time
from dataclasses import dataclass

from keepstep.core.incident import Action, Incident
from keepstep.report.wording import done

_ONSETS = {
    "slow": "slow from here on",
    "hang": "last progress",
    "desync": "last progress",
    "crash": "first death",
    "corrupt": "first save that differs",
}
_EVENTS = {
    "sharper": "sharper verdict",
    "validation": "",
    "deaths": "",
}  # by what they tell; others by their name
_ENDS = {"relieved": "over", "transient": "over", "ended": "over with the job, or by what came after it"}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a timeline."""

    unix_s: float
    step: int | None
    text: str
    estimated: bool = False


def rows(incident: Incident) -> list[Row]:
    """The rows of an incident's timeline in order of time; what has no time, as in old files, is left out."""
    found: list[Row] = []
    if incident.onset_unix_s is not None:
        found.append(Row(incident.onset_unix_s, incident.onset_step, _ONSETS[incident.kind], True))
    if not incident.events and incident.detected_unix_s:
        found.append(Row(incident.detected_unix_s, incident.detected_step, "verdict"))
    for event in incident.events:
        what = _EVENTS.get(event.what, event.what)
        found.append(Row(event.unix_s, event.step, ": ".join(filter(None, (what, event.detail)))))
    found += [
        Row(one.begun_unix_s, one.step, done(one) + _cost(one))
        for one in incident.actions
        if one.begun_unix_s is not None
    ]
    if incident.closed_unix_s is not None and incident.status != "open":
        found.append(Row(incident.closed_unix_s, incident.relief_step, _ENDS[incident.status]))
    return sorted(found, key=lambda row: row.unix_s)


def lines(incident: Incident) -> list[tuple[str, str]]:
    """The rows as (time and step in columns, text); the first line names the moment from which times count."""
    known = rows(incident)
    if not known:
        return []
    first = known[0]
    when = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(first.unix_s))
    told = [
        (_since(row.unix_s - first.unix_s), "" if row.step is None else f"step {row.step}") for row in known
    ]
    widths = [max(map(len, column)) for column in zip(*told, strict=True)]
    columns = [f"{since:>{widths[0]}}  {step:<{widths[1]}}".rstrip() for since, step in told]
    about = "≈ " if first.estimated else ""
    return [("", f"from {about}{when}")] + [
        (f"{column:<{max(map(len, columns))}}  ", row.text)
        for column, row in zip(columns, known, strict=True)
    ]


def _cost(action: Action) -> str:
    return f"; expected cost {action.expected_cost_s:.0f} s" if action.expected_cost_s else ""


def _since(seconds: float) -> str:
    if seconds < 100:
        return f"+{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"+{hours} h {minutes:02} min" if hours else f"+{minutes} min {rest:02} s"
