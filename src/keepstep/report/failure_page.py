"""A failure as a page for people, and as JSON. Secrets are blanked in both."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from keepstep.core.log_lines import one_line
from keepstep.core.ranges import fold_ranks
from keepstep.core.told import Failure, Told, Words
from keepstep.detect.secrets import blanked
from keepstep.detect.templates import TemplateTree

_WIDTH = 160
_MOST_THEN = 4


def as_json(failure: Failure) -> dict[str, Any]:
    """``class`` is ``none`` where nothing failed; ``root_line`` is empty where the cause is unknown."""
    root = failure.root
    return {
        "class": failure.cause_class or "none",
        "sub": failure.kind,
        "root_line": blanked(root.line) if root else "",
        "culprits": [blanked(str(one)) for one in failure.culprits],
        "title": failure.title,
        "confidence": failure.confidence if failure.cause_class else "",
        "advice": failure.advice,
        "row": root.row.name if root else "",
        "path": blanked(root.places.get("path", "")) if root else "",
        "file": root.source if root else "",
        "line": root.number if root else 0,
        "followers": sum(one.count for one in failure.followers),
        "missing": list(failure.missing),
    }


def page(failure: Failure, words: Sequence[Words], name: str, traceback: Sequence[str] = ()) -> str:
    """The page: what failed, the cause, who, the first line, what followed, what to do; the traceback last."""
    lines = sum(one.lines for one in words)
    if not failure.cause_class:
        return f"nothing failed ({_counted(lines, 'line')})"
    rows = [("FAILED", one_line(f"{name}  ({_counted(lines, 'line')})"))]
    counted = f", {failure.root.count:,} lines say so" if failure.root and failure.root.count > 1 else ""
    what = f"{failure.cause_class}: {failure.title}" if failure.root else failure.title
    rows.append(("cause", f"{what}   confidence {failure.confidence}{counted}"))
    if failure.culprits:
        rows.append(("culprit", blanked(", ".join(map(str, failure.culprits)))))
    elif failure.root:
        rows.append(("culprit", "none named"))
    named = any(one.path for one in failure.culprits)
    if failure.root and not named and (path := failure.root.places.get("path")):
        rows.append(("path", one_line(blanked(path))))
    if failure.root:
        rows.append(("first", _said(failure.root)))
    rows += [("then" if not at else "", text) for at, text in enumerate(_then(failure))]
    if failure.advice:
        rows.append(("advice", failure.advice))
    rows += [("missing", text) for text in failure.missing]
    if failure.root:
        rows.append(("next", "keepstep why --explain 'LINE' shows the row of the tables"))
    shown = "\n".join(f"{title:<9} {text}" for title, text in rows)
    if not traceback:
        return shown
    return "\n".join([shown, "", *(one_line(blanked(line)) for line in traceback)])


def _said(one: Told, after: Told | None = None) -> str:
    """A line with its place, and how much later it was than another."""
    text = one_line(blanked(one.line))
    text = text if len(text) <= 4 * _WIDTH else text[: 4 * _WIDTH] + "…"
    later = ""
    if after is not None and one.time_s is not None and after.time_s is not None:
        later = f" {one.time_s - after.time_s:+.2f} s"
    return f"{_where(one)}{later}  {text}"


def _where(one: Told) -> str:
    when = ""
    if one.time_s is not None:
        when = datetime.fromtimestamp(one.time_s, timezone.utc).strftime(" %H:%M:%S")
    return f"{one.source}:{one.number}{when}"


def _then(failure: Failure) -> list[str]:
    """What came after the root, equal texts once; and how many lines only follow."""
    shown: list[str] = []
    seen = {failure.root.row.name} if failure.root else set[str]()
    for one in failure.then:
        if one.row.name in seen or one.row.role == "note":
            continue
        seen.add(one.row.name)
        if len(shown) < _MOST_THEN:
            shown.append(_said(one, failure.root))
    if failure.followers:
        ranks = {one.speaker.rank for one in failure.followers if one.speaker.rank is not None}
        who = f"{_counted(len(ranks), 'rank').partition(' ')[2]} {fold_ranks(ranks)}: " if ranks else ""
        tree = TemplateTree(most=1000)
        texts = len({found.number for one in failure.followers if (found := tree.add(one.text)) is not None})
        count = sum(one.count for one in failure.followers)
        follow = "only follows" if count == 1 else "only follow"
        shown.append(f"{who}{_counted(count, 'line')} {follow} ({_counted(texts, 'text')})")
    return shown


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
