import json
import os
from dataclasses import replace
from pathlib import Path

from keepstep.launch.command.placement import ERROR_FILE, WorkerPlan
from keepstep.launch.workers import root_cause
from keepstep.launch.workers.root_cause import Failure, first, hand_up, render


def examine(
    rank: int,
    local_rank: int,
    pid: int,
    status: int,
    died_unix_s: float,
    error_file: Path,
    stderr: Path | None,
) -> Failure:
    plan = WorkerPlan(rank, local_rank, (), {ERROR_FILE: str(error_file)})
    return root_cause.examine(plan, pid, status, died_unix_s, stderr)


def error_file(path: Path, message: object, at_s: float) -> Path:
    path.write_text(json.dumps({"message": message}))
    os.utime(path, (at_s, at_s))
    return path


RECORDED = {
    "message": "ValueError: boom",
    "extraInfo": {"py_callstack": "Traceback:\n  x\nValueError: boom\n"},
}


def test_the_error_file_tells_what_and_when(tmp_path: Path) -> None:
    path = error_file(tmp_path / "error.json", RECORDED, 100.25)
    failure = examine(3, 1, 77, 1, 105.0, path, None)
    assert failure.message == "ValueError: boom"
    assert failure.detail.startswith("Traceback:")
    assert failure.unix_s == 100.25
    assert failure.error_file == path


def test_the_root_is_the_first_in_time_not_the_first_to_die(tmp_path: Path) -> None:
    root = examine(2, 2, 12, 1, 9.0, error_file(tmp_path / "a", RECORDED, 1.5), None)
    victim = examine(0, 0, 10, -6, 8.0, tmp_path / "none", None)
    assert first([victim, root]) is root
    text = render("train.py", "gpu-1", [victim, root])
    assert text.index("rank      : 0 (local_rank: 0)") < text.index("Root Cause")
    assert text.index("Root Cause") < text.index("rank      : 2 (local_rank: 2)")
    assert "exitcode  : -6 (pid: 10) (SIGABRT)" in text


def test_who_hears_of_a_death_before_us_is_not_its_root(tmp_path: Path) -> None:
    lost = {"message": "RuntimeError: Connection closed by peer [10.0.0.1]:9"}
    victim = examine(3, 3, 13, 1, 9.0, error_file(tmp_path / "a", lost, 5.0), None)
    killed = examine(2, 2, 12, -9, 5.004, tmp_path / "none", None)
    assert first([victim, killed]) is killed
    later = examine(2, 2, 12, -9, 6.0, tmp_path / "none", None)
    assert first([victim, later]) is victim


def test_whom_keepstep_ended_is_the_root_of_what_others_say_at_that_moment(tmp_path: Path) -> None:
    told = {"message": "RuntimeError: something that tells of nobody"}
    victim = examine(3, 3, 13, 1, 9.0, error_file(tmp_path / "a", told, 5.0), None)
    ended = replace(examine(2, 2, 12, -9, 5.004, tmp_path / "none", None), by_keepstep=True)
    assert first([victim, ended]) is ended


def test_without_an_error_file_the_last_lines_of_stderr(tmp_path: Path) -> None:
    stderr = tmp_path / "stderr.log"
    stderr.write_bytes(b"x" * 40000 + b"\nline\nRuntimeError: no\xff\n\n")
    failure = examine(0, 0, 5, 1, 1.0, tmp_path / "none", stderr)
    assert failure.message.startswith("RuntimeError: no")
    assert failure.detail.splitlines()[-2] == "line"


def test_without_anything_the_status(tmp_path: Path) -> None:
    killed = examine(0, 0, 5, -9, 1.0, tmp_path / "none", None)
    assert (killed.message, killed.text, killed.exit_code) == (
        "",
        "signal 9 (SIGKILL) received by process 5",
        137,
    )
    assert "<NO_OTHER_FAILURES>" in render("t", "h", [killed])
    assert examine(0, 0, 5, -40, 1.0, tmp_path / "none", None).exit_code == 168


def test_broken_error_files_are_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    for content in ("", "{", "[]", '{"message": 5}', '{"message": {"extraInfo": 3}}', '{"message": ""}'):
        path.write_text(content)
        assert examine(0, 0, 5, 2, 1.0, path, None).exit_code == 2
    path.write_text('{"message": "plain"}')
    assert examine(0, 0, 5, 2, 1.0, path, None).message == "plain"


def test_the_root_cause_is_handed_up(tmp_path: Path) -> None:
    failure = examine(0, 0, 5, 3, 1.0, error_file(tmp_path / "error.json", dict(RECORDED), 1.0), None)
    hand_up(failure, str(tmp_path / "up.json"))
    said = json.loads((tmp_path / "up.json").read_text())["message"]
    assert (said["message"], said["errorCode"]) == ("ValueError: boom", 3)
    hand_up(failure, str(tmp_path / "no" / "such" / "folder"))
