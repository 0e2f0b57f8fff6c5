"""What report and export say of a run's folder that holds little, and of a file that cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli import main
from keepstep.core.incident import Culprit, Incident
from keepstep.report.incidents import incident_to_json
from keepstep.ring import RingReader, create


def _run(folder: Path, *, watched: bool = True, **end: object) -> str:
    """A run that lives, or has ended."""
    (folder / "run.json").write_text("{}")
    (folder / "status.json").write_text(json.dumps({"unix_s": time.time()}))
    if watched:
        (folder / "nodes" / "0").mkdir(parents=True)
        step = {"step": 7, "ranks": {"0": {"t": 10.0, "d": 0.5}}}
        (folder / "nodes" / "0" / "iterations.jsonl").write_text(json.dumps(step) + "\n")
    if end:
        (folder / "end.json").write_text(json.dumps(end))
    return str(folder)


def _ring(folder: Path) -> None:
    (folder / "rings").mkdir()
    fd = create(64)
    RingReader(fd).save(folder / "rings" / "rank-00000.ring")
    os.close(fd)


def _incident(folder: Path, **more: object) -> None:
    (folder / "incidents").mkdir()
    one = Incident(
        1,
        "slow",
        5,
        7,
        None,
        1.5,
        (Culprit(0, None, "gpu-01", "", 1.5, "high", "compute"),),
        (1, 2),
        ("1 s → 2 s",),
        (),
    )
    told = json.loads(incident_to_json(one)) | more
    (folder / "incidents" / "0001.json").write_text(json.dumps(told))


def _refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that ends with exit code 2: one line, and nothing else."""
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    return told.err


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


def test_a_run_without_news_or_watching_is_not_called_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path)
    status = tmp_path / "status.json"
    status.write_text(json.dumps({"unix_s": time.time(), "unwatched_since_unix_s": time.time() - 60}))
    assert main(["report", run]) == 2
    assert "cannot tell: an operator has it not watched" in capsys.readouterr().out
    status.write_text(json.dumps({"unix_s": time.time() - 7200}))
    os.utime(status, (time.time() - 7200, time.time() - 7200))
    assert main(["report", run]) == 2
    assert "cannot tell: no news for 2 h" in capsys.readouterr().out


def test_a_trace_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _ring(tmp_path)
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
        "unix_s": time.time(), "state": "running", "world_size": 4, "newest_step": 9, "open_incidents": [], "nodes": [],
        "rank_columns": [], "counters": {"bytes_in": 8000},
    }  # fmt: skip
    (run / "status.json").write_text(json.dumps(status))
    assert main(["status", str(run)]) == 0
    assert "200 bytes a rank and step have reached the controller" in capsys.readouterr().out


STATUS: dict[str, Any] = {
    "unix_s": 0.0, "state": "running", "world_size": 1, "newest_step": 9, "open_incidents": [], "counters": {},
    "rank_columns": ["rank", "alive", "step", "phase", "iteration_s", "self_s", "idle_s"],
    "nodes": [{"node": "gpu-01", "agent": "live", "ranks": [[0, True, 9, 1, 0.5, 0.1, 0.0]]}],
}  # fmt: skip


@pytest.mark.parametrize("name", list(STATUS))
def test_a_status_without_a_part_is_incomplete(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(_run(tmp_path))
    status = STATUS | {"unix_s": time.time()}
    del status[name]
    (run / "status.json").write_text(json.dumps(status))
    told = _refused(["status", str(run)], capsys)
    assert f"its status is incomplete or of another version of keepstep (KeyError: '{name}')" in told
    assert main(["status", str(run), "--json"]) == 0


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_status_that_changes_is_the_present_one_however_clocks_are_set(
    hours: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(_run(tmp_path))
    told_s = time.time() + hours * 3600

    def write(more_s: float) -> None:
        (run / "draft").write_text(json.dumps({**STATUS, "unix_s": told_s + more_s}))
        (run / "draft").replace(run / "status.json")

    write(0.0)
    assert main(["status", str(run)]) == 0
    told = capsys.readouterr().out
    assert ("last heard of 72" in told) if hours < 0 else ("not heard of any more" in told)
    writer = threading.Timer(0.3, write, (1.0,))
    writer.start()
    assert main(["status", str(run)]) == 0
    writer.join()
    assert ": running; " in capsys.readouterr().out


def test_what_is_not_watched_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(_run(tmp_path, watched=False))
    columns = [*STATUS["rank_columns"], "watched"]
    node = {
        "node": "gpu-01",
        "agent": "ok",
        "ranks": [[0, True, -1, 1, 0, 0, 0, False]],
        "notices": ["rank 0: why"],
    }
    status = STATUS | {"unix_s": time.time(), "rank_columns": columns, "nodes": [node]}
    (run / "status.json").write_text(json.dumps(status))
    assert main(["status", str(run)]) == 0
    told = capsys.readouterr().out
    assert "rank 0: why\n" in told
    assert "unwatched" in told
    (run / "end.json").write_text(json.dumps({"exit_code": 0, "reason": "finished"}))
    assert main(["report", str(run)]) == 2
    assert "nothing of it was recorded; rank 0: why\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["status.json", "end.json", "incidents/0001.json"])
def test_a_fifo_in_a_run_does_not_hold_up_its_reader(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(_run(tmp_path))
    (run / "incidents").mkdir()
    if name == "end.json":
        (run / "status.json").write_text(json.dumps(STATUS))
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    told = _refused(["report" if name.startswith("incidents") else "status", str(run)], capsys)
    assert f"{run / name}: cannot be read: is a FIFO" in told


def test_an_incident_at_an_impossible_time_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path)
    _incident(tmp_path, next_action="ends rank 0", next_unix_s=1e300)
    assert "incident 0001 holds a number that cannot be shown" in _refused(["report", run], capsys)
    assert main(["report", run, "--json"]) == 1


def test_damaged_rings_and_incidents_are_left_out_of_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = _run(tmp_path), str(tmp_path / "out.json.gz")
    _ring(tmp_path)
    (tmp_path / "rings" / "rank-00001.ring").write_bytes(b"cut")
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / "0001.json").write_text("{")
    assert main(["export", run, "-o", out]) == 0
    told = capsys.readouterr().err
    assert "keepstep: rank 1 left out: ring" in told
    assert "keepstep: marks of incidents left out: " in told
    (tmp_path / "rings" / "rank-00000.ring").write_bytes(b"cut")
    assert "none of its rings can be read: rank 0 left out" in _refused(["export", run, "-o", out], capsys)


@pytest.mark.parametrize("rings", [7, [1], "x"])
def test_rings_that_are_no_table_are_one_line(
    rings: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"rings": rings}))
    assert "its rings are no table of ranks" in _refused(["export", run, "-o", "out.json.gz"], capsys)


def test_a_terminal_that_knows_ascii_only_gets_the_verdict(tmp_path: Path) -> None:
    run = _run(tmp_path)
    _incident(tmp_path)
    told = subprocess.run(
        [sys.executable, "-m", "keepstep.cli", "report", run],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (told.returncode, told.stderr) == (1, b"")
    assert b"1 s \\u2192 2 s" in told.stdout
