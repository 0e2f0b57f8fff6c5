import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.errors import RunError
from keepstep.traces import open_run, runs


def make_run(folder: Path) -> Path:
    (folder / "nodes" / "0").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"id": folder.name}))
    return folder


def test_a_missing_run_names_the_runs_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "runs" / "yesterday")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=r"today: no run folder .* yesterday"):
        open_run("today")
    assert open_run("yesterday").path == Path("runs/yesterday")


def test_a_line_cut_short_by_a_crash_is_skipped(tmp_path: Path) -> None:
    run = open_run(make_run(tmp_path / "run"))
    whole = json.dumps({"step": 4, "ranks": {"1": {"t": 10.0, "d": 0.5, "self": 0.2, "blocked": 0.1}}})
    (run.path / "nodes" / "0" / "iterations.jsonl").write_text(
        f"{whole}\n{whole[:30]}\n[]\n{whole}\n{whole[:-9]}"
    )
    rows = list(run.iterations())
    assert [(row.rank, row.step, row.duration_s, row.self_s) for row in rows] == [(1, 4, 0.5, 0.2)] * 2


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    run = open_run(make_run(tmp_path / "run"))
    (run.path / "status.json").write_text('{"step": ')
    with pytest.raises(RunError, match=r"status\.json: not the JSON"):
        run.status()
    assert run.end() is None


@pytest.mark.parametrize(
    "row",
    [
        {"step": -1, "ranks": {"0": {"t": 1.0, "d": 1.0}}},
        {"step": 1 << 60, "ranks": {"0": {"t": 1.0, "d": 1.0}}},
        {"step": 1, "ranks": {"16777216": {"t": 1.0, "d": 1.0}}},
        {"step": 1, "ranks": {"0": {"t": 1.0, "d": -1.0}}},
        {"step": 1, "ranks": {"0": {"t": "inf", "d": 1.0}}},
        {"step": 1, "ranks": {"0": {"t": 10**400, "d": 1.0}}},
        {"step": 1, "ranks": [1]},
    ],
)
def test_impossible_steps_are_counted_as_broken(tmp_path: Path, row: dict[str, Any]) -> None:
    run = open_run(make_run(tmp_path / "run"))
    path = run.path / "nodes" / "0" / "iterations.jsonl"
    path.write_text(json.dumps(row) + "\n")
    broken: Counter[Path] = Counter()
    assert list(run.iterations(broken)) == []
    assert broken == {path: 1}


def test_logs_that_are_no_files_or_without_end_are_read_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(make_run(tmp_path / "run"))
    os.mkfifo(run.path / "nodes" / "0" / "iterations.jsonl")
    (run.path / "nodes" / "0" / "iterations.jsonl.1").mkdir()
    hole = run.path / "nodes" / "0" / "iterations.jsonl.2"
    with open(hole, "wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(runs, "_LONGEST_LINE", 1 << 16)
    monkeypatch.setattr(runs, "_MOST_LOG_BYTES", 1 << 20)
    broken: Counter[Path] = Counter()
    assert list(run.iterations(broken)) == []
    assert len(broken) == 3
    assert broken[hole] < 100


def test_only_rings_with_a_rank_are_taken_from_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs.Run, "_lives_here", lambda *_: True)
    run = open_run(make_run(tmp_path / "run"))
    (run.path / "rings").mkdir()
    for name in ("rank-00003.ring", "rank-99999999.ring", "rank-²³.ring"):
        (run.path / "rings" / name).touch()
    live = {"0": str(run.path / "run.json"), "1": 7, "x": "/", "2": "/nowhere", "4": "\0"}
    (run.path / "run.json").write_text(json.dumps({"rings": live}))
    assert sorted(run.rings()) == [0, 3]
