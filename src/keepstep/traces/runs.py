"""Readers of a run's folder, also while the run is writing it or after it died in the middle of writing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from keepstep.core.errors import RunError
from keepstep.core.summary import IterationSummary


@dataclass(frozen=True, slots=True)
class Run:
    """The folder of a run."""

    path: Path

    def describe(self) -> dict[str, Any]:
        """The content of ``run.json``: what was started, where and when; empty when it is missing."""
        return _read_json(self.path / "run.json") or {}

    def status(self) -> dict[str, Any] | None:
        """The content of ``status.json`` as the controller last wrote it; None before the first."""
        return _read_json(self.path / "status.json")

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
        live: dict[str, str] = self.describe().get("rings") or {}
        for rank, path in live.items():
            if Path(path).exists():
                found[int(rank)] = Path(path)
        for path in sorted((self.path / "rings").glob("rank-*.ring")):
            match = re.fullmatch(r"rank-(\d+)\.ring", path.name)
            if match and int(match[1]) not in found:
                found[int(match[1])] = path
        return found

    def iterations(self, broken: Counter[Path] | None = None) -> Iterator[IterationSummary]:
        """All finished steps of all ranks, with Unix times. Lines that cannot be read are counted in ``broken``."""
        for path in sorted(self.path.glob("nodes/*/iterations*.jsonl*")):
            with path.open("rb") as lines:
                for line in lines:
                    found = _iterations_of(line)
                    if found is not None:
                        yield from found
                    elif broken is not None:
                        broken[path] += 1


def open_run(path: str | Path) -> Run:
    """The run at ``path``, or of this name under ``./runs``. Raises RunError, which lists the runs there."""
    for candidate in (Path(path), Path("runs") / path):
        if (candidate / "run.json").is_file():
            return Run(candidate)
    known = sorted(p.parent.name for p in Path("runs").glob("*/run.json"))
    hint = f"runs here: {', '.join(known[-5:])}" if known else "no runs under ./runs"
    raise RunError(f"{path}: no run folder (no run.json in it); {hint}")


def _iterations_of(line: bytes) -> list[IterationSummary] | None:
    try:
        row = msgspec.json.decode(line)
        step = int(row["step"])
        return [
            IterationSummary(
                rank=int(rank),
                step=step,
                start_s=float(cells["t"]),
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
