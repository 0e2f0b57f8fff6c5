"""What is true of each case: ``truth.json`` of the folder ``field_cases``, read and checked."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

NAME = "truth.json"
CONFIDENCES = ("low", "medium", "high")


@dataclass(frozen=True)
class Truth:
    """One case. A field that is empty, or None, is not judged.

    Attributes:
        ranks: processes of the job.
        limit_s: seconds after which the job is ended from outside.
        flags: of ``keepstep run``.
        analyze: there is no job; ``keepstep analyze`` judges what is in the folder.
        culprits: sets of ranks, each of which is right by itself.
        victims: ranks that no incident may name.
        kinds: what the incident may be called.
        sites: call sites, one of which the verdict names.
        says: a regular expression that is found in the verdict, or in the incident's JSON.
        says_once: words that the run says once.
        slow: first and last step of each slowdown.
        needs: packages without which the job does not run.
        note: what a reader must find.
    """

    name: str
    ranks: int = 1
    limit_s: float = 60.0
    flags: tuple[str, ...] = ()
    analyze: bool = False
    healthy: bool = False
    culprits: tuple[frozenset[int], ...] = ()
    victims: frozenset[int] = frozenset()
    kinds: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    says: str = ""
    says_once: str = ""
    onset_step: int | None = None
    phase: str = ""
    restarts_at_most: int | None = None
    confidence_at_least: str = ""
    confidence_at_most: str = ""
    slow: tuple[tuple[int, int], ...] = ()
    needs: tuple[str, ...] = ()
    note: str = ""

    @property
    def number(self) -> str:
        """``11`` of ``11-exit0-early``."""
        return self.name.partition("-")[0]

    @property
    def judged(self) -> bool:
        """Whether there is more than a note for readers."""
        bare = Truth(
            self.name, self.ranks, self.limit_s, self.flags, self.analyze, needs=self.needs, note=self.note
        )
        return self != bare


def read(folder: Path) -> list[Truth]:
    """All cases of the folder, in the order of its file.

    Raises:
        ValueError: a case has a field that is not known here, and would go unjudged.
    """
    found: dict[str, dict[str, Any]] = json.loads((folder / NAME).read_text())
    return [parse(name, told) for name, told in found.items()]


def parse(name: str, told: Mapping[str, Any]) -> Truth:
    """One case from its JSON."""
    unknown = set(told) - {field.name for field in fields(Truth)} | told.keys() & {"name"}
    if unknown:
        raise ValueError(f"{NAME}: {name}: unknown fields {', '.join(sorted(unknown))}")
    for field in ("confidence_at_least", "confidence_at_most"):
        if told.get(field, "low") not in CONFIDENCES:
            raise ValueError(f"{NAME}: {name}: {field} is {told[field]!r}, not one of {CONFIDENCES}")
    return Truth(
        name, **{field: _READ[field](value) if field in _READ else value for field, value in told.items()}
    )


def _alternatives(culprits: list[Any]) -> tuple[frozenset[int], ...]:
    """A list of ranks is one set; a list of such lists has one of each."""
    if not culprits:
        return ()
    if isinstance(culprits[0], list):
        return tuple(frozenset(ranks) for ranks in culprits)
    return (frozenset(culprits),)


_READ: Mapping[str, Callable[[Any], Any]] = {
    "flags": lambda text: tuple(shlex.split(text)),
    "culprits": _alternatives,
    "victims": frozenset,
    "kinds": tuple,
    "sites": tuple,
    "slow": lambda pairs: tuple((first, last) for first, last in pairs),
    "needs": lambda text: tuple(word.strip() for word in text.split(",") if word.strip()),
}
