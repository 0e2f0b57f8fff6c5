"""The product, end to end: a real 4-rank training under `keepstep run`, judged by what the run's folder says.

The accelerator is emulated by a calibrated sleep per layer; processes, sockets and collectives are real.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples" / "gpt" / "train.py"
# Pipelines of torch 2.7 on Gloo wait for each other for ever, without keepstep, too.
_LAYOUT = "--dp 4" if torch.__version__ < "2.8" else "--dp 2 --pp 2 --microbatches 2"
SMALL = (*_LAYOUT.split(), "--layers", "2", "--batch", "4", "--emulate-compute-ms", "20")

pytestmark = pytest.mark.e2e


def command(run_dir: Path, *script: str, ranks: int = 4) -> list[str]:
    keepstep = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(run_dir)]
    return [*keepstep, "--nproc-per-node", str(ranks), str(TRAIN), *script]


def train(run_dir: Path, *script: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(run_dir, *script), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert no_process_left(run_dir)
    return done


def incidents(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    """All, or those of some kinds: beside other tests a job may also become slow."""
    files = sorted((run_dir / "incidents").glob("[0-9]*.json"))
    found = [json.loads(path.read_bytes()) for path in files]
    return [one for one in found if not kinds or one["kind"] in kinds]


def no_process_left(run_dir: Path) -> bool:
    for _ in range(50):
        left = [
            p for p in psutil.process_iter(["cmdline"]) if str(run_dir) in " ".join(p.info["cmdline"] or ())
        ]
        if not left:
            return True
        time.sleep(0.1)
    return False


def keepstep(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "keepstep.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.quiet
def test_a_slow_rank_is_named_and_relief_is_told(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fault = "slow rank 2 by 2x at step 20 for 15 steps"
    done = train(run_dir, *SMALL, "--steps", "50", "--fault", fault)
    assert done.returncode == 0, done.stderr
    (incident,) = incidents(run_dir)
    assert incident["kind"] == "slow"
    assert [culprit["rank"] for culprit in incident["culprits"]] == [2]
    assert abs(incident["onset_step"] - 20) <= 1
    assert incident["detected_step"] - 20 <= 3
    assert abs(incident["relief_step"] - 35) <= 1
    assert incident["status"] == "relieved"
    assert 2 not in incident["victims"]
    assert re.search(r"^SLOW ", done.stderr, re.MULTILINE)
    assert "rank 2" in done.stderr
    surfaces_tell_the_same(run_dir, tmp_path)


@pytest.mark.quiet
@pytest.mark.long
def test_two_slow_ranks_are_both_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    faults = [
        word for rank in (1, 2) for word in ("--fault", f"slow rank {rank} by 2x at step 20 for 15 steps")
    ]
    done = train(run_dir, *SMALL, "--steps", "45", *faults)
    assert done.returncode == 0, done.stderr
    (incident,) = incidents(run_dir)
    assert sorted(culprit["rank"] for culprit in incident["culprits"]) == [1, 2]
    assert incident["status"] == "relieved"


def surfaces_tell_the_same(run_dir: Path, tmp_path: Path) -> None:
    text = keepstep("report", str(run_dir))
    assert text.returncode == 1
    assert "rank 2" in text.stdout
    as_json = keepstep("report", str(run_dir), "1", "--json")
    assert json.loads(as_json.stdout)["culprits"][0]["rank"] == 2
    assert keepstep("report", str(run_dir), "9").returncode == 2
    status = keepstep("status", str(run_dir), "--json")
    assert status.returncode == 0, status.stderr
    trace = tmp_path / "trace.json.gz"
    assert keepstep("export", str(run_dir), "-o", str(trace)).returncode == 0
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"ALLREDUCE", "backward", "optimizer"} <= names
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1, 2, 3}
    assert {event["name"] for event in events if event["ph"] == "C"} == {"pace", "lost", "waiting"}
    marks = {event["name"] for event in events if event["ph"] == "i"}
    assert {"incident 0001 slow: onset", "incident 0001 slow: relief"} <= marks
    assert any(mark.startswith("incident 0001 slow: verdict: rank 2") for mark in marks)


@pytest.mark.quiet
def test_a_healthy_run_is_silent(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = train(run_dir, *SMALL, "--steps", "40", "--eval-every", "10", "--checkpoint-every", "15")
    assert done.returncode == 0, done.stderr
    assert incidents(run_dir) == []
    assert not re.search(r"SLOW|HANG|CRASH", done.stderr)
    steps = [
        json.loads(line)["step"] for line in (run_dir / "nodes/0/iterations.jsonl").read_text().splitlines()
    ]
    assert steps == sorted(set(steps))
    assert len(steps) >= 38


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A long job in its own process group; ended and checked for orphans afterwards."""
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        command(run_dir, *SMALL, "--steps", "2000", "--fault", "hang rank 1 at step 25 in backward"),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()
    assert no_process_left(run_dir)


def wait_for(what: Any, limit_s: float = 120.0) -> Any:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.1)
    raise AssertionError(f"not seen within {limit_s:.0f} s")


def test_a_rank_asleep_in_backward_is_a_hang_and_a_killed_launcher_leaves_nothing(
    job: subprocess.Popen[str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    (incident,) = wait_for(lambda: incidents(run_dir, "hang", "crash", "desync"))
    assert incident["kind"] == "hang"
    assert [culprit["rank"] for culprit in incident["culprits"]] == [1]
    assert incident["culprits"][0]["stage"].startswith("backward")
    job.send_signal(signal.SIGKILL)
    assert no_process_left(run_dir)


def test_a_stopped_process_is_a_hang_until_it_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = train(run_dir, *SMALL, "--steps", "60", "--fault", "stop rank 1 at step 25 for 6 s")
    assert done.returncode == 0, done.stderr
    (incident,) = incidents(run_dir, "hang", "crash", "desync")
    assert (incident["kind"], incident["status"]) == ("hang", "relieved")
    assert [culprit["rank"] for culprit in incident["culprits"]] == [1]
    assert "stopped" in incident["culprits"][0]["cause"]


def test_a_dead_process_is_a_crash_and_its_code_is_returned(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = train(run_dir, *SMALL, "--steps", "60", "--fault", "kill rank 3 at step 12")
    assert done.returncode == 128 + signal.SIGKILL
    (incident,) = incidents(run_dir, "hang", "crash", "desync")
    assert (incident["kind"], incident["culprits"][0]["rank"]) == ("crash", 3)
    assert "rank 3" in done.stderr


def programs(run_dir: Path, module: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if module in (process.info["cmdline"] or ()) and str(run_dir) in process.info["cmdline"]
    ]


@pytest.mark.quiet
@pytest.mark.parametrize(
    "module", [pytest.param("keepstep.agent", marks=pytest.mark.long), "keepstep.control"]
)
def test_training_outlives_agent_and_controller_and_the_next_one_goes_on(tmp_path: Path, module: str) -> None:
    run_dir = tmp_path / "run"
    fault = "slow rank 1 by 2x at step 40 for 15 steps"
    process = subprocess.Popen(
        command(run_dir, *SMALL, "--steps", "70", "--fault", fault),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        log = run_dir / "nodes/0/iterations.jsonl"
        wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 15)
        (victim,) = programs(run_dir, module)
        os.kill(victim.pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    (incident,) = incidents(run_dir)
    assert [culprit["rank"] for culprit in incident["culprits"]] == [1]
    assert abs(incident["onset_step"] - 40) <= 1
    assert no_process_left(run_dir)
