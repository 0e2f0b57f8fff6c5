"""Schedulers end a job: it is told with the sender, ends with 75, and begins again for nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.e2e.test_run_life import PATIENCE_S, SAY_READY, Run, run

from keepstep.launch.command.addresses import free_port

__all__ = ["run"]
pytestmark = pytest.mark.e2e


@pytest.mark.skipif(os.geteuid() != 0, reason="a scheduler sends as root")
def test_a_sigterm_near_the_end_of_the_jobs_time_is_its_time_limit(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    process = run.start(
        SAY_READY + "time.sleep(60)",
        "--no-watch",
        "--max-restarts",
        "3",
        SLURM_JOB_END_TIME=str(int(time.time()) + 60),
        KEEPSTEP_TERMINATION_LOG=str(log),
    )
    run.said("ready0")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75
    assert f"the job's time is over (SIGTERM from pid {os.getpid()} (" in err
    assert "restart" not in err
    (end,) = run.folder.glob("**/end.json")
    told = json.loads(end.read_text())
    assert (told["exit_code"], told["cause"]) == (75, {"class": "other", "kind": "time-limit"})
    assert log.read_text().startswith(
        "keepstep: exit code 75 (scheduler): the job's time is over (SIGTERM from pid"
    )
    assert run.left() == []


def test_a_worker_that_fails_as_the_time_is_over_is_not_started_again(run: Run) -> None:
    code, _, err = run.finish(
        "sys.exit(3)", "--no-watch", "--max-restarts", "3", SLURM_JOB_END_TIME=str(int(time.time()) + 5)
    )
    assert code == 3
    assert "a restart would be in vain" in err
    assert "restart 1 of" not in err


def test_a_warning_goes_to_the_workers_and_ends_nothing(run: Run) -> None:
    script = (
        "signal.signal(signal.SIGUSR1, lambda *_: open(f'warned{rank}', 'w').write('x\\n')) if rank else None\n"
        + SAY_READY
        + "\nwhile not os.path.exists('go'): time.sleep(0.01)"
    )
    process = run.start(script, "--no-watch", "--nproc-per-node", "2")
    run.said("ready0")
    run.said("ready1")
    process.send_signal(signal.SIGUSR1)
    run.said("warned1")
    (run.folder / "go").touch()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert f"SIGUSR1 from pid {os.getpid()} (" in err
    assert "passed on to rank 1; the job goes on" in err


def test_a_signal_that_the_user_wants_to_end_the_job_does(run: Run) -> None:
    process = run.start(SAY_READY + "time.sleep(60)", "--no-watch", "--signals-to-handle", "SIGTERM,SIGUSR1")
    run.said("ready0")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 138


@pytest.mark.skipif(os.geteuid() != 0, reason="a scheduler sends as root")
@pytest.mark.parametrize("is_told", [True, False])
def test_workers_that_the_scheduler_ends_first_are_no_culprits(run: Run, is_told: bool) -> None:
    """As where Slurm finds processes by their parents: it sends SIGTERM to the workers, too, or to them alone."""
    process = run.start(
        SAY_READY + "time.sleep(60)",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        SLURM_JOB_END_TIME=str(int(time.time()) + 60),
    )
    workers = [int(run.said(f"ready{rank}")) for rank in range(2)]
    run.until(lambda: (run.folder / "run" / "status.json").exists())
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    if is_told:
        process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75
    assert "restart 1 of" not in err
    told = json.loads((run.folder / "run" / "end.json").read_text())
    assert told["cause"] == {"class": "other", "kind": "time-limit"}
    for path in (run.folder / "run" / "incidents").glob("*.json") if is_told else ():
        incident = json.loads(path.read_text())
        assert incident["cause"]["kind"] == "time-limit"
        assert incident["culprits"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="a scheduler sends as root")
def test_all_nodes_end_with_75_where_the_scheduler_tells_one(run: Run) -> None:
    port = free_port("127.0.0.1")
    (run.folder / "job.py").write_text(
        f"import os, time\nrank = os.environ['RANK']\n{SAY_READY}time.sleep(60)\n"
    )
    name, _, value = run.mark.partition("=")
    end_s = str(int(time.time()) + 100)
    command = [sys.executable, "-m", "keepstep.cli", "run", "--nnodes", "2", "--max-restarts", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "j"]
    command += ["--run-dir", str(run.folder / "run"), str(run.folder / "job.py")]
    launchers = [
        subprocess.Popen(
            command,
            cwd=run.folder,
            env={**os.environ, name: value, "SLURM_JOB_END_TIME": end_s, "KEEPSTEP_NODE_NAME": f"n{node}"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node in range(2)
    ]
    run.said("ready0")
    run.said("ready1")
    launchers[1].send_signal(signal.SIGTERM)
    assert [one.wait(PATIENCE_S) for one in launchers] == [75, 75]
    told = json.loads((run.folder / "run" / "end.json").read_text())
    assert told["cause"] == {"class": "other", "kind": "time-limit"}
    assert told["reason"].startswith("the job's time is over (SIGTERM from pid")
