"""Jobs on a real Slurm: ranks in its order, spares from its allocation, and the job's own exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import slurm_bed
from tests.e2e.slurm_bed import SlurmBed, until

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]

TRAIN = str(Path(__file__).with_name("slurm_train.py"))
CHECKPOINTS = str(Path(__file__).with_name("standby_train.py"))
CONTAINER = """\
#!/bin/sh
# A stand-in for a container: neither Slurm's programs nor munge are in it.
exec unshare --mount --propagation=private sh -c '
  for program in scontrol squeue sbatch scancel srun; do mount --bind /bin/false "$(command -v $program)"; done
  mount -t tmpfs none {munge}
  exec "{python}" "$@"' sh "$@"
"""
TASK = """
import os, pathlib, sys, time
begun = pathlib.Path(sys.argv[1], "task-" + os.environ["SLURM_ARRAY_TASK_ID"])
with begun.open("a") as file:
    file.write("x")
while not begun.with_suffix(".go").exists():
    time.sleep(0.1)
sys.exit(75 if begun.name == "task-2" else 0)
"""


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[SlurmBed]:
    if reason := slurm_bed.missing():
        pytest.skip(reason)
    with slurm_bed.slurm(tmp_path) as made:
        yield made


def keepstep(*words: str) -> list[str]:
    return [sys.executable, "-m", "keepstep.cli", *words]


def places(folder: Path) -> dict[int, str]:
    """The node of each rank, as the last incarnation had it."""
    return {int(path.name): path.read_text() for path in (folder / "places").glob("[0-9]*")}


def end(run: Path) -> dict[str, Any]:
    return json.loads((run / "end.json").read_text())


def exit_code(bed: SlurmBed, job: str) -> str:
    """The exit code of a job that has ended, in Slurm's words: CODE:SIGNAL."""
    shown = bed.run("scontrol", "show", "job", job).stdout
    return next(word.partition("=")[2] for word in shown.split() if word.startswith("ExitCode="))


def reasons(bed: SlurmBed) -> dict[str, str]:
    """Why nodes were drained, by node; Slurm 24.11 adds to a reason that the node does not respond."""
    lines = bed.run("sinfo", "--noheader", "--list-reasons", "--format=%N|%E").stdout.splitlines()
    found = dict(line.split("|", 1) for line in lines)
    whole = {node: why.strip().removesuffix(" : Not responding") for node, why in found.items()}
    return {node: why for node, why in whole.items() if why != "Not responding"}


def submitted(bed: SlurmBed, *words: str, **environ: str) -> str:
    done = bed.run(*keepstep("slurm", *words), environ=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def ended(bed: SlurmBed, job: str) -> bool:
    return "JobState=" in (shown := bed.run("scontrol", "show", "job", job).stdout) and not any(
        f"JobState={state}" in shown for state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
    )


def test_srun_alone_needs_no_flags_and_ranks_follow_slurms_order(bed: SlurmBed) -> None:
    done = bed.run("srun", "--nodes=4", "--ntasks-per-node=1", *keepstep("run", TRAIN, str(bed.folder), "5"))
    assert done.returncode == 0, done.stderr
    assert places(bed.folder) == {0: "n0", 1: "n1", 2: "n2", 3: "n3"}
    (run,) = (bed.folder / "runs").iterdir()
    assert end(run)["category"] == "finished"
    described = json.loads((run / "run.json").read_text())
    assert (described["nodes"], described["world_size"]) == (4, 4)


def test_a_killed_launcher_is_replaced_by_a_spare_and_its_node_is_not_drained(bed: SlurmBed) -> None:
    spare = ("--nnodes", "3", "--max-restarts", "2")
    job = submitted(bed, "--node-remedy=auto", "--nodes=4", "--", *spare, TRAIN, str(bed.folder), "300")
    until(lambda: len(places(bed.folder)) == 3, "all ranks train")
    bed.kill_launcher("n1")
    until(lambda: places(bed.folder).get(1) == "n3", "the spare plays rank 1")
    (bed.folder / "hurry").touch()
    until(lambda: ended(bed, job), "the job has ended")
    told = end(bed.folder / "runs" / job)
    assert (told["exit_code"], told["category"], told["nodes"]) == (0, "finished", [])
    assert exit_code(bed, job) == "0:0"
    assert reasons(bed) == {}, "the node answers: its launcher died, and it did not"


@pytest.mark.long
def test_a_killed_first_launcher_of_two_begins_a_run_that_has_both_nodes(bed: SlurmBed) -> None:
    """Of two nodes none can take the controller over, so that the run ends with its first launcher."""
    job = submitted(
        bed, "--nodes=2", "--", "--nnodes", "2", "--max-restarts", "2", TRAIN, str(bed.folder), "300"
    )
    until(lambda: len(places(bed.folder)) == 2, "all ranks train")
    for place in (bed.folder / "places").iterdir():
        place.unlink()
    bed.kill_launcher("n0")
    until(lambda: len(places(bed.folder)) == 2, "all ranks train again")
    (bed.folder / "hurry").touch()
    until(lambda: ended(bed, job), "the job has ended")
    assert exit_code(bed, job) == "0:0"
    out = (bed.folder / f"slurm-{job}.out").read_text()
    assert "the launcher of n0 ended with exit code 137 and the job goes on" in out
    assert "the launcher of n1 ended with exit code 75 and the job goes on" in out


@pytest.mark.long
def test_a_lost_node_is_drained_from_the_batch_host_though_all_train_in_containers(bed: SlurmBed) -> None:
    container = bed.folder / "container"
    container.write_text(CONTAINER.format(munge=bed.folder / "munge", python=sys.executable))
    container.chmod(0o755)
    own = ("--node-remedy=auto", f"--python={container}", "--srun=--comment=contained", "--nodes=4")
    spare = ("--nnodes", "3", "--max-restarts", "2")
    job = submitted(bed, *own, "--", *spare, TRAIN, str(bed.folder), "300")
    until(lambda: len(places(bed.folder)) == 3, "all ranks train")
    bed.lose_node("n1")
    until(lambda: places(bed.folder).get(1) == "n3", "the spare plays rank 1")
    until(lambda: "n1" in reasons(bed), "it is drained")
    (bed.folder / "hurry").touch()
    until(lambda: ended(bed, job), "the job has ended")
    assert exit_code(bed, job) == "0:0"
    assert reasons(bed) == {"n1": f"[node_problem] keepstep run={job} incident=0001 node lost"}
    assert "Comment=[node_problem] keepstep" in bed.run("scontrol", "show", "job", job).stdout


@pytest.mark.long
def test_a_node_that_slurm_has_down_already_is_drained_with_our_reason(bed: SlurmBed) -> None:
    """Slurm knows before keepstep that a node is away; without a drain others would have it once it is back."""
    spare = ("--nnodes", "3", "--max-restarts", "2")
    job = submitted(bed, "--node-remedy=auto", "--nodes=4", "--", *spare, TRAIN, str(bed.folder), "300")
    until(lambda: len(places(bed.folder)) == 3, "all ranks train")
    bed.lose_node("n1")
    bed.run("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=Not responding")
    until(lambda: "n1" in reasons(bed), "it is drained")
    (bed.folder / "hurry").touch()
    until(lambda: ended(bed, job), "the job has ended")
    assert reasons(bed) == {"n1": f"[node_problem] keepstep run={job} incident=0001 node lost"}
    assert "DOWN+DRAIN" in bed.run("scontrol", "show", "node", "n1").stdout.replace("*", "")


@pytest.mark.long
def test_while_slurmctld_is_away_training_goes_on_and_a_lost_node_is_told_later(bed: SlurmBed) -> None:
    bed.run("scontrol", "update", "NodeName=n5", "State=DRAIN", "Reason=fan of rack 7")
    spare = ("--nnodes", "3", "--max-restarts", "2")
    job = submitted(bed, "--node-remedy=auto", "--nodes=4", "--", *spare, TRAIN, str(bed.folder), "300")
    until(lambda: len(places(bed.folder)) == 3, "all ranks train")
    bed.stop_controller()
    bed.lose_node("n1")
    until(lambda: places(bed.folder).get(1) == "n3", "the spare plays rank 1")
    out = bed.folder / f"slurm-{job}.out"
    until(lambda: "`scontrol show node n1` fails" in out.read_text(), "it is said that Slurm does not answer")
    bed.start_controller()
    reason = f"[node_problem] keepstep run={job} incident=0001 node lost"
    until(lambda: f"Comment={reason}" in bed.run("scontrol", "show", "job", job).stdout, "Slurm is told")
    (bed.folder / "hurry").touch()
    until(lambda: ended(bed, job), "the job has ended")
    assert exit_code(bed, job) == "0:0"
    assert reasons(bed)["n5"] == "fan of rack 7"


@pytest.mark.long
def test_a_node_that_an_operator_drains_leaves_the_job_and_slurm_gives_it_to_nobody(bed: SlurmBed) -> None:
    spare = ("--nnodes", "2", "--max-restarts", "2")
    train = (CHECKPOINTS, str(bed.folder), "2000", "")
    job = submitted(bed, "--nodes=3", "--", *spare, *train, STEP_S="0.1")
    run, log = bed.folder / "runs" / job, bed.folder / "losses-1"
    until(lambda: log.exists() and len(log.read_text().splitlines()) > 8, "all ranks train")
    would = bed.run(*keepstep("ctl", str(run), "drain", "n1", "--dry-run"))
    assert "n2 would take the ranks of n1, which would leave the job" in would.stdout, would
    assert reasons(bed) == {}
    done = bed.run(*keepstep("ctl", str(run), "drain", "1", "--reason", "fan; \x1b[31mloud"))
    assert "n1 has left the job, which begins again, incarnation 1" in done.stdout, done
    assert "keepstep slurm has Slurm drain it" in done.stdout
    until(lambda: "n1" in reasons(bed), "it is drained")
    until(lambda: bed.is_drained("n1"), "it is given back: Slurm has no job there")
    assert (bed.told(job, "JobState"), bed.told(job, "NodeList")) == ("RUNNING", "n[0,2]")
    none = bed.run(*keepstep("ctl", str(run), "drain", "n2"))
    assert none.returncode == 2
    assert "no spare waits to take the place of n2" in none.stderr
    (bed.folder / "hurry").touch()
    until(lambda: ended(bed, job), "the job has ended")
    assert exit_code(bed, job) == "0:0"
    assert reasons(bed) == {"n1": rf"[node_problem] keepstep run={job} by hand: fan; \x1b[31mloud"}


@pytest.mark.long
def test_the_failure_of_a_script_is_the_jobs_exit_code_and_starts_nothing_again(bed: SlurmBed) -> None:
    own = ("--nodes=2", "--requeue", "--comment=mine")
    job = submitted(bed, *own, "--", TRAIN, str(bed.folder), "5", "--exit=7")
    until(lambda: ended(bed, job), "the job has ended")
    assert exit_code(bed, job) == "7:0"
    told, shown = end(bed.folder / "runs" / job), bed.run("scontrol", "show", "job", job).stdout
    assert told["category"] == "training"
    assert "Restarts=0" in shown
    said = f"Comment=mine; [keepstep] run={job} exit=7 (training) incident={told['incident']} CRASH"
    assert said in shown, shown


def test_without_a_spare_the_job_ends_with_75_and_is_requeued_on_other_nodes(bed: SlurmBed) -> None:
    flags = ("--max-restarts", "2", "--rdzv-conf", "join_timeout=20")
    job = submitted(bed, "--requeue", "--nodes=3", "--", *flags, TRAIN, str(bed.folder), "300")
    until(lambda: len(places(bed.folder)) == 3, "all ranks train")
    lost, run = places(bed.folder)[2], bed.folder / "runs" / job
    bed.lose_node(lost)
    until(lambda: (run / "end.json").exists() or (run / "previous").exists(), "the job has ended")
    (bed.folder / "hurry").touch()
    until(lambda: ended(bed, job) and (run / "previous").exists(), "the job has ended again")
    told = end(run / "previous" / "1")
    assert (told["exit_code"], told["category"], told["nodes"]) == (75, "infrastructure", [lost])
    assert told["cause"] == {"class": "node", "kind": "node-lost"}
    assert end(run)["exit_code"] == 0
    assert exit_code(bed, job) == "0:0"
    shown = bed.run("scontrol", "show", "job", job).stdout
    assert f"ExcNodeList={lost}\n" in shown
    assert "Restarts=1 " in shown
    assert lost not in places(bed.folder).values()
    assert reasons(bed) == {}, "by default it is only advised"
    assert f"{lost} should be drained: [node_problem]" in (bed.folder / f"slurm-{job}.out").read_text()


@pytest.mark.long
def test_at_its_time_limit_a_job_ends_with_75(bed: SlurmBed) -> None:
    job = submitted(bed, "--nodes=2", "--time=2", "--", TRAIN, str(bed.folder), "3000")
    until(lambda: ended(bed, job), "the job has ended", 240)
    assert exit_code(bed, job) == "75:0"
    assert end(bed.folder / "runs" / job)["cause"] == {"class": "other", "kind": "time-limit"}


@pytest.mark.long
def test_of_a_job_array_only_the_task_that_ended_with_75_is_requeued(bed: SlurmBed) -> None:
    (bed.folder / "task.py").write_text(TASK)
    job = submitted(bed, "--requeue", "--array=0-2", "--", str(bed.folder / "task.py"), str(bed.folder))
    begun = [bed.folder / f"task-{number}" for number in range(3)]
    until(lambda: all(path.exists() for path in begun), "all tasks run")
    begun[0].with_suffix(".go").touch()
    until(lambda: ended(bed, f"{job}_0"), "the first has finished")
    begun[2].with_suffix(".go").touch()
    until(lambda: "Restarts=1 " in bed.run("scontrol", "show", "job", f"{job}_2").stdout, "it is requeued")
    for other in (0, 1):
        assert "Restarts=0 " in bed.run("scontrol", "show", "job", f"{job}_{other}").stdout
    assert [path.read_text() for path in begun] == ["x", "x", "x"]


def test_what_cannot_be_is_told_in_one_line(bed: SlurmBed) -> None:
    over = bed.run("srun", "--nodes=2", *keepstep("run", "--nnodes", "3", TRAIN, str(bed.folder), "5"))
    assert over.returncode == 2
    assert over.stderr.count(" has 2 here; start it on more nodes") == 2
    twice = bed.run("srun", "--nodes=2", "--ntasks-per-node=2", *keepstep("run", TRAIN, str(bed.folder), "5"))
    assert "Slurm starts 2(x2) launchers a node: give srun --ntasks-per-node=1" in twice.stderr
    refused = bed.run(*keepstep("slurm", "--partition=none", TRAIN, str(bed.folder), "5"))
    assert refused.returncode == 2
    assert refused.stderr.startswith("keepstep: sbatch refuses the job: sbatch: error: ")
    apart = bed.run(*keepstep("slurm", "--nodes", "4", TRAIN, str(bed.folder), "5"))
    assert "write sbatch's flags in one word, --nodes=4" in apart.stderr
