"""Real Gloo jobs in which one rank calls its collectives differently: it is named, with sizes and lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e
PATIENCE_S, ENDING_S = 90, 15

HEAD = """\
import datetime, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=15))
rank = dist.get_rank()
linear = torch.nn.Linear(8, 1)
model = torch.nn.parallel.DistributedDataParallel(linear)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
def step():
    optimizer.zero_grad()
    time.sleep(0.05)
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
"""


def line_of(script: str, words: str) -> str:
    """The place of the only line that holds these words."""
    (number,) = [number for number, line in enumerate(script.splitlines(), 1) if words in line]
    return f"job.py:{number} "


def judged(folder: Path, script: str) -> dict[str, Any]:
    """The incident of a job of three ranks, which is ended after it."""
    (folder / "job.py").write_text(script)
    words = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run")]
    job = subprocess.Popen(
        [*words, "--nproc-per-node", "3", str(folder / "job.py")],
        cwd=folder,
        env=dict(os.environ),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    until_s = time.monotonic() + PATIENCE_S
    while job.poll() is None and not found_in(folder) and time.monotonic() < until_s:
        time.sleep(0.2)
    with suppress(
        subprocess.TimeoutExpired
    ):  # a crash ends the job, and its verdict may be sharpened until then
        job.wait(ENDING_S)
    job.terminate()
    _, said = job.communicate(timeout=PATIENCE_S)
    (incident,) = found_in(folder) or [pytest.fail(f"no incident: {said}")]
    return incident


def found_in(folder: Path) -> list[dict[str, Any]]:
    """The incidents, without those of a test machine that is slow for a while."""
    paths = (folder / "run" / "incidents").glob("[0-9]*.json")
    return [found for path in paths if (found := json.loads(path.read_bytes()))["kind"] != "slow"]


def culprits(incident: dict[str, Any]) -> list[int]:
    return [culprit["rank"] for culprit in incident["culprits"]]


def test_a_shorter_last_batch_in_an_all_gather(tmp_path: Path) -> None:
    script = (
        HEAD
        + """\
for i in range(100):
    step()
for i in range(4):
    rows = torch.zeros(5 if rank == 2 and i == 3 else 8, 4)
    dist.all_gather([torch.empty_like(rows) for _ in range(3)], rows)
for i in range(100):
    step()
"""
    )
    incident = judged(tmp_path, script)
    assert culprits(incident) == [2], json.dumps(incident, indent=1)
    told = json.dumps(incident)
    assert "rank 2 in ALLGATHER of 80 B (20 float32), ranks 0-1 of 128 B (32 float32)" in told
    assert line_of(script, "dist.all_gather") in told


def test_a_branch_that_one_rank_takes_alone(tmp_path: Path) -> None:
    script = (
        HEAD
        + """\
for i in range(130):
    if rank == 0 and i == 100:
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX)
    step()
"""
    )
    incident = judged(tmp_path, script)
    assert culprits(incident) == [0], incident
    told = json.dumps(incident)
    assert line_of(script, "ReduceOp.MAX") in told
    assert line_of(script, "backward()") in told


@pytest.mark.long
def test_two_groups_in_another_order(tmp_path: Path) -> None:
    script = (
        HEAD
        + """\
one, two = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
def first(): dist.all_reduce(torch.ones(10), group=one)
def second(): dist.all_reduce(torch.ones(20), group=two)
for i in range(130):
    time.sleep(0.05)
    for call in (second, first) if rank == 1 and i >= 100 else (first, second):
        call()
    optimizer.step()
"""
    )
    incident = judged(tmp_path, script)
    assert culprits(incident) == [1], incident
    told = json.dumps(incident)
    assert line_of(script, "def first") in told
    assert line_of(script, "def second") in told
