"""Whether Slurm ends a job before its time. It sends no more than SIGTERM then, so a launcher has to ask."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from keepstep.core.errors import UsageError
from keepstep.launch.schedulers.slurm import job_of

_PATIENCE_S = 10.0  # of the 30 s that Slurm leaves where nothing else is set; it is busy then


@dataclass(frozen=True, slots=True)
class Preemption:
    """Slurm takes the job's nodes away.

    ``end_unix_s``: when it kills what is left, in Unix seconds; None where it does so some seconds after SIGTERM.
    """

    text: str
    end_unix_s: float | None


def preemption_of(environ: Mapping[str, str]) -> Preemption | None:
    """Ask Slurm about the job that a launcher runs in; None where it is not ended so, or Slurm does not answer."""
    if not environ.get("SLURM_JOB_ID"):
        return None
    with suppress(OSError, subprocess.SubprocessError, UsageError):
        asking = ["scontrol", "show", "job", job_of(environ)]
        done = subprocess.run(
            asking, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_PATIENCE_S
        )
        return preemption_in(done.stdout.decode(errors="replace"), environ.get("SLURM_RESTART_COUNT", ""))
    return None


def fields_in(shown: str) -> dict[str, str]:
    """The fields of ``scontrol show job``; of one name the first, as later ones may be a comment."""
    return dict(reversed(re.findall(r"(?:^|\s)(\w+)=(\S+)", shown)))


def preemption_in(shown: str, restarts: str) -> Preemption | None:
    """What ``scontrol show job`` tells of it. ``restarts``: as Slurm counted them when this job began; "": none."""
    told = fields_in(shown)
    if told.get("Restarts", "0") != (restarts or "0"):
        return Preemption("Slurm starts the job again", None)
    if told.get("JobState") == "PREEMPTED" or told.get("PreemptTime", "None")[:1].isdigit():
        end_unix_s = None
        with suppress(ValueError, KeyError):
            end_unix_s = datetime.fromisoformat(told["EndTime"]).timestamp()
        return Preemption("the job was preempted", end_unix_s)
    return None
