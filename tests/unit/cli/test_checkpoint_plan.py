"""`keepstep checkpoint plan`: what it prints, where the step time comes from, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.cli import main


def plan(*words: str) -> int:
    return main(["checkpoint", "plan", *words])


def test_the_plan_of_a_hand_reckoned_job(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--state-size",
        "5GB",
        "--memory-bandwidth",
        "5GB/s",
        "--step-time",
        "5",
        "--failures-per-day",
        "2",
    ]
    assert plan(*words, "--ranks-per-node", "1") == 0
    told = capsys.readouterr().out
    assert told.startswith("memory    every 59 steps (5 min), decided by: least total cost\n")
    assert plan(*words, "--step-increase", "0", "--backup-bandwidth", "1GB", "--json") == 0
    terms = json.loads(capsys.readouterr().out)
    assert (terms["interval_steps"], terms["decided_by"], terms["backup_s"]) == (8, "backup", 40.0)


def test_the_step_time_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "nodes" / "0").mkdir(parents=True)
    assert plan(str(tmp_path), "--state-size", "1GB") == 2
    assert "no finished step" in capsys.readouterr().err
    steps = [{"step": n, "ranks": {"0": {"t": 1.0 * n, "d": 0.5}}} for n in range(9)]
    (tmp_path / "nodes" / "0" / "iterations.jsonl").write_text("\n".join(map(json.dumps, steps)))
    assert plan(str(tmp_path), "--state-size", "1GB", "--json") == 0
    terms = json.loads(capsys.readouterr().out)
    assert terms["step_s"] == 0.5
    assert terms["step_source"].startswith("median of 9 iterations")


def test_transoms_example(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--parameters", "175B", "--nodes", "16", "--data-parallel", "8", "--step-time", "12", "--json"]
    assert plan(*words) == 0
    assert json.loads(capsys.readouterr().out)["rank_bytes"] == pytest.approx(38.28e9, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--state-size", "1GB"], "give --step-time"),
        (["--step-time", "1"], "give either --state-size"),
        (["--step-time", "1", "--state-size", "1GB", "--parameters", "1B"], "give either --state-size"),
        (["--step-time", "1", "--state-size", "lots"], "--state-size lots"),
        (["--step-time", "-1", "--state-size", "1GB"], "step s is -1"),
        (["--step-time", "1", "--state-size", "1GB", "--failures-per-day", "0"], "failures is 0"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert said in told.err
