import json
import os
from dataclasses import replace
from pathlib import Path

from keepstep.core.abort_file import last_words
from keepstep.core.budgets import LEFT_EARLY
from keepstep.launch.command.placement import ERROR_FILE, WorkerPlan
from keepstep.launch.workers import root_cause
from keepstep.launch.workers.root_cause import Failure, first, hand_up, render, seem_left, to_blame


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
    seen_late = examine(2, 2, 12, -9, 7.5, tmp_path / "none", None)
    assert first([victim, seen_late]) is seen_late
    later = examine(2, 2, 12, -9, 16.0, tmp_path / "none", None)
    assert first([victim, later]) is victim
    own = replace(victim, message="ValueError: boom")
    assert first([own, seen_late]) is own


def test_an_abort_is_as_old_as_what_it_said(tmp_path: Path) -> None:
    said = last_words(tmp_path / "error.json", 5)
    said.write_text("Fatal Python error: Aborted\n")
    os.utime(said, (3.5, 3.5))
    assert examine(0, 0, 5, -6, 4.0, tmp_path / "error.json", None).unix_s == 3.5
    assert examine(0, 0, 5, 1, 4.0, tmp_path / "error.json", None).unix_s == 4.0
    assert examine(0, 0, 6, -6, 4.0, tmp_path / "error.json", None).unix_s == 4.0


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


def test_what_an_aborted_worker_said_is_read_without_its_stderr(tmp_path: Path) -> None:
    said = last_words(tmp_path / "error.json", 5)
    said.write_text(
        "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: launch failure\n"
        'Fatal Python error: Aborted\nCurrent thread 0x7 (most recent call first):\n  File "/a/b.py", line 5 in main\n'
    )
    failure = examine(0, 0, 5, -6, 1.0, tmp_path / "error.json", None)
    assert failure.message == "c10::Error: CUDA error: launch failure"
    assert 'File "/a/b.py", line 5 in main' in failure.detail
    assert "what():  CUDA error" in render("t", "h", [failure])
    assert examine(0, 0, 6, -6, 1.0, tmp_path / "error.json", None).message == "", "another process"
    said.write_text("")
    assert (
        examine(0, 0, 5, -9, 1.0, tmp_path / "error.json", None).text
        == "signal 9 (SIGKILL) received by process 5"
    )


def test_a_killed_worker_did_not_die_of_its_last_line(tmp_path: Path) -> None:
    stderr = tmp_path / "stderr.log"
    stderr.write_text("step 41 loss 3.2\n")
    failure = examine(0, 0, 5, -9, 1.0, tmp_path / "none", stderr)
    assert (failure.message, failure.detail) == ("", "step 41 loss 3.2")


def test_the_first_error_of_a_chain_is_told(tmp_path: Path) -> None:
    trace = (
        'Traceback (most recent call last):\n  File "a.py", line 1\nOSError: [Errno 28] No space left on device\n\n'
        "During handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "a.py", line 2\nRuntimeError: unexpected pos 448 vs 342\n'
    )
    said = {"message": "RuntimeError: unexpected pos 448 vs 342", "extraInfo": {"py_callstack": trace}}
    failure = examine(0, 0, 5, 1, 9.0, error_file(tmp_path / "a", said, 5.0), None)
    assert failure.message == (
        "OSError: [Errno 28] No space left on device; then RuntimeError: unexpected pos 448 vs 342"
    )


ECHO = Failure(2, 2, 12, 1, 10.0, "RuntimeError: Connection closed by peer [::1]:5", "Traceback", None)
LEFT = Failure(1, 1, 11, 0, 8.8, LEFT_EARLY, LEFT_EARLY, None)


def test_a_worker_that_left_early_is_to_blame_where_others_only_tell_of_it() -> None:
    assert to_blame([ECHO], [LEFT], 3) is LEFT
    assert to_blame([ECHO], [], 3) is ECHO
    own = replace(ECHO, rank=0, unix_s=11.0, message="ValueError: boom")
    assert to_blame([ECHO, own], [LEFT], 3) is own, "one error of a rank's own, and the exit explains nothing"
    assert to_blame([ECHO, replace(own, late=True)], [LEFT], 3) is LEFT
    assert to_blame([ECHO], [LEFT, replace(LEFT, rank=0)], 3) is ECHO, (
        "most have left: the one that remained is odd"
    )
    assert to_blame([ECHO], [LEFT], 2) is LEFT


def test_who_ends_well_after_a_timeout_has_not_left_before_it() -> None:
    assert seem_left([])
    assert seem_left([ECHO])
    assert not seem_left([ECHO, replace(ECHO, message="RuntimeError: Operation timed out!")])
    assert not seem_left([replace(ECHO, message="")])


def test_what_dies_as_all_are_ended_is_not_the_root_cause() -> None:
    late = replace(ECHO, rank=0, unix_s=10.1, message="", late=True)
    assert first([ECHO, late]) is ECHO
    own = replace(late, late=False)
    assert first([ECHO, own]) is own


def test_the_report_says_who_left_before_an_echo() -> None:
    note = "note      : this error only tells of another rank; rank 1 left with exit code 0 1.2 s before"
    assert note in render("t", "h", [ECHO], [LEFT])
    two = render("t", "h", [ECHO], [LEFT, replace(LEFT, rank=0, unix_s=10.3)])
    assert "ranks 0-1 left with exit code 0 1.2 s before" in two
    assert "rank 1 left with exit code 0 just then" in render("t", "h", [ECHO], [replace(LEFT, unix_s=10.3)])
    assert "note      : the cause is not known: this error only tells of another rank" in render(
        "t", "h", [ECHO]
    )
    assert "note" not in render("t", "h", [replace(ECHO, message="ValueError: boom")], [LEFT])


def test_an_early_exit_is_no_crash_to_the_controller() -> None:
    found = root_cause.finding(LEFT, "gpu-1", 2, 50)
    assert (found.kind, found.rank, found.exit_code, found.message, found.incarnation) == (
        "exit",
        1,
        0,
        "",
        2,
    )
    crash = root_cause.finding(ECHO, "gpu-1", 2, -1)
    assert (crash.kind, crash.exit_code, crash.message) == ("crash", 1, ECHO.message)


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
