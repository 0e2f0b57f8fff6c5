"""Compact names for many ranks or nodes: ``1-8,12`` and, as Slurm writes them, ``gpu-[01-08]``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from keepstep.core.errors import UsageError

_NUMBERED = re.compile(r"^(?P<prefix>.*?)(?P<digits>\d+)(?P<suffix>\D*)$", re.ASCII)
_MAX_EXPANDED = 1 << 22  # a range longer than any job is a typing error, not a request for memory


def fold_ranks(ranks: Iterable[int]) -> str:
    """Sorted, distinct ``ranks`` as ``"1-8,12"``; ``""`` for none. Ranks are >= 0."""
    return _fold_numbers(sorted(set(ranks)), width=0)


def expand_ranks(text: str) -> tuple[int, ...]:
    """The ranks of ``"1-8,12"``, sorted and distinct: the inverse of `fold_ranks`.

    `UsageError` when the text is no such list.
    """
    ranks: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        ranks.update(range(*_bounds(part, text)))
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
    folded = [(prefix, _fold_family(prefix, suffix, width, sorted(numbers)))
              for (prefix, suffix, width), numbers in numbered.items()]  # fmt: skip
    folded.extend((name, name) for name in plain)
    return ",".join(text for _, text in sorted(folded))


def expand_nodes(text: str) -> tuple[str, ...]:
    """The names in ``"gpu-[01-08,12],login"``, in the order written; the inverse of `fold_nodes`.

    `UsageError` on unbalanced brackets or ranges that are none.
    """
    names: list[str] = []
    for part in _split_outside_brackets(text):
        match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\]([^\[\]]*)", part)
        if match is None:
            if "[" in part or "]" in part:
                raise UsageError(f"node list {text!r}: cannot read {part!r}; write it like gpu-[01-08,12]")
            names.append(part)
            continue
        prefix, inner, suffix = match.groups()
        for piece in filter(None, (p.strip() for p in inner.split(","))):
            first = piece.split("-")[0]
            width = len(first) if first.startswith("0") else 0
            names.extend(f"{prefix}{number:0{width}d}{suffix}" for number in range(*_bounds(piece, text)))
    return tuple(dict.fromkeys(names))


def _join_widths(numbered: dict[tuple[str, str, int], list[int]]) -> None:
    """Put ``10`` beside ``08``: an unpadded number of exactly a padded family's width belongs to it."""
    for prefix, suffix, width in [key for key in numbered if key[2] > 0]:
        loose = numbered.get((prefix, suffix, 0), [])
        fitting = [number for number in loose if len(str(number)) == width]
        if fitting:
            numbered[prefix, suffix, width].extend(fitting)
            rest = [number for number in loose if len(str(number)) != width]
            numbered[prefix, suffix, 0] = rest
            if not rest:
                del numbered[prefix, suffix, 0]


def _fold_family(prefix: str, suffix: str, width: int, numbers: list[int]) -> str:
    inner = _fold_numbers(numbers, width)
    return f"{prefix}[{inner}]{suffix}" if len(numbers) > 1 else f"{prefix}{inner}{suffix}"


def _fold_numbers(numbers: list[int], width: int) -> str:
    parts: list[str] = []
    start = previous = -2
    for number in [*numbers, None]:
        if number is not None and number == previous + 1:
            previous = number
            continue
        if start >= 0:
            head = f"{start:0{width}d}"
            parts.append(head if start == previous else f"{head}-{previous:0{width}d}")
        if number is not None:
            start = previous = number
    return ",".join(parts)


def _bounds(piece: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece, re.ASCII)
    if match is None:
        raise UsageError(f"list {text!r}: {piece!r} is neither a number nor a range like 1-8")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first or last - first >= _MAX_EXPANDED:
        raise UsageError(
            f"list {text!r}: the range {piece!r} is empty or too long; write the smaller number first"
        )
    return first, last + 1


def _split_outside_brackets(text: str) -> list[str]:
    parts: list[str] = []
    depth, current = 0, ""
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    if depth != 0:
        raise UsageError(f"node list {text!r}: brackets do not match; write it like gpu-[01-08,12]")
    parts.append(current.strip())
    return [part for part in parts if part]
