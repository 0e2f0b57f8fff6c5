"""The example training under plain torchrun: it learns, it can be cut in every way, faults strike where they should."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

TRAIN = Path(__file__).parents[2] / "examples" / "gpt" / "train.py"


def train(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, str(TRAIN), *arguments],
        env={
            **os.environ,
            "KEEPSTEP_MILESTONES": "/dev/null",
        },  # else Gloo may abort at the end: test_exit.py
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(found) for found in re.findall(r"  loss ([\d.]+)", done.stdout)]


@pytest.mark.long
def test_every_layout_computes_the_same_training() -> None:
    """Data and tensor parallelism change nothing but rounding."""
    steps = ("--steps", "10", "--layers", "2", "--dim", "32")
    alone, split = losses(train(2, "--dp", "2", *steps)), losses(train(4, "--dp", "2", "--tp", "2", *steps))
    sharded = losses(train(2, "--dp", "2", "--dp-kind", "fsdp", *steps))
    assert alone == pytest.approx(sharded, abs=2e-3)
    assert alone == pytest.approx(split, abs=2e-3)
    assert alone[-1] < 5.5


@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(one, marks=pytest.mark.long) for one in ("gpipe", "interleaved"))]
)
def test_pipelines_learn_evaluate_and_save(schedule: str, tmp_path: Path) -> None:
    times = tmp_path / "times-{rank}.jsonl"
    extra = ("--eval-every", "10", "--checkpoint-every", "10", "--checkpoint-dir", str(tmp_path / "saved"))
    done = train(
        4,
        "--dp",
        "2",
        "--pp",
        "2",
        "--schedule",
        schedule,
        "--steps",
        "20",
        "--step-times",
        str(times),
        *extra,
    )
    first, last = losses(done)
    assert last < first < 5.5
    assert done.stdout.count("held-out loss") == 2
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        f"rank{rank}.pt" for rank in range(4)
    ]
    for rank in range(4):
        lines = [json.loads(line) for line in (tmp_path / f"times-{rank}.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(20))
        assert all(line["seconds"] > 0 for line in lines)


@pytest.mark.long
def test_a_slow_rank_slows_its_steps_and_a_raise_ends_the_job(tmp_path: Path) -> None:
    fault = "slow rank 1 by 4x at step 5 for 5 steps; raise in rank 0 at step 14"
    arguments = ("--dp", "2", "--layers", "1", "--dim", "32", "--emulate-compute-ms", "20", "--steps", "30")
    done = train(2, *arguments, "--fault", fault, "--step-times", str(tmp_path / "times.jsonl"))
    assert done.returncode == 1
    assert "InjectedError: injected: raise in rank 0 at step 14" in done.stderr
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    assert len(seconds) == 14
    assert min(seconds[5:10]) > 0.18  # 4 x (20 + 40) ms of emulated compute, which no machine does faster
    assert min(seconds[10:]) < min(seconds[5:10])


def test_sizes_that_do_not_fit_are_refused_before_anything_starts() -> None:
    done = subprocess.run(
        [sys.executable, str(TRAIN), "--pp", "2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "is not the world size 1" in done.stderr
