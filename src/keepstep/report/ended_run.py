"""How a run has ended, and with which nodes, as the files of its folder tell."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from keepstep.core.regular_files import read_regular
from keepstep.core.told import CauseClass

T = TypeVar("T")
_MOST_BYTES = 1 << 20
_MOST_STATUS = 256 << 20  # with a row for each rank


class Cause(msgspec.Struct, rename={"cause_class": "class"}):
    """Class and kind as those of `core.told.Row`."""

    cause_class: CauseClass
    kind: str


class Ended(msgspec.Struct):
    """The end of a run that its scheduler ended."""

    exit_code: int
    reason: str
    cause: Cause


def read_end(run: Path) -> Ended | None:
    """How the scheduler ended a run; None where it did not, or the file does not say so."""
    ended = _decoded(run / "end.json", Ended)
    # A lost or broken node is no scheduler's doing: incidents tell of it.
    return ended if ended is not None and ended.cause.cause_class == "other" else None


class End(msgspec.Struct):
    """With which code a run has ended, and when; in words what ended it, why, and the number of its last incident."""

    exit_code: int
    ended_unix_s: float
    category: str = ""
    reason: str = ""
    incident: str = ""


def end_of(run: Path) -> End | None:
    """The end of a run; None while it goes on, or where the file cannot be read."""
    return _decoded(run / "end.json", End)


class _Node(msgspec.Struct):
    node: str = ""


class _Verdict(msgspec.Struct):
    culprits: tuple[_Node, ...] = ()


def newest_verdict(run: Path) -> tuple[str, list[str]]:
    """The number of the newest incident of a run, as in the names of its files, and the nodes that it blames."""
    newest = max(run.glob("incidents/[0-9]*.json"), default=None)
    if newest is None:
        return "", []
    verdict = _decoded(newest, _Verdict) or _Verdict()
    return newest.stem, sorted({one.node for one in verdict.culprits if one.node})


class DrainedNode(msgspec.Struct, frozen=True):
    """A node that an operator has drained: the scheduler is to give it to nobody."""

    node: str
    why: str
    incarnation: int


class _Status(msgspec.Struct):
    nodes: tuple[_Node, ...] = ()
    drained: tuple[DrainedNode, ...] = ()


def members_of(run: Path) -> tuple[frozenset[str], tuple[DrainedNode, ...]]:
    """Names of the nodes that play ranks, and those drained by hand, as ``RUN/status.json`` tells.

    None where it cannot be read.
    """
    status = _decoded(run / "status.json", _Status, _MOST_STATUS) or _Status()
    return frozenset(one.node for one in status.nodes if one.node), status.drained


def verdict_line(run: Path, number: str) -> str:
    """The first line of an incident's verdict; empty where there is none. ``number``: as `newest_verdict` has it."""
    try:
        text = read_regular(run / "incidents" / f"{number}.txt", _MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return " ".join(text.partition("\n")[0].split())


def _decoded(path: Path, kind: type[T], most: int = _MOST_BYTES) -> T | None:
    """The content of a JSON file of at most so many bytes; None where it is missing or has another form."""
    try:
        return msgspec.json.decode(read_regular(path, most), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
