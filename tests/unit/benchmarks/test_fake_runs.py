"""Made-up runs are read by the commands that read real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.operate.fake_runs import KINDS, make_run

from keepstep.cli import report, status
from keepstep.traces import open_run


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_read_by_the_commands(
    tmp_path: Path, kind, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("keepstep.cli.status._CHANGES_S", 0.0)
    run = make_run(tmp_path / "run", kind, ranks=16, steps=30, layout="tp2-dp2-pp4")
    assert status.main([str(tmp_path / "run")]) == 0
    assert "world of 16" in capsys.readouterr().out
    assert report.main([str(tmp_path / "run")]) == bool(run.incidents)
    assert len(list(open_run(tmp_path / "run").iterations())) >= 16 * run.step


def test_the_rows_of_ranks_of_a_large_run_are_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "run", ranks=1025, steps=2, per_node=1)
    found = open_run(tmp_path / "run").status()
    assert found is not None
    assert found["ranks_file"]
    assert sum(len(node["ranks"]) for node in found["nodes"]) == 1025
