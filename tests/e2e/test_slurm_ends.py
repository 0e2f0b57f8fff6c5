"""Slurm ends a job before it has finished: one recovery, whoever begins it, and no step is lost that all ranks had."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e import slurm_bed
from tests.e2e.slurm_bed import SlurmBed, until
from tests.e2e.test_slurm import CHECKPOINTS, TRAIN, end, ended, exit_code, places, submitted

pytestmark = [
    *(pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)),
    pytest.mark.skipif(bool(slurm_bed.missing()), reason=slurm_bed.missing()),
]

STEPS = 600
STORED = ("--checkpoint-every", "100000", "--checkpoint-dir")
"""No step gets to storage but the last of a run."""


def losses(folder: Path, rank: int) -> list[tuple[int, str]]:
    """Each step of a rank, and its loss as hex, in the order in which they were made."""
    lines = (folder / f"losses-{rank}").read_text().splitlines()
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


def stored(storage: Path) -> list[int]:
    """The steps that are whole on storage."""
    return sorted(int(path.parent.name.split("-")[1]) for path in storage.glob("step-*/manifest.json"))


def train(bed: SlurmBed, *flags: str) -> tuple[str, list[int]]:
    """Submit a job that keeps its last step on storage, and train; returns its number and steps of that moment."""
    flow = ("--max-restarts", "2", *STORED, str(bed.folder / "storage"))
    words = (*flags, "--nodes=2", "--", *flow, CHECKPOINTS, str(bed.folder), str(STEPS), "")
    job = submitted(bed, *words, STEP_S="0.1")
    logs = [bed.folder / f"losses-{rank}" for rank in range(2)]
    until(lambda: all(log.exists() and log.read_text().count("\n") > 20 for log in logs), "both ranks train")
    return job, stored(bed.folder / "storage")


def begin_again_soon(bed: SlurmBed, job: str) -> None:
    """Have Slurm not put off for minutes what it has requeued, and wait until it runs."""
    until(lambda: bed.told(job, "JobState") in ("PENDING", "RUNNING"), "nothing of the first run is left")
    bed.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    bed.run("scontrol", "update", f"JobId={job}", "StartTime=now+10seconds")
    until(lambda: bed.told(job, "JobState") == "RUNNING", "it runs again")


def last_step_is_kept(folder: Path) -> None:
    """The first run's newest step that both ranks had is on storage, once the run has ended."""
    steps = [max(step for step, _ in losses(folder, rank)) for rank in range(2)]
    (kept,) = stored(folder / "storage")[-1:]
    assert min(steps) <= kept <= min(steps) + 1, (steps, kept)


def went_on(folder: Path) -> None:
    """All steps were made, the second run began with the step after the one on storage, and no bit is another."""
    first = max(one for one in stored(folder / "storage") if one < STEPS)
    for rank in range(2):
        made = losses(folder, rank)
        begun = max(at for at, (step, _) in enumerate(made) if step == first)
        assert [step for step, _ in made[begun:]] == list(range(first, STEPS))
        once = dict(made[:begun])
        assert all(once.get(step, loss) == loss for step, loss in made[begun:])


@pytest.mark.long
def test_a_job_whose_time_is_over_goes_on_with_its_last_step(tmp_path: Path) -> None:
    with slurm_bed.slurm(tmp_path, 2, conf={"KillWait": "30"}) as bed:
        job, before = train(bed, "--requeue", "--time=1", "--signal=TERM@10")
        assert before == [], "no step was on storage while the time lasted"
        run = bed.folder / "runs" / job
        until(lambda: bed.told(job, "Restarts") == "1", "it is started again")
        last_step_is_kept(bed.folder)
        (bed.folder / "hurry").touch()
        begin_again_soon(bed, job)
        until(lambda: ended(bed, job), "the job has ended")
        first = end(run / "previous" / "1")
        assert (first["exit_code"], first["category"]) == (75, "scheduler")
        assert first["cause"] == {"class": "other", "kind": "time-limit"}
        assert (end(run)["exit_code"], exit_code(bed, job)) == (0, "0:0")
        assert bed.told(job, "Restarts") == "1"
        went_on(bed.folder)


@pytest.mark.parametrize(
    ("mode", "grace_s", "by"),
    [
        pytest.param("REQUEUE", 60, "keepstep", marks=pytest.mark.long),
        pytest.param("REQUEUE", 0, "Slurm", marks=pytest.mark.long),
        pytest.param("CANCEL", 60, "keepstep", marks=pytest.mark.long),
        pytest.param("CANCEL", 0, "", marks=pytest.mark.long),
    ],
)
def test_a_preempted_job_is_started_again_once(tmp_path: Path, mode: str, grace_s: int, by: str) -> None:
    conf = {"KillWait": "30", "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    urgent = "PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF"
    partition = f"PriorityTier=1 PreemptMode={mode} GraceTime={grace_s}\n{urgent}"
    with slurm_bed.slurm(tmp_path, 2, conf=conf, partition=partition) as bed:
        job, _ = train(bed, "--requeue", "--exclusive")
        first = ("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 3")
        other = bed.run("sbatch", "--parsable", *first).stdout.strip()
        run = bed.folder / "runs" / job
        until(lambda: (run / "end.json").exists(), "it has ended")
        cause = end(run)
        if not by:  # Slurm shows it as one that was cancelled, until it is over
            assert (cause["exit_code"], cause["category"]) == (143, "signal")
            until(lambda: ended(bed, job), "Slurm has ended it")
            assert (bed.told(job, "JobState"), bed.told(job, "Restarts")) == ("PREEMPTED", "0")
            return
        assert (cause["exit_code"], cause["category"]) == (75, "scheduler"), cause
        assert cause["cause"] == {"class": "other", "kind": "preempted"}
        last_step_is_kept(bed.folder)
        until(lambda: ended(bed, other), "the urgent job has ended")
        out = (bed.folder / f"slurm-{job}.out").read_text()
        assert ("the job is not requeued" in out) == (by != "keepstep")
        (bed.folder / "hurry").touch()
        begin_again_soon(bed, job)
        until(lambda: ended(bed, job), "the job has ended")
        assert (end(run)["exit_code"], exit_code(bed, job)) == (0, "0:0")
        assert bed.told(job, "Restarts") == "1"
        assert not (run / "previous" / "2").exists()
        went_on(bed.folder)


@pytest.mark.long
def test_a_job_that_loses_its_batch_host_trains_on_and_ends_when_it_has_finished(tmp_path: Path) -> None:
    with slurm_bed.slurm(tmp_path, 4) as bed:
        words = ("--requeue", "--nodes=4", "--", "--nnodes", "3", "--max-restarts", "2", TRAIN)
        job = submitted(bed, *words, str(bed.folder), "3000")
        until(lambda: len(places(bed.folder)) == 3, "all ranks train")
        bed.lose_node("n0")
        until(lambda: places(bed.folder).get(0) == "n3", "the spare plays rank 0")
        until(lambda: bed.told(job, "NodeList") == "n[1-3]", "Slurm has taken the node from the job")
        (bed.folder / "hurry").touch()
        until(lambda: ended(bed, job), "Slurm's job has ended")
        assert end(bed.folder / "runs" / job)["exit_code"] == 0
        assert (bed.told(job, "JobState"), bed.told(job, "Restarts")) == ("CANCELLED", "0")
        assert not (bed.folder / "runs" / job / "previous").exists()


@pytest.mark.long
def test_a_job_that_loses_its_batch_host_and_has_no_spare_is_started_again_elsewhere(tmp_path: Path) -> None:
    with slurm_bed.slurm(tmp_path) as bed:
        flow = ("--max-restarts", "2", "--rdzv-conf", "join_timeout=20", TRAIN, str(bed.folder), "3000")
        job = submitted(bed, "--requeue", "--nodes=3", "--", *flow)
        until(lambda: len(places(bed.folder)) == 3, "all ranks train")
        bed.lose_node("n0")
        until(lambda: bed.told(job, "Restarts") == "1", "it is started again")
        (bed.folder / "hurry").touch()
        begin_again_soon(bed, job)
        until(lambda: ended(bed, job), "the job has ended")
        run = bed.folder / "runs" / job
        first = end(run / "previous" / "1")
        assert (first["exit_code"], first["category"], first["nodes"]) == (75, "infrastructure", ["n0"])
        assert (end(run)["exit_code"], exit_code(bed, job), bed.told(job, "Restarts")) == (0, "0:0", "1")
        assert "n0" not in places(bed.folder).values()


@pytest.mark.long
@pytest.mark.parametrize("requeues", [True, False])
def test_without_no_kill_slurm_ends_a_job_that_loses_its_batch_host(tmp_path: Path, requeues: bool) -> None:
    with slurm_bed.slurm(tmp_path, conf={"KillWait": "30"}) as bed:
        again = "--requeue" if requeues else "--no-requeue"
        words = ("--no-kill=off", again, "--nodes=4", "--", "--nnodes", "3", "--max-restarts", "2", TRAIN)
        job = submitted(bed, *words, str(bed.folder), "3000")
        until(lambda: len(places(bed.folder)) == 3, "all ranks train")
        bed.lose_node("n0")
        run = bed.folder / "runs" / job
        until(lambda: (run / "end.json").exists(), "its launchers have been ended")
        code = (75, "scheduler") if requeues else (143, "signal")
        assert (end(run)["exit_code"], end(run)["category"]) == code
        if not requeues:
            until(lambda: ended(bed, job), "Slurm has ended it")
            assert (bed.told(job, "JobState"), bed.told(job, "Restarts")) == ("NODE_FAIL", "0")
            return
        until(lambda: bed.told(job, "Restarts") == "1", "it is started again")
        (bed.folder / "hurry").touch()
        begin_again_soon(bed, job)
        until(lambda: ended(bed, job), "the job has ended")
        assert (end(run)["exit_code"], exit_code(bed, job), bed.told(job, "Restarts")) == (0, "0:0", "1")
        assert not (run / "previous" / "2").exists()
        assert "n0" not in places(bed.folder).values()
