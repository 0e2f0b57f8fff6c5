"""Many runs at a glance: what each is told as, their order, and folders that hold something else."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.view.example_runs import HANG, SLOW

from keepstep.core.incident import Incident
from keepstep.core.process_mark import process_mark
from keepstep.report.incidents import incident_to_json
from keepstep.view.run_rows import RunRow, age_s, folders_in, row_of, rows_of

NOW_S = 1_800_000_000.0


def make_run(
    parent: Path,
    name: str,
    *incidents: Incident,
    state: str = "running",
    heard_s_ago: float = 1.0,
    end: dict[str, Any] | None = None,
    nodes: object = (),
    **described: Any,
) -> Path:
    """A run's folder as keepstep leaves it, last written to so many seconds before `NOW_S`."""
    run = parent / name
    (run / "incidents").mkdir(parents=True)
    (run / "nodes" / "0").mkdir(parents=True)
    (run / "run.json").write_text(
        json.dumps({"started_unix_s": NOW_S - 7200, "host": "elsewhere", **described})
    )
    status = {
        "schema": 1, "unix_s": NOW_S - heard_s_ago, "state": state, "world_size": 4, "newest_step": 512,
        "open_incidents": [one.number for one in incidents if one.status == "open"], "nodes": nodes,
    }  # fmt: skip
    (run / "status.json").write_text(json.dumps(status, separators=(",", ":")))
    os.utime(run / "status.json", (NOW_S - heard_s_ago, NOW_S - heard_s_ago))
    for one in incidents:
        (run / "incidents" / f"{one.number:04d}.json").write_bytes(incident_to_json(one))
    rows = [{"step": n, "ranks": {"0": {"t": n, "d": 0.5 + n / 100, "self": 0.1}}} for n in range(5)]
    lines = [json.dumps(row, separators=(",", ":")) for row in rows]
    (run / "nodes" / "0" / "iterations.jsonl").write_text("\n".join([*lines, '{"step":5,"ra']))
    if end is not None:
        (run / "end.json").write_text(json.dumps({"ended_unix_s": NOW_S - heard_s_ago, **end}))
    return run


def test_a_healthy_run(tmp_path: Path) -> None:
    row = row_of(make_run(tmp_path, "a"), NOW_S)
    assert row == RunRow(
        "a", str(tmp_path / "a"), "running", 512, 0.54, 0.0, started_unix_s=NOW_S - 7200, heard_unix_s=NOW_S - 1,
        is_live=True,
    )  # fmt: skip
    assert age_s(row, NOW_S) == 7200


def test_the_pace_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a")
    with open(run / "nodes/0/iterations.jsonl", "a") as file:
        file.write('nks":{"0":{"t":5.0,"d":0.75,"self":0.1}}}\n')
    assert row_of(run, NOW_S).pace_s == 0.75


def test_what_is_lost_now_is_that_of_the_worst_open_incident(tmp_path: Path) -> None:
    row = row_of(make_run(tmp_path, "a", replace(SLOW, job_slowdown=2.0), replace(SLOW, number=7)), NOW_S)
    assert (row.lost, row.is_trouble, row.open_incidents, row.incident) == (0.5, True, 2, 1)
    assert row.verdict == "0001 the job is slow: rank 3 gpu-1, compute, confidence high"
    row = row_of(make_run(tmp_path, "b", SLOW, HANG), NOW_S)
    assert (row.lost, row.verdict[:18]) == (1.0, "0003 the job hangs")


@pytest.mark.parametrize(
    ("code", "state"), [(0, "finished"), (137, "failed"), (79, "stopped"), (75, "failed")]
)
def test_how_it_ended(code: int, state: str, tmp_path: Path) -> None:
    over = replace(HANG, status="ended")
    row = row_of(make_run(tmp_path, "a", over, end={"exit_code": code}, heard_s_ago=60.0), NOW_S)
    assert (row.state, row.is_live, row.is_trouble, row.lost) == (state, False, False, None)
    assert row.verdict.startswith("0003 over: the job hangs: ")
    assert age_s(row, NOW_S) == 60.0


def test_silence_is_trouble_for_a_day(tmp_path: Path) -> None:
    row = row_of(make_run(tmp_path, "a", SLOW, heard_s_ago=300.0), NOW_S)
    assert (row.state, row.is_live, row.is_trouble) == ("silent", False, True)
    row = row_of(make_run(tmp_path, "b", SLOW, heard_s_ago=1e6), NOW_S)
    assert (row.state, row.is_trouble) == ("silent", False)


def test_a_launcher_that_lives_here_is_news_enough(tmp_path: Path) -> None:
    mark = process_mark(os.getpid())
    run = make_run(tmp_path, "a", heard_s_ago=300.0, host=os.uname().nodename, launcher=mark)
    assert row_of(run, NOW_S).is_live
    (run / "status.json").unlink()
    assert row_of(run, NOW_S).state == "starting"


def test_of_a_huge_status_only_the_beginning_is_read(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", SLOW, nodes=[{"node": "x" * 100}] * 10_000)
    content = (run / "status.json").read_bytes()
    (run / "status.json").write_bytes(content[:-100])  # what follows is not even whole
    os.utime(run / "status.json", (NOW_S, NOW_S))
    row = row_of(run, NOW_S)
    assert (row.step, row.state, row.open_incidents) == (512, "running", 1)


@pytest.mark.parametrize("name", ["run.json", "status.json", "end.json", "incidents/0001.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", '{"exit_code": "x", "unix_s": []}', "\x1b[2J", None])
def test_a_broken_folder_is_one_row(name: str, content: str | None, tmp_path: Path) -> None:
    run = make_run(tmp_path, "a\nb", SLOW)
    (run / name).unlink(missing_ok=True)
    if content is None:
        os.mkfifo(run / name)
    else:
        (run / name).write_text(content)
    row = row_of(run, NOW_S)
    assert row.verdict.isprintable()
    if row.state == "broken":
        assert Path(name).name in row.verdict


def test_a_folder_that_only_its_processes_see(tmp_path: Path) -> None:
    row = row_of(tmp_path / "gone", NOW_S)
    assert (row.state, row.is_trouble) == ("broken", False)
    assert "no run folder (no run.json in it), or not seen from here" in row.verdict


def test_trouble_first_then_what_lives_then_the_newest_that_ended(tmp_path: Path) -> None:
    make_run(tmp_path, "old", end={"exit_code": 0}, heard_s_ago=9000.0)
    make_run(tmp_path, "new", end={"exit_code": 1}, heard_s_ago=90.0)
    make_run(tmp_path, "well")
    make_run(tmp_path, "slow", SLOW)
    make_run(tmp_path, "hung", HANG)
    make_run(tmp_path, "silent", heard_s_ago=600.0)
    (make_run(tmp_path, "broken") / "run.json").write_text("{")
    (tmp_path / "no run").mkdir()
    names = [row.name for row in rows_of(folders_in(tmp_path), NOW_S)]
    assert names == ["hung", "slow", "silent", "well", "new", "old", "broken"]
    assert list(folders_in(tmp_path / "well")) == [tmp_path / "well"]


def test_hostile_numbers(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text('{"started_unix_s": 1e300}')
    (tmp_path / "a" / "status.json").write_text('{"unix_s": -1e300, "open_incidents": [99999, -1]}')
    assert row_of(tmp_path / "a", time.time()).state in ("silent", "starting", "running")
