"""Checkpoints beyond the run, from the settings: where they are kept, how often one is, and how many stay."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Persisting:
    """How checkpoints get to storage."""

    where: str  # absolute path or URL
    every: int | None  # steps from one to the next; 0: as the script asks; None: by the cost model
    keep: int  # newest steps that stay there; 0: all
    wait_s: float  # how long the end of a run waits for steps on their way there
    failures_per_day: float  # failures of the whole job that the cost model expects


def persisting_from(value: Mapping[str, Any]) -> Persisting | None:
    """How the settings have checkpoints brought to storage; None: they stay in memory.

    Raises UsageError where a value cannot be used, or there is no such storage.
    """
    where, every = str(value["checkpoint_dir"]), str(value["checkpoint_every"]).strip()
    if not where:
        return None
    if not value["watch"]:
        raise UsageError(
            f"--checkpoint-dir {where} --no-watch: the agent brings checkpoints there, and there is none; "
            "leave one of them out"
        )
    if every != "auto" and not (every.isascii() and every.isdigit()):
        raise UsageError(
            f"--checkpoint-every {every}: give a number of steps, auto, or 0 for none of themselves"
        )
    keep, wait_s, failures = (
        value[name] for name in ("checkpoint_keep", "checkpoint_wait_s", "failures_per_day")
    )
    if keep < 0:
        raise UsageError(f"--checkpoint-keep {keep}: give a number of steps, 0 to keep all")
    if not (wait_s >= 0 and math.isfinite(wait_s)):
        raise UsageError(f"checkpoint_wait_s {wait_s:g}: give a number of seconds, 0 or more")
    if not (failures > 0 and math.isfinite(failures)):
        raise UsageError(f"failures_per_day {failures:g}: give a number above 0")
    return Persisting(_storage(where), None if every == "auto" else int(every), keep, wait_s, failures)


def _storage(where: str) -> str:
    """Check that a storage can be used: a folder that can be written to, or a URL whose plugin is installed."""
    from keepstep.checkpoint.storage.backend import open_storage

    scheme, separator, rest = where.partition("://")
    if separator and scheme != "file":
        open_storage(where)
        return where
    path = Path(rest if separator else where).absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"--checkpoint-dir {path}: {there} is no folder that can be written to")
    return str(path)
