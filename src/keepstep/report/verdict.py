"""Verdicts as text: what happened, who is to blame, who waits, the evidence, what is done, what to type next."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Literal

from keepstep.core.errors import RunError
from keepstep.core.incident import Action, Culprit, Incident
from keepstep.core.ranges import fold_ranks
from keepstep.report.cause_rows import cause_rows
from keepstep.report.folding import alike
from keepstep.report.timeline import lines as lines_of_time
from keepstep.report.wording import (
    blamed,
    closing,
    done,
    freed_memory,
    nobody_blamed,
    outlook,
    what_happened,
    who_all,
    who_waits,
)

WIDTH = 120  # most columns of a line
_LABEL = 10  # width of the labels at the left
_RIGHT = 74  # column at which the second half of a line begins
_CULPRITS = 8  # most lines of culprits that are printed
_EVIDENCE = 6  # most lines of evidence
_LONGEST = 4000  # characters of a text that is folded into lines
_ORDER = {"high": 0, "medium": 1, "low": 2}
_STYLES = {
    "slow": "33;1",
    "hang": "31;1",
    "crash": "31;1",
    "desync": "31;1",
    "corrupt": "31;1",
    "culprit": "1",
    "dim": "2",
}


def render(
    incident: Incident,
    *,
    color: bool = False,
    world: int | None = None,
    run: str = "RUN",
    timeline: bool = False,
    now_unix_s: float | None = None,
) -> str:
    """The verdict as text of at most 120 columns, without a newline at its end.

    Args:
        incident: what is known.
        color: use ANSI colours; the caller heeds ``NO_COLOR`` and whether the output is a terminal.
        world: number of ranks of the job, where the incident does not have it.
        run: the run's name, for the command in the last line.
        timeline: add a timeline, which then holds the actions, too.
        now_unix_s: the time now, to print how soon something will be done; without it the time of day is printed.

    Raises:
        RunError: a number in the incident cannot be shown, as only a damaged file has it.
    """
    try:
        lines = _lines_of(incident, world or incident.world_size, run, timeline, now_unix_s)
    except (ArithmeticError, ValueError, OSError) as error:  # e.g. a time of day in the year 10^300
        raise RunError(
            f"incident {incident.number:04d} holds a number that cannot be shown ({error}): its file was damaged; "
            "see it with --json"
        ) from error
    return _shown(lines, color=color)


def _lines_of(incident: Incident, size: int, run: str, timeline: bool, now_unix_s: float | None) -> list[str]:
    lines = [_line(incident.kind.upper(), _cut(what_happened(incident), WIDTH - _LABEL))]
    rows = cause_rows(incident.cause) if incident.cause is not None else []
    wrapped = [(label, line) for label, text in rows for line in _wrapped(label, text)]
    lines += [line for label, line in wrapped if label == "cause"]
    lines += _culprits(incident)
    lines += [line for label, line in wrapped if label != "cause"]
    if incident.victims:
        lines.append(_line("victims", who_waits(incident, size)))
    lines += _evidence(incident, size)
    if incident.missing and incident.culprits:
        lines += _wrapped("missing", "; ".join(incident.missing))
    moments = lines_of_time(incident) if timeline else []
    actions = [one for one in incident.actions if not moments or one.begun_unix_s is None]
    lines += _actions(incident, actions, now_unix_s)
    for place, (column, text) in enumerate(moments):
        lines += _wrapped("" if place else "timeline", text, column)
    if incident.status != "open" or incident.lost_s is not None:
        lines.append(_line("status", closing(incident)))
    if incident.recovery is not None and (text := freed_memory(incident.recovery)):
        lines += _wrapped("memory", text)
    has_words = incident.cause is not None and (incident.cause.first or incident.cause.following)
    verb, flag = ("why", " --lines") if has_words else ("report", "")
    lines.append(_line("next", f"keepstep {verb} {run} {incident.number:04d}{flag}"))
    return lines


def render_closing(incident: Incident, *, color: bool = False) -> str:
    """The line that is printed when an incident is over."""
    word = {"relieved": "RELIEF", "transient": "TRANSIENT", "ended": "ENDED"}.get(incident.status, "OPEN")
    about = f"incident {incident.number:04d} ({incident.kind}, {_short(incident)})"
    line = _line(word, f"{closing(incident)}  {about}")[:WIDTH]
    return f"\x1b[32;1m{line[:_LABEL]}\x1b[0m{line[_LABEL:]}" if color else line


def render_action(incident: Incident, *, color: bool = False) -> str:
    """The lines that are printed for the newest action of an incident."""
    action = incident.actions[-1]
    return _shown(_wrapped("ACTION", f"incident {incident.number:04d}  {done(action)}"), color=color)


def _line(label: str, text: str) -> str:
    # The text may hold a worker's error message, which must not move the terminal's cursor.
    shown = "".join(char if char.isprintable() else " " for char in text)
    return f"{label:<{_LABEL}}{shown}".rstrip()


def _wrapped(label: str, text: str, column: str = "") -> list[str]:
    """Lines with ``text`` to the right of label and ``column``, which are in the first of them."""
    first, *others = textwrap.wrap(
        _cut(text, _LONGEST), WIDTH - _LABEL - len(column), break_on_hyphens=False
    ) or [""]
    return [_line(label, column + first), *(_line("", " " * len(column) + piece) for piece in others)]


def _beside(label: str, left: str, right: str) -> list[str]:
    """Lines with ``right`` in a column of its own when both fit on a line, else below ``left``."""
    column = max(_RIGHT - _LABEL, len(left) + 2)
    if not right:
        return _wrapped(label, left)
    if _LABEL + column + len(right) <= WIDTH:
        return [_line(label, f"{left:<{column}}{right}")]
    return [*_wrapped(label, left), _line("", right)]


def _culprits(incident: Incident) -> list[str]:
    if not incident.culprits:
        return _wrapped("culprit", nobody_blamed(incident))
    lines: list[str] = []
    groups = alike(incident.culprits)
    for index, ones in enumerate(groups[:_CULPRITS]):
        lines += _wrapped("culprit" if index == 0 else "", blamed(ones))
    hidden = [one for ones in groups[_CULPRITS:] for one in ones]
    if hidden:
        ranks = fold_ranks(one.rank for one in hidden if one.rank is not None)
        more = f"and {len(hidden)} more" + (f": ranks {ranks}" if ranks else "")
        lines.append(_line("", _cut(more, WIDTH - _LABEL)))
    return lines


def _short(incident: Incident) -> str:
    named = [who_all(ones).replace("  ", " ") for ones in alike(incident.culprits)[:2]]
    return ", ".join(named) or "cause unknown"


def _evidence(incident: Incident, world: int) -> list[str]:
    confidence = _confidence(incident.culprits)
    right = f"confidence {confidence}" if confidence else ""
    told = f"{incident.ranks_reporting}/{world} ranks reporting" if world and incident.ranks_reporting else ""
    items = [item for item in incident.evidence[:_EVIDENCE] if item != told]
    if not told and not right and not items:
        return []
    first = told
    if items and len(", ".join(filter(None, (told, items[0])))) <= _RIGHT - _LABEL - 2:
        first = ", ".join(filter(None, (told, items.pop(0))))
    lines = _beside("evidence", first, right)
    for item in items:
        lines += _wrapped("", item)
    return lines


def _confidence(culprits: Sequence[Culprit]) -> Literal["high", "medium", "low", ""]:
    if not culprits:
        return ""
    return min((one.confidence for one in culprits), key=lambda word: _ORDER[word])


def _actions(incident: Incident, actions: Sequence[Action], now_unix_s: float | None) -> list[str]:
    if not incident.actions:
        return _wrapped("action", outlook(incident, now_unix_s))
    lines: list[str] = []
    for index, action in enumerate(actions):
        cost = "" if action.expected_cost_s is None else f"expected cost {action.expected_cost_s:.0f} s"
        lines += _beside("action" if index == 0 else "", done(action), cost)
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _shown(lines: Sequence[str], *, color: bool) -> str:
    """The lines of a verdict as one text, with coloured labels if wanted."""
    if not color:
        return "\n".join(lines)
    styles = [_STYLES.get(line[:_LABEL].strip().lower(), _STYLES["dim"]) for line in lines]
    return "\n".join(
        f"\x1b[{style}m{line[:_LABEL]}\x1b[0m{line[_LABEL:]}" if line[:_LABEL].strip() else line
        for line, style in zip(lines, styles, strict=True)
    )
