"""Culprits of which the same is told, apart from numbers of their own such as how long each has waited."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.core.incident import Culprit

_OWN = re.compile(
    r"\brank ?(?P<rank>\d{1,9})\b"
    r"|(?P<amount>\b\d{1,18}(?:\.\d{1,18})?)(?=%| ?(?:s|ms|seconds|milliseconds)\b)"
    r"|(?<=[\]\d]:)\d{2,5}\b"  # the port of an address
    r"|\b0x[0-9a-f]{1,16}\b",
    re.ASCII,
)


def alike(culprits: Sequence[Culprit]) -> list[tuple[Culprit, ...]]:
    """The culprits in their order, those together that share cause, place and confidence."""
    found: dict[object, list[Culprit]] = {}
    for place, one in enumerate(culprits):
        pieces, _ = _apart(one)
        told = one.cause, one.stage, one.confidence, one.slowdown > 0, *pieces
        found.setdefault(place if one.rank is None or one.link is not None else told, []).append(one)
    return [tuple(ones) for ones in found.values()]


def shared_detail(ones: Sequence[Culprit]) -> str:
    """The detail of culprits that are `alike`: ``in forward for 12 to 14 s``."""
    pieces, _ = _apart(ones[0])
    columns = zip(*(_apart(one)[1] for one in ones), strict=True)
    values = [_span(column) if len(set(column)) > 1 else column[0] for column in columns]
    return "".join(piece + value for piece, value in zip(pieces, [*values, ""], strict=True))


def span(values: Sequence[float], form: str) -> str:
    """The lowest and the highest value: ``1.8 to 2.1``; only one of them where they look the same."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _span(texts: Sequence[str]) -> str:
    try:
        return f"{min(texts, key=float)} to {max(texts, key=float)}"
    except ValueError:
        return "rank N" if texts[0].startswith("rank") else "…"


def _apart(culprit: Culprit) -> tuple[list[str], list[str]]:
    """The detail's text between the culprit's own numbers, a piece more than there are numbers, and these numbers."""
    pieces: list[str] = []
    values: list[str] = []
    begin = 0
    for found in _OWN.finditer(culprit.detail):
        if found["rank"] is None or int(found["rank"]) == culprit.rank:
            pieces.append(culprit.detail[begin : found.start()])
            values.append(found[0])
            begin = found.end()
    return [*pieces, culprit.detail[begin:]], values
