"""The tables of messages: read, checked, and asked which row a line matches. ``docs/design/why.md`` has the format."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, cast

from keepstep.core.config import read_file
from keepstep.core.errors import UsageError
from keepstep.core.told import BLAMES, CLASSES, ROLES, Row

_PLACES = {
    "rank": r"\d{1,7}",
    "ranks": r"\d{1,7}(?:-\d{1,7})?(?:, ?\d{1,7}(?:-\d{1,7})?){0,999}",
    "pod": r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?",
    "other_rank": r"\d{1,7}",
    "local_rank": r"\d{1,7}",
    "process": r"\d{1,7}",
    "pid": r"\d{1,10}",
    "number": r"-?\d{1,20}",
    "hex": r"(?:0x)?[0-9a-fA-F]+",
    "pci": r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?",
    "peer": r"(?:\[[0-9a-fA-F:.]+\]|[0-9a-fA-F]{0,4}:[0-9a-fA-F:]+(?:%\w+)?|(?:\d{1,3}\.){3}\d{1,3}|"
    r"[\w-]+(?:\.[\w-]+)*)",
    "node": r"[\w-]+(?:\.[\w-]+)*",
    "gpu": r"GPU ?\d{1,3}",
    "path": r"[^\s'\",]+",
    "device": r"[\w:./-]+",
    "word": r"[\w.:-]+",
    "kind": r"[\w.]+",
}
_PART = re.compile(r"\{(\w+)\}|(\*)|(#)|(%)|(\s+)")
_WORD = re.compile(r"[a-z0-9_]+")
# Words that many lines have: a text is looked up by another one of its words, where it has one.
_COMMON = frozenset((
    "and", "at", "be", "by", "call", "cannot", "could", "cuda", "data", "device", "during", "error", "errors", "fail",
    "failed", "failure", "file", "for", "from", "function", "gpu", "has", "in", "is", "it", "line", "memory", "nccl",
    "no", "not", "of", "on", "operation", "or", "out", "process", "rank", "runtime", "runtimeerror", "set", "that",
    "the", "this", "to", "torch", "unable", "use", "used", "using", "warn", "while", "with", "you",
))  # fmt: skip
_FIELDS = frozenset((
    "name", "text", "pattern", "keys", "role", "class", "kind", "title", "blames", "advice", "example", "near",
    "source", "licence", "number", "general",
))  # fmt: skip
# Of a line that tells of a timeout and of a lost connection the first counts.
_ORDER = tuple("timeout" if role == "echo" else "echo" if role == "timeout" else role for role in ROLES)
_BEGINS, _ENDS = r"(?<![A-Za-z0-9_])", r"(?![A-Za-z0-9_])"
_ADVICE = "correct the table; docs/design/why.md shows how one is written"
_LONGEST_NAME = 100  # characters; the name of a row goes from the nodes to the controller
_WIDEST = 300  # A * stands for at most so many characters.


class RowMatcher:
    """Says which row of the tables a text matches. Patterns are compiled when they are first needed."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        self._compiled: dict[tuple[int, int], re.Pattern[str]] = {}
        # By their rarest word: patterns (numbers of row and pattern) and all words that they want.
        self._index: dict[str, list[tuple[tuple[int, int], frozenset[str]]]] = {}
        self._always: set[tuple[int, int]] = set()
        lookups = [(at, *lookup) for at, row in enumerate(self.rows) for lookup in row.lookups]
        counts = Counter(word for _, _, words in lookups for word in words)
        for at, number, words in lookups:
            if words:
                rarest = min(words, key=lambda word: (word in _COMMON, counts[word], -len(word), word))
                self._index.setdefault(rarest, []).append(((at, number), words))
            else:
                self._always.add((at, number))

    def candidates(self, text: str) -> list[tuple[int, int]]:
        """Rows and their patterns, by number, that a text may match."""
        words = set(_WORD.findall(text.lower()))
        index = self._index
        found = {
            pattern for word in words if word in index for pattern, wanted in index[word] if wanted <= words
        }
        return sorted(found | self._always) if self._always else sorted(found)

    def match(
        self, text: str, candidates: Sequence[tuple[int, int]] | None = None
    ) -> tuple[Row, dict[str, str]] | None:
        """The row that a text matches, with what stands at its places; ``candidates``: of the text, where known.

        Of several one that is harmless wins, then the less general, then words of cause over words of consequence, then
        what comes first; but of patterns for one kind of failure one that tells who.
        """
        best: tuple[Row, dict[str, str]] | None = None
        for at in self.candidates(text) if candidates is None else candidates:
            row = self.rows[at[0]]
            if best is not None and not _goes_before(row, *best):
                continue
            pattern = self._compiled.get(at)
            if pattern is None:
                pattern = self._compiled[at] = re.compile(row.patterns[at[1]], re.IGNORECASE)
            if found := pattern.search(text):
                places = {name: value for name, value in found.groupdict().items() if value}
                if best is None or places or _weight(row) < _weight(best[0]):
                    best = row, places
        return best


def _goes_before(row: Row, other: Row, places: dict[str, str]) -> bool:
    """Whether a row may be better than another that matches, with its places."""
    weight, best = _weight(row), _weight(other)
    alike = (row.role, row.cause_class, row.kind) == (other.role, other.cause_class, other.kind)
    return weight < best or (weight == best and alike and not places)


def _weight(row: Row) -> tuple[int, int]:
    """What a row counts against others that match, too: less is more."""
    return (-9, 0) if row.role == "harmless" else (row.general, _ORDER.index(row.role))


@cache
def shipped_rows() -> tuple[Row, ...]:
    """The rows of keepstep's own tables. A row that comes first wins."""
    folder = resources.files("keepstep.detect") / "tables"
    files = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(".toml")), key=lambda one: one.name
    )
    return tuple(row for entry in files for row in rows_of_file(str(entry)))


def rows_of_file(path: str) -> tuple[Row, ...]:
    """The rows of a table. Raises UsageError where it cannot be read or a row is wrong; the message says which."""
    from pathlib import Path

    return tuple(rows_of(read_file(Path(path), _ADVICE), path.rpartition("/")[2]))


def rows_of(table: Mapping[str, Any], origin: str) -> Iterator[Row]:
    """The rows of a parsed table: what ``[defaults]`` has goes for each ``[[row]]`` that does not say otherwise."""
    defaults: Any = table.get("defaults", {})
    rows: Any = table.get("row", [])
    if not isinstance(rows, list) or not isinstance(defaults, dict):
        raise UsageError(f"{origin}: write rows as [[row]] and what they share as [defaults]")
    for count, entry in enumerate(cast("list[Any]", rows), 1):
        if not isinstance(entry, dict):
            raise UsageError(f"{origin}: row {count} is no table; write [[row]] on a line of its own")
        yield _row({**cast("dict[str, Any]", defaults), **cast("dict[str, Any]", entry)}, count, origin)


def _row(entry: Mapping[str, Any], count: int, origin: str) -> Row:
    where = f"{origin}: row {entry.get('name', count)}"
    if unknown := sorted(set(entry) - _FIELDS):
        raise UsageError(f"{where}: there is no {unknown[0]}; known are {', '.join(sorted(_FIELDS))}")
    number = entry.get("number")

    def said(field: str, default: str = "") -> str:
        text = entry.get(field, default)
        if not isinstance(text, str):
            raise UsageError(f"{where}: {field} is no text")
        return text if number is None else text.replace("{number}", str(number))

    general = entry.get("general", 0)
    if not isinstance(general, int):
        raise UsageError(f"{where}: general is no number; say 0, 1 or 2")
    name = said("name") or (f"{origin.partition('.')[0]}-{number}" if number is not None else "")
    for field, value, known in (
        ("role", said("role"), ROLES),
        ("class", said("class", "other"), CLASSES),
        ("blames", said("blames", "nobody"), BLAMES),
    ):
        if value not in known:
            raise UsageError(f"{where}: {field} is {value!r}; say one of {', '.join(known)}")
    if not name or not said("kind") or not said("title"):
        raise UsageError(f"{where}: name, kind and title must be there")
    if len(name) > _LONGEST_NAME:
        raise UsageError(f"{where}: its name has {len(name)} characters; {_LONGEST_NAME} are the most")
    texts = entry.get("text", [])
    wanted = [texts] if isinstance(texts, str) else cast("list[Any]", texts)
    if not all(isinstance(one, str) and one.strip() for one in wanted) or bool(wanted) == (
        "pattern" in entry
    ):
        raise UsageError(f"{where}: wants either text, one or a list, or pattern")
    if wanted:
        if twice := next((one for one in wanted if _has_a_place_twice(one)), ""):
            raise UsageError(f"{where}: {twice!r} has a place twice; write * for the second")
        spelled = [one if number is None else one.replace("{number}", str(number)) for one in wanted]
        patterns = tuple(pattern_of(one) for one in spelled)
        lookups = tuple((at, _words(one)) for at, one in enumerate(spelled))
    else:
        patterns = (said("pattern"),)
        keys = [str(key).lower() for key in cast("Sequence[Any]", entry.get("keys", ()))]
        lookups = tuple((0, frozenset({key})) for key in keys) or ((0, frozenset[str]()),)
        try:
            re.compile(patterns[0], re.IGNORECASE)
        except (re.error, OverflowError) as error:
            raise UsageError(f"{where}: its pattern is wrong: {error}") from None
    return Row(
        name, patterns, lookups, cast("Any", said("role")), cast("Any", said("class", "other")), said("kind"),
        said("title"), said("blames", "nobody"), said("advice"), said("example"), said("near"), said("source"),
        said("licence"), origin, general,
    )  # fmt: skip


def pattern_of(text: str) -> str:
    """The regular expression of a text of a table.

    ``*`` is anything between whole words, ``%`` the rest of a word, ``#`` a number, ``{rank}`` a named place.
    """
    made: list[str] = []
    at = 0
    for found in _PART.finditer(text):
        made.append(re.escape(text[at : found.start()]))
        at = found.end()
        name, star, number, rest, _ = found.groups()
        if name is not None:
            form = _PLACES.get(name)
            made.append(f"(?P<{name}>{form})" if form else re.escape(found[0]))
        elif star:
            before = _ENDS if _is_word(text[found.start() - 1 : found.start()]) else ""
            after = _BEGINS if _is_word(text[found.end() : found.end() + 1]) else ""
            made.append(f"{before}.{{0,{_WIDEST}}}?{after}")
        else:
            made.append(r"-?\d{1,20}" if number else r"[\w-]*" if rest else r"\s+")
    made.append(re.escape(text[at:]))
    begins = _BEGINS if _is_word(text[0]) or text[0] in "#{" else ""
    ends = _ENDS if _is_word(text[-1]) or text[-1] in "#}" else ""
    return begins + "".join(made) + ends


def _has_a_place_twice(text: str) -> bool:
    places = (
        [found[1] for found in _PART.finditer(text) if found[1] in _PLACES] if text.count("{") > 1 else []
    )
    return len(set(places)) < len(places)


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _words(text: str) -> frozenset[str]:
    """The whole words of a text of a table, in lower case."""
    lowered = text.lower()
    bare = _PART.sub(lambda part: (" " if part[2] or part[5] else "%") * len(part[0]), lowered)
    return frozenset(
        found[0]
        for found in _WORD.finditer(bare)
        if "%" not in (bare[found.start() - 1 : found.start()], bare[found.end() : found.end() + 1])
    )
