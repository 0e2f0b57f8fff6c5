"""Exit codes of a job that are not a worker's own."""

from __future__ import annotations

from typing import Literal

TEMPORARY_FAILURE = 75
"""The scheduler has ended the job (EX_TEMPFAIL of sysexits.h): who requeues jobs may do so."""
SchedulersKind = Literal["time-limit", "preempted", ""]
"""How a scheduler has ended the job, as the kinds of the tables of messages; empty: it has not."""
