import csv
from pathlib import Path

import pytest

from keepstep.core.errors import UsageError
from keepstep.core.incident import Incident
from keepstep.report.plot import plot_step_times

pytest.importorskip("matplotlib", reason="plots need the extra `plot`")

INCIDENT = Incident(
    number=1, kind="slow", onset_step=20, detected_step=22, relief_step=35, job_slowdown=1.5,
    culprits=(), victims=(), evidence=(), missing=(),
)  # fmt: skip


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_plot_comes_with_its_data(tmp_path: Path, suffix: str) -> None:
    points = [
        (rank, step, 0.4 + 0.01 * rank + 0.2 * (20 <= step < 35)) for step in range(50) for rank in range(4)
    ]
    data = plot_step_times(points, [INCIDENT], tmp_path / f"steps{suffix}", title="demo")
    assert (tmp_path / f"steps{suffix}").stat().st_size > 5_000
    with data.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 50
    assert float(rows[25]["slowest_rank_s"]) == pytest.approx(0.63)


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.png or \.svg"):
        plot_step_times([(0, 0, 1.0)], [], tmp_path / "steps.pdf")
    with pytest.raises(UsageError, match="no finished step"):
        plot_step_times([], [], tmp_path / "steps.png")
