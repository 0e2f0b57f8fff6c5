"""The rows of a verdict that tell why processes died: the cause, the line that tells it, what followed, what to do."""

from __future__ import annotations

import time

from keepstep.core.incident import FailureCause, SpokenLine
from keepstep.core.ranges import fold_ranks
from keepstep.detect.secrets import blanked

_WIDEST = 400  # characters of a line that are shown


def cause_rows(cause: FailureCause) -> list[tuple[str, str]]:
    """Labels and texts, that of the cause first if one is known; a label is empty where a row goes on."""
    first = cause.first
    rows: list[tuple[str, str]] = []
    if first or not cause.following:
        rows.append(("cause", f"{cause.cause_class}: {cause.title}   confidence {cause.confidence}"))
    if cause.path:
        rows.append(("path", blanked(cause.path)))
    if first:
        rows.append(("first", _said(first)))
    then = [_said(one, first) for one in cause.then]
    if cause.following:
        ranks = cause.following_ranks
        who = f"rank{'s' if len(ranks) > 1 else ''} {fold_ranks(ranks)}: " if ranks else ""
        lines = "1 line only tells" if cause.following == 1 else f"{cause.following:,} lines only tell"
        then.append(f"{who}{lines} of others")
    rows += [("" if at else "then", text) for at, text in enumerate(then)]
    if cause.advice:
        rows.append(("advice", cause.advice))
    rows += [("missing", text) for text in cause.missing]
    return rows


def followed_rows(cause: FailureCause) -> list[tuple[str, str]]:
    """Labels and texts of the lines that only tell of others, one of each rank."""
    said = [_said(one, cause.first) for one in cause.followed]
    return [("" if at else "followed", text) for at, text in enumerate(said)]


def _said(line: SpokenLine, first: SpokenLine | None = None) -> str:
    who = f"rank {line.rank}" if line.rank is not None else f"{line.node} {line.source}".strip()
    if first is not None and first.unix_s is not None and line.unix_s is not None:
        when = f"{line.unix_s - first.unix_s:+.2f} s"
    elif line.unix_s is not None:
        when = time.strftime("%H:%M:%S", time.localtime(line.unix_s)) + f"{line.unix_s % 1:.2f}"[1:]
    else:
        when = ""
    text = blanked(line.text)
    return "  ".join(
        filter(None, (f"{who} {when}".strip(), text if len(text) <= _WIDEST else f"{text[:_WIDEST]}…"))
    )
