"""A training that is killed and resumes from its node's cache gives the very losses of an undisturbed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

JOB = Path(__file__).with_name("checkpoint_train.py")
STEPS = 12
PATIENCE_S = 180


def train(
    folder: Path, *arguments: str, flags: tuple[str, ...] = (), kind: str = "ddp"
) -> tuple[dict[str, list[str]], str]:
    """Run the job with two ranks; the losses by step (one for each time the step was made), and what was said."""
    folder.mkdir()
    command = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run"), "--no-watch"]
    job = [*flags, "--nproc-per-node", "2", str(JOB), str(folder), str(STEPS), *arguments]
    done = subprocess.run(
        [*command, *job],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "KIND": kind},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses: dict[str, list[str]] = {}
    for rank in range(2):
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss = line.split()
            losses.setdefault(f"{rank}/{step}", []).append(loss)
    return losses, done.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    folder = tmp_path_factory.mktemp("jobs")
    found = {kind: train(folder / kind, kind=kind)[0] for kind in ("ddp", "fsdp2")}
    assert all(len(losses) == 2 * STEPS for losses in found.values())
    return found


@pytest.mark.parametrize(
    ("kind", "rank", "step", "where", "resumed"),
    [
        ("ddp", 1, 6, "forward", (5, 6)),  # the copy of step 6 may or may not be done
        ("ddp", 0, 6, "backward", (5, 6)),
        ("ddp", 1, 5, "before save", (5,)),
        ("ddp", 0, 5, "after save", (5, 6)),
        ("ddp", 1, 0, "forward", (0,)),
        ("fsdp2", 1, 6, "forward", (5, 6)),
    ],
)
def test_a_killed_rank_costs_no_bit(
    tmp_path: Path,
    undisturbed: dict[str, dict[str, list[str]]],
    kind: str,
    rank: int,
    step: int,
    where: str,
    resumed: tuple[int, ...],
) -> None:
    arguments = (str(rank), str(step), where)
    losses, said = train(tmp_path / "killed", *arguments, flags=("--max-restarts", "1"), kind=kind)
    starts = {(tmp_path / "killed" / f"start-{r}-1").read_text() for r in range(2)}
    assert len(starts) == 1
    start = int(starts.pop())
    assert start in resumed
    assert (f"resumed after step {start} from this node's cache" in said) == (start > 0)
    assert losses.keys() == undisturbed[kind].keys()
    for name, found in losses.items():
        assert set(found) == set(undisturbed[kind][name]), name


def test_without_keepstep_run_nothing_is_kept_and_that_is_said(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import keepstep.checkpoint as c\nassert c.load({'a': 1}) is None\nc.save({'a': 1}, 1)\nc.wait()\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP")}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        timeout=PATIENCE_S,
    )
    assert done.stderr == (
        "keepstep: no checkpoint is kept in memory: this process was not started by `keepstep run`\n"
    )
