"""What report and export say of a run's folder that holds little, and of a file that cannot be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli import main


def _run(folder: Path, *, watched: bool = True, **end: object) -> str:
    (folder / "run.json").write_text("{}")
    if watched:
        (folder / "nodes" / "0").mkdir(parents=True)
        step = {"step": 7, "ranks": {"0": {"t": 10.0, "d": 0.5}}}
        (folder / "nodes" / "0" / "iterations.jsonl").write_text(json.dumps(step) + "\n")
    if end:
        (folder / "end.json").write_text(json.dumps(end))
    return str(folder)


def test_a_job_that_died_before_it_was_watched_is_not_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", _run(tmp_path, watched=False, exit_code=3, reason="rank 0: exit code 3")]) == 1
    told = capsys.readouterr().out
    assert "rank 0: exit code 3" in told
    assert "healthy" not in told


@pytest.mark.parametrize(
    "end", [{}, {"exit_code": 0, "reason": "finished"}, {"exit_code": 130, "reason": "signal SIGINT"}]
)
def test_a_run_that_goes_on_finished_or_was_ended_is_healthy(
    end: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", _run(tmp_path, **end)]) == 0
    assert capsys.readouterr().out.startswith("healthy")


def test_a_job_of_which_nothing_was_recorded_is_not_called_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", _run(tmp_path, watched=False, exit_code=0, reason="finished")]) == 2
    assert capsys.readouterr().out.startswith("cannot tell")


def test_a_trace_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rings").mkdir()
    (tmp_path / "rings" / "rank-00000.ring").write_bytes(b"cut short")
    out = tmp_path / "no" / "trace.json.gz"
    assert main(["export", _run(tmp_path), "-o", str(out)]) == 2
    told = capsys.readouterr().err
    assert str(out) in told
    assert "Traceback" not in told


def test_status_says_what_watching_costs_the_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(_run(tmp_path))
    status = {
        "unix_s": 0.0, "state": "running", "world_size": 4, "newest_step": 9, "open_incidents": [], "nodes": [],
        "rank_columns": [], "counters": {"bytes_in": 8000},
    }  # fmt: skip
    (run / "status.json").write_text(json.dumps(status))
    assert main(["status", str(run)]) == 0
    assert "200 bytes a rank and step have reached the controller" in capsys.readouterr().out
