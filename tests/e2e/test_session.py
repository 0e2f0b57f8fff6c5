"""`keepstep.Session` on the example: a killed rank costs no step and no bit; without `keepstep run` it does nothing."""

from __future__ import annotations

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
