"""`keepstep ls`: one line a run, whatever its folder holds, and JSON for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.unit.view.example_runs import SLOW
from tests.unit.view.test_run_rows import NOW_S, make_run

from keepstep.cli import main


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    monkeypatch.chdir(tmp_path)


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs", "slow", SLOW)
    make_run(tmp_path / "runs", "well")
    make_run(tmp_path / "runs", "over", end={"exit_code": 137, "reason": "rank 2 died"}, heard_s_ago=600.0)
    (make_run(tmp_path / "runs", "cut") / "run.json").write_text("{")
    assert main(["ls", "runs"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "RUN   STATE    STEP    PACE  LOST NOW     AGE  VERDICT",
        "slow  running   512  540 ms       43%     2 h  0001 the job is slow: rank 3 gpu-1, compute, confidence high",
        "well  running   512  540 ms               2 h",
        "over  failed    512  540 ms            10 min",
        "cut   broken                                   runs/cut/run.json: not what keepstep writes (Input data was "
        "truncated); the file was cut or edited",
    ]


def test_json_has_a_run_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "slow", SLOW)
    assert main(["ls", ".", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["path"] == "slow"
    assert (told["state"], told["step"], told["incident"], told["is_trouble"]) == ("running", 512, 1, True)


def test_old_runs_are_left_out_unless_all_are_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(25):
        make_run(tmp_path, f"{number:02d}", end={"exit_code": 0}, heard_s_ago=60.0 * (number + 1))
    assert main(["ls", "."]) == 0
    told = capsys.readouterr()
    assert [line[:2] for line in told.out.splitlines()[1:]] == [f"{number:02d}" for number in range(20)]
    assert told.err == "5 more have ended: --all lists them\n"
    assert main(["ls", "--all", "."]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 26


def test_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "."]) == 0
    assert capsys.readouterr().err == "no runs in .\n"
    assert main(["ls", "nowhere"]) == 2
    assert "nowhere: cannot be listed: No such file or directory" in capsys.readouterr().err


def test_a_name_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "a\x1b[2J\nb" + "x" * 60)
    make_run(tmp_path, "节点")
    assert main(["ls", "."]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)


def test_a_name_that_is_no_text_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/a\xff")
    (tmp_path / os.fsdecode(b"a\xff") / "run.json").write_text("{}")
    assert main(["ls", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "a\\xff"


def test_what_lives_on_this_machine_is_listed_from_anywhere(tmp_path: Path) -> None:
    run = make_run(tmp_path / "elsewhere", "live-of-a-test")
    words = [sys.executable, "-c", "input()", "keepstep.agent", "--run-dir", str(run)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as child:
        told = subprocess.run(
            [sys.executable, "-m", "keepstep.cli", "ls", "--json", "--all"],
            cwd=tmp_path, capture_output=True, text=True, check=True, env=os.environ,
        )  # fmt: skip
        child.communicate(b"\n")
    assert "live-of-a-test" in [json.loads(line)["name"] for line in told.stdout.splitlines()]
