"""Verdicts as text: what happened, who is to blame, who waits, the evidence, what is done, what to type next."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Sequence
from typing import Literal

from keepstep.core.errors import RunError
from keepstep.core.incident import Action, Culprit, Incident
from keepstep.core.ranges import fold_ranks
from keepstep.report.cause_rows import cause_rows
from keepstep.report.folding import alike, shared_detail, span
from keepstep.report.timeline import lines as lines_of_time
from keepstep.report.wording import accelerator_time, done, freed_memory, seconds, who_all

WIDTH = 120  # most columns of a line
_LABEL = 10  # width of the labels at the left
_RIGHT = 74  # column at which the second half of a line begins
_FOLDED = 64  # longest list of folded ranks that is printed
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
    lines = [_line(incident.kind.upper(), _headline(incident))]
    rows = cause_rows(incident.cause) if incident.cause is not None else []
    wrapped = [(label, line) for label, text in rows for line in _wrapped(label, text)]
    lines += [line for label, line in wrapped if label == "cause"]
    lines += _culprits(incident)
    lines += [line for label, line in wrapped if label != "cause"]
    lines += _victims(incident, size)
    lines += _evidence(incident, size)
    if incident.missing and incident.culprits:
        lines += _wrapped("missing", "; ".join(incident.missing))
    moments = lines_of_time(incident) if timeline else []
    actions = [one for one in incident.actions if not moments or one.begun_unix_s is None]
    lines += _actions(incident, actions, now_unix_s)
    for place, (column, text) in enumerate(moments):
        lines += _wrapped("" if place else "timeline", text, column)
    if incident.status != "open" or incident.lost_s is not None:
        lines.append(_line("status", _closing(incident)))
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
    line = _line(word, f"{_closing(incident)}  {about}")[:WIDTH]
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


def _headline(incident: Incident) -> str:
    parts: list[str] = []
    if incident.onset_step is not None:
        parts.append(f"step {incident.onset_step}")
    if incident.kind == "slow":
        before, after = incident.iteration_before_s, incident.iteration_after_s
        if before and after:
            factor = incident.job_slowdown or after / before
            parts.append(f"iteration {seconds(before)} → {seconds(after)} (×{factor:.2f})")
        elif incident.job_slowdown:
            parts.append(f"iteration ×{incident.job_slowdown:.2f}")
        if incident.detected_step is not None and incident.onset_step is not None:
            parts.append(f"seen at step {incident.detected_step}")
    if incident.summary:
        parts.append(incident.summary)
    if incident.stuck_s is not None and "stuck" not in incident.summary:
        parts.append(f"stuck {incident.stuck_s:.0f} s")
    return _cut("  ".join(parts), WIDTH - _LABEL)


def _culprits(incident: Incident) -> list[str]:
    if not incident.culprits:
        missing = "; ".join(incident.missing)
        if not missing and incident.cause is not None and incident.cause.first is not None:
            whom = {"storage": "the storage", "other": "whoever ended the job"}
            what = whom.get(incident.cause.cause_class, "the program, or what all ranks use")
            return [_line("culprit", f"no rank: it is {what}")]
        return _wrapped("culprit", f"cause unknown; missing: {missing}" if missing else "cause unknown")
    lines: list[str] = []
    groups = alike(incident.culprits)
    for index, ones in enumerate(groups[:_CULPRITS]):
        lines += _wrapped("culprit" if index == 0 else "", _culprit(ones))
    hidden = [one for ones in groups[_CULPRITS:] for one in ones]
    if hidden:
        ranks = fold_ranks(one.rank for one in hidden if one.rank is not None)
        more = f"and {len(hidden)} more" + (f": ranks {ranks}" if ranks else "")
        lines.append(_line("", _cut(more, WIDTH - _LABEL)))
    return lines


def _culprit(ones: Sequence[Culprit]) -> str:
    """One line for culprits that are alike."""
    first, detail = ones[0], shared_detail(ones)
    what = first.cause or "cause unknown"
    if first.slowdown > 0:
        what += f" ×{span([one.slowdown for one in ones], '.1f')}"
    where = first.stage if not first.stage or first.stage.startswith("after ") else f"in {first.stage}"
    if where in what + detail:
        where = ""
    return f"{who_all(ones)}  {'; '.join(filter(None, (what, detail, where)))}"


def _short(incident: Incident) -> str:
    named = [who_all(ones).replace("  ", " ") for ones in alike(incident.culprits)[:2]]
    return ", ".join(named) or "cause unknown"


def _victims(incident: Incident, world: int) -> list[str]:
    count = len(incident.victims)
    if count == 0:
        return []
    folded = fold_ranks(incident.victims)
    verb = "waiting" if incident.kind in ("hang", "slow", "desync") else "lost a peer"
    if len(folded) <= _FOLDED:
        noun = "rank" if count == 1 else "ranks"
        share = f" ({count} of {world})" if world else ""
        return [_line("victims", f"{noun} {folded} {verb}{share}")]
    return [_line("victims", f"{count} ranks {verb}")]


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
    if not incident.actions and incident.next_action:
        return _wrapped("action", _outlook_words(incident, now_unix_s))
    if not incident.actions and incident.has_deaths:
        return [_line("action", "the launchers end the job, or start it again where --max-restarts allows")]
    if not incident.actions:
        return [_line("action", "none (watching only)")]
    lines: list[str] = []
    for index, action in enumerate(actions):
        cost = "" if action.expected_cost_s is None else f"expected cost {action.expected_cost_s:.0f} s"
        lines += _beside("action" if index == 0 else "", done(action), cost)
    return lines


def _outlook_words(incident: Incident, now_unix_s: float | None) -> str:
    """The next action in words: ``ends rank 0 in 29 s if nothing moves``."""
    at_s = incident.next_unix_s
    if at_s is None:
        return incident.next_action
    if now_unix_s is None:
        when = f"at {time.strftime('%H:%M:%S', time.localtime(at_s))}"
    else:
        when = f"in {max(math.ceil(at_s - now_unix_s), 1)} s"
    return f"{incident.next_action} {when} if nothing moves"


def _closing(incident: Incident) -> str:
    if incident.status == "open":
        return f"open{_cost(incident)} so far"
    if incident.status == "ended":
        return "over with the job, or by what came after it" + _cost(incident)
    if incident.status == "transient":
        return "gone before it was located"
    at = f"step {incident.relief_step}" if incident.relief_step is not None else "unknown step"
    if incident.kind == "slow" and incident.onset_step is not None and incident.relief_step is not None:
        return f"{at}  over after {incident.relief_step - incident.onset_step} steps{_cost(incident)}"
    if incident.recovery is not None:
        return f"{at}  training again {seconds(incident.recovery.seconds)} after it"
    if incident.stuck_s is not None:
        return f"{at}  over after {incident.stuck_s:.0f} s"
    return f"{at}  over"


def _cost(incident: Incident) -> str:
    """The cost of a slowdown for all ranks together: ``, 7.2 GPU-seconds lost, 3 GPU-seconds saved``."""
    text = ""
    if incident.lost_s is not None:
        text += f", {accelerator_time(incident.lost_s * incident.world_size)} lost"
    if incident.saved_s > 0:
        text += f", {accelerator_time(incident.saved_s * incident.world_size)} saved"
    return text


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
