"""NCCL's stand-in carries real values, through both of torch's backends."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.stand_in.launch import run

JOB = Path(__file__).with_name("collectives_job.py")


@pytest.mark.parametrize(
    ("backend", "ranks"), [pytest.param("nccl", 4, marks=pytest.mark.long), ("nccl2", 2)]
)
def test_every_collective_and_training_gives_the_right_values(
    tmp_path: Path, backend: str, ranks: int
) -> None:
    done = run(JOB, [backend], tmp_path, ranks=ranks, watched=False, values=True, kernel_us=0)
    told = [line for line in done.console.splitlines() if line.startswith("rank ")]
    assert [line for line in told if not line.endswith(" ok")] == [], done.console
    assert len(told) == 19 * ranks, done.console
    assert done.exit_code == 0
