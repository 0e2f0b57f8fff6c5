"""Real jobs at their end: one that winds up for long is left alone, one that hangs in its last step is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TRAINS = """
import gc, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Long:
    def __init__(self):
        self.cycle = self

    def __del__(self, sleep=time.sleep):
        sleep({ends_s})


def hang(optimizer, *_):
    if step == 39 and rank == {hangs}:
        time.sleep(1000)


optimizer.register_step_pre_hook(hang)
for step in range(40):
    optimizer.zero_grad()
    model(torch.ones(1, 8)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    if step % 10 == 9:
        gc.collect()
    time.sleep(0.1)
sys.modules["__main__"].kept = Long()
{destroy}
gc.collect()
kept = None
gc.collect()
"""
DESTROY = "dist.destroy_process_group()"


def run(
    folder: Path, *, ends_s: float, destroy: str = DESTROY, hangs: int = -1, until_told: bool = False
) -> Any:
    """The exit code of a job of three ranks and its incidents; ended at its first where ``until_told``."""
    script, run_dir = folder / "job.py", folder / "run"
    filled = TRAINS.replace("{ends_s}", str(ends_s)).replace("{destroy}", destroy)
    script.write_text(filled.replace("{hangs}", str(hangs)))
    command = [
        sys.executable,
        "-m",
        "keepstep.cli",
        "run",
        "--run-dir",
        str(run_dir),
        "--nproc-per-node",
        "3",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([*command, str(script)], text=True, env=environment, **pipes) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if until_told and "HANG" in line:
                job.terminate()
                until_told = False
    files = sorted((run_dir / "incidents").glob("*.json"))
    return job.returncode, [json.loads(path.read_text()) for path in files]


@pytest.mark.long
def test_a_rank_that_takes_long_to_wind_up_does_not_hang(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code, incidents = run(tmp_path, ends_s=33)
    assert (code, incidents) == (0, [])


def test_a_rank_that_hangs_in_its_last_step_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    _, incidents = run(tmp_path, ends_s=0, destroy=f"{DESTROY}; time.sleep(60)", hangs=1, until_told=True)
    (told,) = [one for one in incidents if one["kind"] == "hang"]
    assert [(one["rank"], one["stage"]) for one in told["culprits"]] == [(1, "optimizer")]
