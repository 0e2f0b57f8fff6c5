"""Whether Slurm ends a job before its time, as ``scontrol show job`` tells."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Preemption:
    """Slurm takes the job's nodes away.

    ``end_unix_s``: when it kills what is left, in Unix seconds; None where it does so some seconds after SIGTERM.
    """

    text: str
    end_unix_s: float | None


def fields_in(shown: str) -> dict[str, str]:
    """The fields of ``scontrol show job``; of one name the first, as later ones may be a comment."""
    return dict(reversed(re.findall(r"(?:^|\s)(\w+)=(\S+)", shown)))


def preemption_in(shown: str, restarts: str) -> Preemption | None:
    """What ``scontrol show job`` tells of it. ``restarts``: as Slurm counted them when this job began; "": none."""
    told, own = fields_in(shown), restarts or "0"
    if told.get("Restarts", own) != own:
        return Preemption("Slurm starts the job again", None)
    if told.get("JobState") == "PREEMPTED" or told.get("PreemptTime", "None")[:1].isdigit():
        end_unix_s = None
        with suppress(ValueError, KeyError):
            end_unix_s = datetime.fromisoformat(told["EndTime"]).timestamp()
        return Preemption("the job was preempted", end_unix_s)
    return None
