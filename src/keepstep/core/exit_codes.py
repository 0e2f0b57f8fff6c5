"""Exit codes of a job that are not a worker's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from keepstep.core.told import CauseClass

UNUSABLE = 2
"""The command line cannot be used, or the job cannot be started."""
TEMPORARY_FAILURE = 75
"""The scheduler or a lost or broken node has ended the job (EX_TEMPFAIL of sysexits.h): it may be started elsewhere."""
STOPPED_BY_HAND = 79
"""An operator has stopped the job."""
TemporaryKind = Literal["time-limit", "preempted", "node-lost", "hardware", ""]
"""Why a job ends with `TEMPORARY_FAILURE`; empty: it ends otherwise. The first two as in the tables of messages."""
CLASSES: Mapping[TemporaryKind, CauseClass] = {
    "time-limit": "other",
    "preempted": "other",
    "node-lost": "node",
    "hardware": "node",
}
"""The class of each such cause, as in the tables of messages."""
Category = Literal["finished", "unusable", "infrastructure", "scheduler", "stopped", "signal", "training"]
"""What has ended a job: see `docs/reference/exit-codes.md`."""


def temporary_category(kind: TemporaryKind) -> Category:
    """The category of an end with `TEMPORARY_FAILURE`."""
    return "scheduler" if CLASSES[kind] == "other" else "infrastructure"
