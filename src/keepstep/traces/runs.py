"""Readers of a run's folder, also while the run is writing it or after it died in the middle of writing."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from keepstep.core.errors import RunError
from keepstep.core.process_mark import is_alive
from keepstep.core.regular_files import open_regular, read_regular
from keepstep.core.summary import IterationSummary

RANKS_FILE = "ranks.msgpack"  # the rows of ranks that are not in ``status.json``: a list of [node rank, rows]
_MOST_BYTES = 64 << 20  # the longest file that is read
_LONGEST_LINE = 4 << 20
_MOST_LOG_BYTES = 80 << 20  # of one log of iterations, which agents keep below 64 MiB
_MOST_RANKS = 1 << 20
_MOST_STEPS = 1 << 53
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_ROWS = msgspec.msgpack.Decoder(list[tuple[int, list[Any]]])
_named: dict[str, Run] = {}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """The folder of a run."""

    path: Path

    def describe(self) -> dict[str, Any]:
        """The content of ``run.json``: what was started, where and when; empty when it is missing."""
        return _read_json(self.path / "run.json") or {}

    def status(self) -> dict[str, Any] | None:
        """The content of ``status.json`` as the controller last wrote it; None before the first.

        The rows of ranks, which of large jobs are in a file beside it, are put into its nodes.
        """
        found = _read_json(self.path / "status.json")
        if found and found.get("ranks_file") == RANKS_FILE:
            rows = dict(_read(self.path / RANKS_FILE, _ROWS.decode, "msgpack") or ())
            with suppress(
                LookupError, TypeError, AttributeError
            ):  # because whoever shows it says that it was edited
                for node in found["nodes"]:
                    node["ranks"] = rows.get(node["node_rank"], [])
        return found

    def checkpoints(self) -> dict[int, dict[str, Any]]:
        """The contents of ``nodes/*/checkpoints.json`` by node: which steps are on storage, or on their way there."""
        found: dict[int, dict[str, Any]] = {}
        for path in self.path.glob("nodes/*/checkpoints.json"):
            told = _read_json(path)
            if told and path.parent.name.isdigit():
                found[int(path.parent.name)] = told
        return dict(sorted(found.items()))

    def end(self) -> dict[str, Any] | None:
        """The content of ``end.json``: exit code and reason; None while the job runs, or if its launcher was killed."""
        return _read_json(self.path / "end.json")

    def rings(self) -> dict[int, Path]:
        """Paths of rings by rank: live ones of a job that runs on this host, else saved ones."""
        found: dict[int, Path] = {}
        described = self.describe()
        live: Any = described.get("rings") or {}
        if not isinstance(live, dict):
            raise RunError(f"{self.path / 'run.json'}: its rings are no table of ranks; it was edited")
        for rank, path in cast("dict[str, Any]", live).items() if self._lives_here(described) else ():
            if re.fullmatch(r"\d{1,7}", rank, re.ASCII) and isinstance(path, str) and os.path.exists(path):
                found[int(rank)] = Path(path)
        for path in sorted((self.path / "rings").glob("rank-*.ring")):
            match = re.fullmatch(r"rank-(\d{1,7})\.ring", path.name, re.ASCII)
            if match and int(match[1]) not in found:
                found[int(match[1])] = path
        return found

    def _lives_here(self, described: dict[str, Any]) -> bool:
        """Whether the run's launcher lives, and is seen from here: else its paths are those of other processes."""
        here = described.get("host") == os.uname().nodename and self.end() is None
        return here and is_alive(described.get("launcher"))

    def iterations(self, broken: Counter[Path] | None = None) -> Iterator[IterationSummary]:
        """All finished steps of all ranks, with Unix times. Lines that cannot be read are counted in ``broken``."""
        for path in sorted(self.path.glob("nodes/*/iterations*.jsonl*")):
            for line in _lines(path):
                found = _iterations_of(line)
                if found is not None:
                    yield from found
                elif broken is not None:
                    broken[path] += 1


def name_run(name: str, run: Run) -> None:
    """From now on `open_run` finds ``run`` by this name, where no folder has it."""
    _named[name] = run


def open_run(path: str | Path) -> Run:
    """The run at ``path``, or of this name under ``./runs``. Raises RunError, which lists the runs there."""
    for candidate in (Path(path), Path("runs") / path):
        if (candidate / "run.json").is_file():
            return Run(candidate)
    if (named := _named.get(str(path))) is not None:
        return named
    known = sorted(p.parent.name for p in Path("runs").glob("*/run.json"))
    hint = f"runs here: {', '.join(known[-5:])}" if known else "no runs under ./runs"
    raise RunError(f"{path}: no run folder (no run.json in it); {hint}")


def notices_of(status: dict[str, Any]) -> list[str]:
    """What a status tells is not watched or not written on some node, and why."""
    nodes: Any = status.get("nodes", ())
    return list(dict.fromkeys(str(text) for node in nodes for text in node.get("notices", ())))


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a log; an empty one where it cannot be read, or is not read on."""
    try:
        with open_regular(path) as file:
            while line := file.readline(_LONGEST_LINE):
                yield line
                if file.tell() > _MOST_LOG_BYTES:
                    yield b""
                    return
    except OSError:
        yield b""


def _iterations_of(line: bytes) -> list[IterationSummary] | None:
    try:
        row = msgspec.json.decode(line)
        step = int(row["step"])
        if not 0 <= step < _MOST_STEPS:
            return None
        return [_iteration(int(rank), step, cells) for rank, cells in row["ranks"].items()]
    except (
        msgspec.DecodeError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ):
        return None


def _iteration(rank: int, step: int, cells: dict[str, Any]) -> IterationSummary:
    times = [
        float(cells["t"]),
        float(cells["d"]),
        float(cells.get("self", 0.0)),
        float(cells.get("blocked", 0.0)),
    ]
    if not 0 <= rank < _MOST_RANKS or not all(map(math.isfinite, times)) or min(times) < 0:
        raise ValueError(rank)
    start_s, duration_s, self_s, blocked_s = times
    return IterationSummary(
        rank=rank, step=step, start_s=start_s, duration_s=duration_s, self_s=self_s, blocked_s=blocked_s
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    return _read(path, _OBJECT.decode, "JSON")


def _read(path: Path, decode: Callable[[bytes], T], kind: str) -> T | None:
    try:
        return decode(read_regular(path, _MOST_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(
            f"{path}: not the {kind} that keepstep writes ({error}); the file was cut or edited"
        ) from error
