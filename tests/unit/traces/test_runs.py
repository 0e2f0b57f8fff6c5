import json
from pathlib import Path

import pytest

from keepstep.core.errors import RunError
from keepstep.traces import open_run


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
