"""`keepstep.Session` on the example: a killed rank costs no step and no bit; without `keepstep run` it does nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[2] / "examples" / "recover" / "train.py"
JOB = Path(__file__).with_name("session_train.py")
STEPS = 12
PATIENCE_S = 240


def losses(
    folder: Path, *flags: str, example: str = "train.py", ranks: int = 2, **environment: str
) -> tuple[list[dict[int, set[str]]], str]:
    """Of the example under ``keepstep run``, by rank that has some and by step; and what was said."""
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "keepstep.cli",
        "run",
        "--no-watch",
        "--run-dir",
        str(folder / "run"),
        *flags,
    ]
    done = subprocess.run(
        [*command, "--nproc-per-node", str(ranks), str(JOB), example, str(STEPS), str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    by_rank: list[dict[int, set[str]]] = []
    for file in sorted(folder.glob("losses-*")):
        by_rank.append({})
        for line in file.read_text().splitlines():
            step, _, loss = line.partition(" ")
            by_rank[-1].setdefault(int(step), set()).add(loss)
    return by_rank, done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("example", "ranks", "with_losses"),
    [("train.py", 2, 2), pytest.param("fsdp2.py", 2, 2, marks=pytest.mark.long), ("tp_pp_dp.py", 8, 4)],
)
def test_a_killed_rank_costs_no_step_and_no_bit(
    tmp_path: Path, example: str, ranks: int, with_losses: int
) -> None:
    undisturbed, _ = losses(tmp_path / "undisturbed", example=example, ranks=ranks)
    found, said = losses(tmp_path / "killed", "--max-restarts", "1", example=example, ranks=ranks, DIES="1")
    assert "resumed after step 6 from this node's cache" in said or "resumed after step 5 from" in said
    assert found == undisturbed
    assert len(found) == with_losses
    assert all(one.keys() == set(range(STEPS)) for one in found)


def test_without_keepstep_run_it_only_trains(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "3"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 3
    assert "no checkpoint is kept in memory" in done.stderr


OTHERWISE = """
import os
import torch, keepstep

@keepstep.resilient
def train(session):
    more = {"more": torch.zeros(2)} if session.incarnation else {}
    start = session.restore(weight=torch.zeros(4), **more)
    for step in session.steps(start, 6):
        if step == 3:
            os._exit(7)

torch.distributed.init_process_group("gloo")
train()
"""


def test_a_state_that_is_not_the_one_saved_has_no_second_restart(tmp_path: Path) -> None:
    script, folder = tmp_path / "otherwise.py", tmp_path / "run"
    script.write_text(OTHERWISE)
    command = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder), "--max-restarts", "9"]
    done = subprocess.run(
        [*command, "--standbys", "0", str(script)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "restart 1 of 9" in done.stderr
    assert "restart 2 of 9" not in done.stderr
    assert done.stderr.count("nothing is restored: more: not in the snapshot; build the state as it was") == 1
    assert "cannot go on from what was saved, which does not fit it" in done.stderr
    crashes = [json.loads(one.read_bytes()) for one in sorted((folder / "incidents").glob("*.json"))]
    assert "MisfitError: the state or the number of ranks is not that of before" in crashes[-1]["summary"], (
        crashes[-1]
    )
