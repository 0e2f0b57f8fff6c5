"""A run's folder, read-only and forgiving: a run that still writes, or died while it wrote, is readable too."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from keepstep.core.errors import RunError


@dataclass(frozen=True, slots=True)
class Iteration:
    """One finished step of one rank. Times in seconds, ``start_unix_s`` on the clock of the rank's node."""

    rank: int
    step: int
    start_unix_s: float
    duration_s: float
    self_s: float
    blocked_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """Where things lie in a run's folder."""

    path: Path

    def describe(self) -> dict[str, Any]:
        """``run.json``: what was started, where and when; empty when it is not there."""
        return _read_json(self.path / "run.json") or {}

    def status(self) -> dict[str, Any] | None:
        """``status.json`` as the controller last wrote it; None before the first."""
        return _read_json(self.path / "status.json")

    def checkpoints(self) -> dict[int, dict[str, Any]]:
        """``nodes/*/checkpoints.json`` by node: what is on storage, on its way there, and in its way."""
        found: dict[int, dict[str, Any]] = {}
        for path in self.path.glob("nodes/*/checkpoints.json"):
            told = _read_json(path)
            if told and path.parent.name.isdigit():
                found[int(path.parent.name)] = told
        return dict(sorted(found.items()))

    def end(self) -> dict[str, Any] | None:
        """``end.json``: exit code and reason; None while the job runs or when its launcher was killed."""
        return _read_json(self.path / "end.json")

    def rings(self) -> dict[int, Path]:
        """Saved rings by rank; for a job that runs on this host, the live ones that are not saved yet."""
        found: dict[int, Path] = {}
        live: dict[str, str] = self.describe().get("rings") or {}
        for rank, path in live.items():
            if Path(path).exists():
                found[int(rank)] = Path(path)
        for path in sorted((self.path / "rings").glob("rank-*.ring")):
            match = re.fullmatch(r"rank-(\d+)\.ring", path.name)
            if match and int(match[1]) not in found:
                found[int(match[1])] = path
        return found

    def iterations(self, broken: Counter[Path] | None = None) -> Iterator[Iteration]:
        """All finished steps of all ranks, in file order; lines that cannot be read are counted in ``broken``."""
        for path in sorted(self.path.glob("nodes/*/iterations*.jsonl*")):
            with path.open("rb") as lines:
                for line in lines:
                    found = _iterations_of(line)
                    if found is not None:
                        yield from found
                    elif broken is not None:
                        broken[path] += 1


def open_run(path: str | Path) -> Run:
    """The run at ``path``; a bare name is looked for under ``./runs`` too. Raises RunError naming the nearest runs."""
    for candidate in (Path(path), Path("runs") / path):
        if (candidate / "run.json").is_file():
            return Run(candidate)
    known = sorted(p.parent.name for p in Path("runs").glob("*/run.json"))
    hint = f"runs here: {', '.join(known[-5:])}" if known else "no runs under ./runs"
    raise RunError(f"{path}: no run folder (no run.json in it); {hint}")


def _iterations_of(line: bytes) -> list[Iteration] | None:
    try:
        row = msgspec.json.decode(line)
        step = int(row["step"])
        return [
            Iteration(
                rank=int(rank),
                step=step,
                start_unix_s=float(cells["t"]),
                duration_s=float(cells["d"]),
                self_s=float(cells.get("self", 0.0)),
                blocked_s=float(cells.get("blocked", 0.0)),
            )
            for rank, cells in row["ranks"].items()
        ]
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise RunError(
            f"{path}: not the JSON that keepstep writes ({error}); the file was cut or edited"
        ) from error
