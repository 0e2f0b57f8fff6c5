"""Whether Slurm ends a job before its time, by what it shows of the job."""

from __future__ import annotations

from datetime import datetime

import pytest

from keepstep.launch.schedulers.slurm_preemption import preemption_in
from keepstep.launch.signals import preemption_of

SHOWN = """JobId=7 JobName=train
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
   StartTime=2026-01-02T03:04:05 EndTime=2026-01-02T04:00:00 Deadline=N/A
   PreemptEligibleTime=2026-01-02T03:04:05 PreemptTime={preempted}
"""


def shown(state: str = "RUNNING", restarts: int = 0, preempted: str = "None") -> str:
    return SHOWN.format(state=state, restarts=restarts, preempted=preempted)


@pytest.mark.parametrize("text", ["", "\x1b[31m=", "JobState=RUNNING", shown(), shown("CANCELLED")])
def test_a_job_that_goes_on_or_was_cancelled_is_not_preempted(text: str) -> None:
    assert preemption_in(text, "") is None
    assert preemption_in(text.replace("Restarts=0", "Restarts=2"), "2") is None


def test_a_job_in_its_grace_time_is_told_when_it_is_killed() -> None:
    found = preemption_in(shown(preempted="2026-01-02T03:59:00"), "")
    assert found is not None
    assert found.end_unix_s == datetime(2026, 1, 2, 4).timestamp()
    assert preemption_in(shown("PREEMPTED"), "") == found


def test_a_job_that_slurm_has_requeued_is_not_this_one() -> None:
    found = preemption_in(shown("COMPLETING", restarts=1), "")
    assert found is not None
    assert (found.text, found.end_unix_s) == ("Slurm starts the job again", None)
    assert preemption_in(shown(restarts=1), "1") is None


@pytest.mark.parametrize("job", ["", "7", "x"])
def test_without_slurm_nobody_preempts(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert preemption_of({"SLURM_JOB_ID": job}) is None
