"""Compact names for many ranks or nodes: ``1-8,12`` and, as Slurm writes them, ``gpu-[01-08]``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from keepstep.core.errors import UsageError

_NUMBERED = re.compile(r"^(?P<prefix>.*?)(?P<digits>\d+)(?P<suffix>\D*)$", re.ASCII)
_MAX_EXPANDED = 1 << 22  # numbers: a longer range than any job has ranks is a typing error


def fold_ranks(ranks: Iterable[int]) -> str:
    """Sorted, distinct ``ranks`` as ``"1-8,12"``; ``""`` for none. Ranks are >= 0."""
    return _fold_numbers(sorted(set(ranks)), width=0)


def expand_ranks(text: str) -> tuple[int, ...]:
    """The ranks of ``"1-8,12"``, sorted and distinct: the inverse of `fold_ranks`.

    Raises:
        UsageError: the text is no such list.
    """
    ranks: set[int] = set()
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece, re.ASCII)
        if match is None:
            raise UsageError(f"list {text!r}: {piece!r} is neither a number nor a range like 1-8")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= _MAX_EXPANDED:
            raise UsageError(
                f"list {text!r}: the range {piece!r} is empty or too long; write the smaller number first"
            )
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


def fold_nodes(names: Iterable[str]) -> str:
    """Distinct node names as ``"gpu-[01-08,12],login"``, sorted; zero-padded numbers keep their width.

    Names are folded over their last number, and only with names that are equal around it.
    """
    numbered: dict[tuple[str, str, int], list[int]] = {}
    plain: list[str] = []
    for name in set(names):
        match = _NUMBERED.match(name)
        if match is None:
            plain.append(name)
            continue
        digits = match["digits"]
        width = len(digits) if digits.startswith("0") else 0
        numbered.setdefault((match["prefix"], match["suffix"], width), []).append(int(digits))
    _join_widths(numbered)
    folded = [(name, name) for name in plain]
    for (prefix, suffix, width), numbers in numbered.items():
        inner = _fold_numbers(sorted(numbers), width)
        inner = f"[{inner}]" if len(numbers) > 1 else inner
        folded.append((prefix, f"{prefix}{inner}{suffix}"))
    return ",".join(text for _, text in sorted(folded))


def _join_widths(numbered: dict[tuple[str, str, int], list[int]]) -> None:
    """Put ``10`` beside ``08``: an unpadded number as wide as a zero-padded family belongs to that family."""
    for prefix, suffix, width in [key for key in numbered if key[2] > 0]:
        for number in numbered.pop((prefix, suffix, 0), []):
            its = width if len(str(number)) == width else 0
            numbered.setdefault((prefix, suffix, its), []).append(number)


def _fold_numbers(numbers: Iterable[int], width: int) -> str:
    """Ascending numbers as ``"1-8,12"``, each padded with zeros to ``width`` digits."""
    parts: list[str] = []
    # In a run of consecutive numbers the distance between a number and its place is constant.
    for _, run in itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        members = [f"{number:0{width}d}" for _, number in run]
        parts.append(members[0] if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(parts)
