"""The fenced blocks of a page, for tests that run or check them as they are printed."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^ *```(\w*) *$")


def fences(path: Path, language: str) -> list[tuple[int, str]]:
    """The blocks of a page in one language, without their common indent, each with the number of its first line."""
    found: list[tuple[int, str]] = []
    inside: list[str] | None = None
    begun, name = 0, ""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        match = _FENCE.match(line)
        if match is None:
            if inside is not None:
                inside.append(line)
        elif inside is None:
            inside, begun, name = [], number + 1, match[1]
        else:
            if name == language:
                found.append((begun, textwrap.dedent("\n".join(inside)) + "\n"))
            inside = None
    return found
