"""Real jobs on Gloo whose groups the probe takes for NCCL's: what is said of a pause, and of a hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.campaign.trial import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
PATIENCE_S = 90

JOB = """\
import datetime, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
rank = dist.get_rank()
class Stuck(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, now):
        ctx.now = now
        return x.view_as(x)
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(1000 if ctx.now else 0.03)
        return gradient, None
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(1000):
    y = model(torch.randn(4, 8))
    Stuck.apply(y, step == 60 and rank == 0).mean().backward()
    optimizer.step()
    if step == 30 and rank == 0:
        time.sleep(4)  # a checkpoint that nothing marks: rank 1 waits for its gradients, unseen
"""


@pytest.mark.quiet
def test_a_pause_is_no_hang_and_a_hang_is_told_in_seconds(tmp_path: Path) -> None:
    job, run = tmp_path / "job.py", tmp_path / "run"
    job.write_text(JOB)
    words = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(run), "--nproc-per-node", "2"]
    double = ROOT / "benchmarks" / "campaign" / "as_nccl.py"
    launcher = subprocess.Popen([*words, str(double), str(job)], cwd=tmp_path, env=dict(os.environ))
    try:
        until_s = time.monotonic() + PATIENCE_S
        while launcher.poll() is None and not incidents(run) and time.monotonic() < until_s:
            time.sleep(0.1)
    finally:
        launcher.terminate()
        launcher.wait(PATIENCE_S)
    (incident,) = incidents(run)
    (culprit,) = incident["culprits"]
    assert (incident["kind"], culprit["rank"], culprit["stage"]) == ("hang", 0, "backward")
    assert culprit["confidence"] != "low"  # what its device had to finish was known
    assert incident["victims"] == [1]
    assert incident["stuck_s"] < 15


def incidents(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in sorted((run / "incidents").glob("[0-9]*.json"))]
