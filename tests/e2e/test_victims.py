"""Deaths whose words only tell of others, in real processes: the verdict names who was waited for, and no victim."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "tests" / "e2e" / "victims_job.py"
RANKS = 3

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


class Told:
    """What `keepstep run` returned and wrote."""

    def __init__(self, folder: Path, how: str, odd: int, *flags: str) -> None:
        keepstep = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run"), *flags]
        script = [str(JOB), str(folder / "run"), how, str(odd)]
        done = subprocess.run(
            [*keepstep, "--nproc-per-node", str(RANKS), *script],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        self.code, self.said = done.returncode, done.stderr
        files = sorted((folder / "run" / "incidents").glob("[0-9]*.json"))
        self.incidents: list[dict[str, Any]] = [json.loads(path.read_bytes()) for path in files]

    @property
    def only(self) -> dict[str, Any]:
        assert len(self.incidents) == 1, self.said
        return self.incidents[0]


def blamed(incident: dict[str, Any]) -> list[tuple[int, str]]:
    return [(one["rank"], one["confidence"]) for one in incident["culprits"]]


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(JOB.read_text().splitlines(), start=1) if text in line)


@pytest.mark.parametrize("odd", [1, pytest.param(0, marks=pytest.mark.long)])
def test_the_sleeper_is_named_and_not_who_lost_patience(tmp_path: Path, odd: int) -> None:
    told = Told(tmp_path, "sleeps", odd)
    assert told.code == 1
    assert (told.only["kind"], blamed(told.only)) == ("crash", [(odd, "high")]), told.said
    assert set(told.only["victims"]) == {0, 1, 2} - {odd}
    assert f"victims_job.py:{line_of('.backward()')}" in told.said
    assert told.only["onset_step"] == 20


@pytest.mark.long
def test_a_hang_stays_one_incident_when_the_others_lose_patience(tmp_path: Path) -> None:
    told = Told(tmp_path, "hangs", 1)
    assert told.only["kind"] == "hang", told.said
    assert [rank for rank, _ in blamed(told.only)] == [1]
    assert "deaths" in [event["what"] for event in told.only["events"]]
    assert "gave up waiting" in told.only["evidence"][0]
    assert told.only["status"] == "ended"


@pytest.mark.parametrize("odd", [2, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_leaves_in_the_middle_is_the_culprit(tmp_path: Path, odd: int) -> None:
    told = Told(tmp_path, "leaves", odd)
    assert told.code == 1
    assert [rank for rank, _ in blamed(told.only)] == [odd], told.said
    (culprit,) = told.only["culprits"]
    assert culprit["cause"] == "left with exit code 0"
    assert "at step 20 while ranks" in culprit["detail"]
    assert "ALLREDUCE at" in culprit["detail"]


@pytest.mark.parametrize("odd", [0])
def test_a_rank_that_calls_once_more_than_all_others_is_the_culprit(tmp_path: Path, odd: int) -> None:
    told = Told(tmp_path, "one more", odd)
    assert told.code == 1
    assert blamed(told.only) == [(odd, "high")], told.said
    assert "exit code 0" in told.said


def test_a_rank_that_is_late_for_a_monitored_barrier_is_the_culprit(tmp_path: Path) -> None:
    told = Told(tmp_path, "is late", 1)
    assert told.code == 1
    assert [rank for rank, _ in blamed(told.only)] == [1], told.said


def test_a_rank_that_works_on_for_itself_harms_nobody(tmp_path: Path) -> None:
    told = Told(tmp_path, "works on", 1)
    assert told.code == 0, told.said
    assert told.incidents == []
