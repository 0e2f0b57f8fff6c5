"""A rank that fails at one step with one error once more ends the job with the reason, whatever restarts are left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

SCRIPT = """
import torch
from torch.distributed.elastic.multiprocessing.errors import record
import keepstep.checkpoint

@record
def main():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    start = keepstep.checkpoint.load(state) or 0
    print("begins at", start, flush=True)
    for step in range(start, 9):
        if step == 5:
            raise ValueError(f"boom at {id(model):#x}")
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        keepstep.checkpoint.save(state, step + 1)
        if step < 4: keepstep.checkpoint.wait()
    print("trained", flush=True)

main()
"""


def run(folder: Path, *flags: str) -> tuple[int, str]:
    script = folder / "job.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run"), *flags, str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    return done.returncode, done.stdout


def test_the_same_error_at_the_same_step_twice(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code, said = run(tmp_path, "--max-restarts", "9", "--standbys", "0")
    assert code == 1, said
    assert said.count("begins at") == 2, said
    reason = "has failed twice at step 5 with the same error (ValueError: boom at 0x"
    assert reason in said, said
    assert reason in json.loads((tmp_path / "run" / "end.json").read_text())["reason"]


def test_it_may_be_allowed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    flags = ("--max-restarts", "2", "--standbys", "0", "--restart-budget", "same=0")
    code, said = run(tmp_path, *flags)
    assert code == 1, said
    assert said.count("begins at") == 3, said
