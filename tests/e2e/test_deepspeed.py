"""DeepSpeed with keepstep's checkpoint engine: killed and resumed, it gives the very losses of plain DeepSpeed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.xdist_group("deepspeed"),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: DS_BUILD_OPS=0 pip install 'keepstep[deepspeed]'",
    ),
]

JOB = Path(__file__).with_name("deepspeed_train.py")
STEPS = 8
PATIENCE_S = 240


def train(
    folder: Path, stage: int, *, keep: str, steps: int = STEPS, restarts: int = 0, **settings: str
) -> str:
    """Run the job with two ranks; what was said."""
    folder.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "keepstep.cli",
        "run",
        "--run-dir",
        str(folder / f"run-{steps}"),
        "--no-watch",
    ]
    flags = ["--max-restarts", str(restarts), "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, *flags, str(JOB), str(folder), str(steps), str(STEPS)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "STAGE": str(stage),
            "KEEP": keep,
            **settings,
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def losses(folder: Path) -> dict[str, set[str]]:
    """By rank and step; one for each time that the step was made, if they differ."""
    found: dict[str, set[str]] = {}
    for rank in range(2):
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss = line.split()
            found.setdefault(f"{rank}/{step}", set()).add(loss)
    return found


def starts(folder: Path, incarnation: int) -> set[int]:
    return {int((folder / f"start-{rank}-{incarnation}").read_text()) for rank in range(2)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, set[str]]]:
    """The losses of DeepSpeed by itself with a ZeRO stage."""

    @cache
    def train_undisturbed(stage: int) -> dict[str, set[str]]:
        folder = tmp_path_factory.mktemp("job")
        train(folder, stage, keep="no")
        found = losses(folder)
        assert len(found) == 2 * STEPS
        assert all(len(loss) == 1 for loss in found.values())
        return found

    return train_undisturbed


@pytest.mark.parametrize(
    ("stage", "where", "resumed"),
    [
        (1, "5 backward", 5),
        pytest.param(2, "5 before save", 5, marks=pytest.mark.long),
        pytest.param(3, "5 after save", 6, marks=pytest.mark.long),
    ],
)
def test_all_workers_killed_cost_no_bit(
    tmp_path: Path, undisturbed: Callable[[int], dict[str, set[str]]], stage: int, where: str, resumed: int
) -> None:
    said = train(tmp_path, stage, keep="0", restarts=1, DIE=where)
    assert starts(tmp_path, 1) == {resumed}
    assert f"checkpoint global_step{resumed} was loaded from memory" in said
    assert losses(tmp_path) == undisturbed(stage)
    assert not (tmp_path / "checkpoints").exists()  # saves into memory leave storage alone


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_the_cache_the_files_are_taken(
    tmp_path: Path, undisturbed: Callable[[int], dict[str, set[str]]], stage: int
) -> None:
    train(tmp_path, stage, keep="2", steps=5)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("global_step*")) == [
        "global_step2",
        "global_step4",
    ]
    said = train(tmp_path, stage, keep="2")
    assert starts(tmp_path, 0) == {4}
    assert "checkpoint global_step4 was loaded from DeepSpeed's files" in said
    assert losses(tmp_path) == undisturbed(stage)


@pytest.mark.long
def test_a_damaged_cache_of_one_rank_sends_all_to_the_files(
    tmp_path: Path, undisturbed: Callable[[int], dict[str, set[str]]]
) -> None:
    said = train(tmp_path, 2, keep="4", restarts=1, DIE="6 backward", DAMAGE="1")
    assert starts(tmp_path, 1) == {4}
    assert "the snapshot of rank 1 at step 6 is damaged, not restored" in said
    assert "no checkpoint is taken from memory" in said
    assert "checkpoint global_step4 was loaded from DeepSpeed's files" in said
    assert losses(tmp_path) == undisturbed(2)
