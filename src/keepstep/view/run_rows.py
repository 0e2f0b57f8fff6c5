"""Many runs at a glance: of each folder only the beginnings of its files are read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from keepstep.core.errors import RunError
from keepstep.core.exit_codes import STOPPED_BY_HAND
from keepstep.core.incident import Incident
from keepstep.core.log_lines import one_line
from keepstep.core.process_mark import is_alive
from keepstep.core.regular_files import read_part
from keepstep.report.incidents import incident_from_json
from keepstep.view.incident_words import headline, lost_share, worst_first

T = TypeVar("T")

_HEAD_BYTES = 16 << 10  # what is needed of status.json stands before the rows of its ranks
_MOST_BYTES = 16 << 20
_TAIL_BYTES = 16 << 10
_MOST_OPEN = 8  # open incidents that are read
_SILENT_S = 30.0  # a status that is older tells of a job that has ended without a word, or is cut off
_RECENT_S = 86_400.0  # a job that fell silent before that is no trouble of today
_DURATION = re.compile(rb'"d":\s?(\d{1,9}(?:\.\d{1,9})?)')


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run. ``state``: that of the job; ``finished``, ``failed``, ``stopped``, ``silent``; or ``broken``."""

    name: str
    path: str
    state: str
    step: int | None = None
    pace_s: float | None = None  # duration of the newest iteration
    lost: float | None = None  # share of each iteration that is lost now, 0 to 1
    verdict: str = ""  # the worst open incident, else the newest; of a broken folder what is wrong with it
    incident: int | None = None
    open_incidents: int = 0
    started_unix_s: float | None = None
    heard_unix_s: float = 0.0  # its end, or the last news of it
    is_live: bool = False
    is_trouble: bool = False


class _Described(msgspec.Struct):
    started_unix_s: float = 0.0
    host: str = ""
    launcher: Any = None


class _End(msgspec.Struct):
    exit_code: int
    ended_unix_s: float = 0.0
    reason: str = ""


class _Status(msgspec.Struct):
    unix_s: float = 0.0
    state: str = ""
    newest_step: int = -1
    open_incidents: tuple[int, ...] = ()


def rows_of(folders: Iterable[Path], now_unix_s: float) -> list[RunRow]:
    """A row for each run: those in trouble first, then those that live, then those that ended, the newest first."""
    return sorted((row_of(folder, now_unix_s) for folder in folders), key=_order)


def row_of(folder: Path, now_unix_s: float) -> RunRow:
    """The row of one run. Whatever its files hold, there is one: ``broken`` says what cannot be read."""
    try:
        return _row(folder, now_unix_s)
    except (RunError, OSError) as error:
        text = str(error) if isinstance(error, RunError) else f"{error.filename}: {error.strerror}"
        return RunRow(_text(folder.name), _text(str(folder)), "broken", verdict=one_line(text))


def _order(row: RunRow) -> tuple[int, float, float, str]:
    place = 3 if row.state == "broken" else 0 if row.is_trouble else 1 if row.is_live else 2
    return place, -(row.lost or 0.0), -row.heard_unix_s if not row.is_live else 0.0, row.name


def folders_in(folder: Path) -> Iterator[Path]:
    """The runs in a folder, or the folder itself where it is one. Raises OSError."""
    if (folder / "run.json").is_file():
        yield folder
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if os.path.exists(f"{entry.path}/run.json"):
                yield Path(entry.path)


def _row(folder: Path, now_s: float) -> RunRow:
    path = str(folder)
    found = _read(f"{path}/run.json", _Described)
    end = _read(f"{path}/end.json", _End)
    status, written_s = _status(f"{path}/status.json")
    if found is None and end is None and status is None:
        raise RunError(f"{path}: no run folder (no run.json in it), or not seen from here, as in a container")
    described = found or _Described()
    incidents = _incidents(
        f"{path}/incidents", () if end is not None or status is None else status.open_incidents
    )
    open_ones = worst_first(incidents) if end is None else []
    shown = open_ones[0] if open_ones else max(incidents, key=lambda one: one.number, default=None)
    heard_s = written_s or described.started_unix_s
    is_live = is_trouble = False
    lost: float | None = None
    if end is not None:
        state = {0: "finished", STOPPED_BY_HAND: "stopped"}.get(end.exit_code, "failed")
        heard_s = end.ended_unix_s or heard_s
    elif _lives(described, status, written_s, now_s):
        state = "starting" if status is None else status.state or "running"
        is_live, is_trouble = True, bool(open_ones)
        lost = None if status is None else lost_share(open_ones)
    else:
        state, is_trouble = "silent", now_s - heard_s < _RECENT_S
    return RunRow(
        _text(folder.name),
        _text(path),
        state,
        step=status.newest_step if status is not None and status.newest_step >= 0 else None,
        pace_s=_pace(f"{path}/nodes"),
        lost=lost,
        verdict="" if shown is None else f"{shown.number:04d} {headline(shown)}",
        incident=None if shown is None else shown.number,
        open_incidents=len(open_ones),
        started_unix_s=described.started_unix_s or None,
        heard_unix_s=heard_s,
        is_live=is_live,
        is_trouble=is_trouble,
    )


def _text(path: str) -> str:
    """The path as text, also where its bytes are none."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _lives(described: _Described, status: _Status | None, written_s: float, now_s: float) -> bool:
    """Whether its launcher lives on this machine, or its status is fresh by either clock."""
    told_s = 0.0 if status is None else status.unix_s
    if min(abs(now_s - written_s), abs(now_s - told_s)) <= _SILENT_S:
        return True
    return described.host == os.uname().nodename and is_alive(described.launcher)


def _incidents(folder: str, numbers: tuple[int, ...]) -> list[Incident]:
    """The open incidents of these numbers, and the newest of all."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".json") and name[:-5].isdecimal()]
    except FileNotFoundError:
        return []
    wanted = {f"{number:04d}.json" for number in numbers[-_MOST_OPEN:]}.intersection(names)
    if names:
        wanted.add(max(names, key=lambda name: int(name[:-5])))
    found: list[Incident] = []
    for name in sorted(wanted):
        content, _ = read_part(f"{folder}/{name}", _MOST_BYTES)
        found.append(incident_from_json(content, where=f"{folder}/{name}"))
    return found


def _status(path: str) -> tuple[_Status | None, float]:
    """The beginning of a status, and when its file was written; None where there is none yet."""
    try:
        head, about = read_part(path, _HEAD_BYTES)
    except FileNotFoundError:
        return None, 0.0
    if about.st_size > _HEAD_BYTES:
        head = head.partition(b',"nodes":')[0] + b"}"
    return _decoded(head, path, _Status), about.st_mtime


def _pace(nodes: str) -> float | None:
    """How long the newest iteration took, as the first node's agent wrote it; None where nothing tells."""
    try:
        try:
            tail, _ = read_part(f"{nodes}/0/iterations.jsonl", _TAIL_BYTES, from_end=True)
        except FileNotFoundError:
            first = min(os.listdir(nodes), default="0")
            tail, _ = read_part(f"{nodes}/{first}/iterations.jsonl", _TAIL_BYTES, from_end=True)
    except OSError:
        return None
    end = tail.rfind(b"\n")
    found = _DURATION.search(tail, tail.rfind(b"\n{", 0, max(end, 0)) + 1, end) if end > 0 else None
    return float(found[1]) if found else None


def _read(path: str, kind: type[T]) -> T | None:
    try:
        content, _ = read_part(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    return _decoded(content, path, kind)


def _decoded(content: bytes, path: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"{path}: not what keepstep writes ({error}); the file was cut or edited") from error


def age_s(row: RunRow, now_unix_s: float) -> float | None:
    """For how long the run has gone on, or since when it has ended, in seconds; None where nothing tells."""
    began = row.started_unix_s if row.is_live else row.heard_unix_s or row.started_unix_s
    return max(now_unix_s - began, 0.0) if began else None
