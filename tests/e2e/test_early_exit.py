"""Real jobs whose first cause says nothing: a rank that leaves with exit code 0, two killed at once, an abort."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

TRAINS = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
rank = dist.get_rank()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("begins", flush=True)
for step in range({steps}):
    {fault}
    optimizer.zero_grad()
    model(torch.ones(1, 8)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(0.02)
"""


def run(folder: Path, fault: str, *flags: str, steps: int = 400) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, output and incidents of a job of three ranks."""
    script = folder / "job.py"
    script.write_text(textwrap.dedent(TRAINS).replace("{fault}", fault).replace("{steps}", str(steps)))
    command = [
        sys.executable,
        "-m",
        "keepstep.cli",
        "run",
        "--run-dir",
        str(folder / "run"),
        "--nproc-per-node",
        "3",
    ]
    done = subprocess.run(
        [*command, *flags, str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    files = sorted((folder / "run" / "incidents").glob("*.json"))
    return done.returncode, done.stdout, [json.loads(path.read_text()) for path in files]


def test_a_rank_that_leaves_early_twice_ends_the_job_with_that_reason(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    fault = "if rank == 1 and step == 30: sys.exit(0)"
    code, said, _ = run(tmp_path, fault, "--max-restarts", "3", "--standbys", "0")
    assert code == 1, said
    assert said.count("begins") == 6, said
    assert "rank 1: left with exit code 0 while others were still training; restart 1 of 3" in said
    reason = "has left with exit code 0 at step 30 twice while others were still training"
    assert reason in said, said
    assert reason in json.loads((tmp_path / "run" / "end.json").read_text())["reason"]
    assert "this error only tells of another rank; rank 1 left with exit code 0" in said


def test_two_ranks_that_are_killed_at_once_are_both_in_the_incident(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    mark = f"{str(tmp_path / 'killed')!r} + str(rank)"
    die = f"open({mark}, 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    fault = f"if rank > 0 and step == 60 and not os.path.exists({mark}): {die}"
    code, said, incidents = run(tmp_path, fault, "--max-restarts", "1", "--standbys", "0", steps=80)
    assert code == 0, said
    (crash,) = (one for one in incidents if one["kind"] == "crash")
    assert sorted(one["rank"] for one in crash["culprits"]) == [1, 2], crash


def test_an_abort_is_told_in_its_own_words_without_redirects(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = "CUDA error: uncorrectable ECC error encountered"
    throw = f"ctypes.CDLL('libstdc++.so.6')._ZSt21__throw_runtime_errorPKc(b'{words}')"
    code, said, incidents = run(tmp_path, f"if rank == 2 and step == 150: import ctypes; {throw}")
    assert code == 134, said
    assert f"what():  {words}" in said[: said.index("FAILED")], "the console has it as before"
    assert f"what():  {words}" in said[said.index("Root Cause") :], said
    (crash,) = (one for one in incidents if one["kind"] == "crash")
    assert [one["rank"] for one in crash["culprits"]] == [2]
    assert words in crash["culprits"][0]["detail"]
