"""Text on a terminal: how many columns it takes, cut to fit, and in ASCII where the terminal knows nothing else."""

from __future__ import annotations

import unicodedata

from keepstep.core.log_lines import one_line

_IN_ASCII = str.maketrans(
    {"→": "->", "↔": "<->", "×": "x", "≈": "~", "…": "~", "·": ".", "─": "-", "▲": "^", "▼": "v"}
)


def columns_of(text: str) -> int:
    """How many columns of a terminal the text takes; wide characters take two, combining ones none."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def fitted(text: str, width: int, *, right: bool = False) -> str:
    """The text in exactly ``width`` columns: cut, then with … at its end, or filled with spaces.

    Characters that could move the cursor are written like ``\\x1b``. ``right``: the spaces come before it.
    """
    text = one_line(text)
    if (missing := width - columns_of(text)) < 0:
        text = _cut(text, width)
        missing = width - columns_of(text)
    return " " * missing + text if right else text + " " * missing


def in_ascii(text: str) -> str:
    """The text for a terminal that knows ASCII only: signs that we use have a likeness, all others are ``?``."""
    if text.isascii():
        return text
    return text.translate(_IN_ASCII).encode("ascii", "replace").decode()


def wrapped(text: str, width: int, most: int) -> list[str]:
    """The text in at most ``most`` lines of so many columns, broken between words where that can be."""
    lines: list[str] = []
    rest = one_line(text).strip()
    while rest and len(lines) < most:
        if columns_of(rest) <= width:
            lines.append(rest)
            break
        if len(lines) == most - 1:
            lines.append(_cut(rest, width))
            break
        piece = _first(rest, width)
        space = piece.rfind(" ")
        # A word that would leave half of the line empty is broken.
        piece = (
            piece[:space] if space > len(piece) // 2 and rest[len(piece) : len(piece) + 1] != " " else piece
        )
        lines.append(piece.rstrip())
        rest = rest[len(piece) :].lstrip()
    return lines


def _cut(text: str, width: int) -> str:
    return f"{_first(text, width - 1)}…" if width > 0 else ""


def _first(text: str, width: int) -> str:
    """As many characters from the beginning as fit into so many columns."""
    taken = 0
    for place, char in enumerate(text):
        taken += _columns(char)
        if taken > width:
            return text[:place]
    return text


def _columns(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
