"""Stretches of logs as text and as JSON. Secrets are blanked in both, and no text moves the terminal's cursor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepstep.core.log_lines import one_line
from keepstep.core.told import Stretch
from keepstep.detect.secrets import blanked

_WIDEST = 400  # characters of a line


def shown(stretches: Sequence[Stretch]) -> str:
    """The stretches below each other, each below its log's name; ``>`` stands before lines that tell something."""
    return "\n\n".join("\n".join(_lines_of(one)) for one in stretches)


def stretches_as_json(stretches: Sequence[Stretch]) -> list[dict[str, Any]]:
    """``first``: the number of the first line in its log, 0 where that is not known; ``marked``: indices of lines."""
    return [
        {
            "log": one.log,
            "rank": one.rank,
            "first": one.first,
            "lines": [_cut(blanked(line)) for line in one.lines],
            "marked": sorted(one.marked),
        }
        for one in stretches
    ]


def _lines_of(stretch: Stretch) -> list[str]:
    who = "" if stretch.rank is None else f"  (rank {stretch.rank})"
    what = "" if stretch.marked else "  its end; no line tells of a failure"
    lines = [one_line(f"{stretch.log}{who}{what}")]
    width = len(str(stretch.first + len(stretch.lines)))
    for at, line in enumerate(stretch.lines):
        number = f"{stretch.first + at:>{width}} " if stretch.first else ""
        mark = ">" if at in stretch.marked else " "
        lines.append(f"{mark} {number} {_cut(one_line(blanked(line)))}".rstrip())
    return lines


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}…"
