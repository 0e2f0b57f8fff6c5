import errno
import json
import os
from pathlib import Path

import pytest

from keepstep.core.errors import RunError
from keepstep.core.process_mark import process_mark
from keepstep.launch.command import run_folder
from keepstep.launch.command.job import job_from_command_line


def job(*words: str, **environ: str):
    return job_from_command_line([*words, "train.py"], {"HOME": "/nowhere", **environ})


def test_the_name_is_the_same_on_all_nodes() -> None:
    two = ("--nnodes", "2", "--rdzv-endpoint", "h:1")
    assert run_folder.folder_of(job(*two, "--rdzv-id", "a/b"), {}, 0).name == "a-b"
    slurm = {"SLURM_JOB_ID": "17"}
    assert run_folder.folder_of(job(*two), slurm, 0).name == "17-train"
    assert run_folder.folder_of(job(*two), {**slurm, "SLURM_RESTART_COUNT": "2"}, 0).name == "17.2-train"
    assert run_folder.folder_of(job("--run-dir", "/x"), slurm, 0) == Path("/x")


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    made = [run_folder.create(job(), tmp_path / "r" / "x", first=True).name for _ in range(3)]
    assert made == ["x", "x.2", "x.3"]


def test_an_earlier_run_is_moved_aside_and_nothing_else(tmp_path: Path) -> None:
    wanted = job("--run-dir", str(tmp_path))
    (tmp_path / "checkpoint.pt").touch()
    for turn in (1, 2):
        run_folder.create(wanted, tmp_path, first=True)
        (tmp_path / "run.json").write_text(json.dumps({"host": "elsewhere", "turn": turn}))
        (tmp_path / "logs").mkdir()
    run_folder.create(wanted, tmp_path, first=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt", "previous"]
    assert json.loads((tmp_path / "previous" / "2" / "run.json").read_text())["turn"] == 2
    assert (tmp_path / "previous" / "1" / "logs").is_dir()


def test_a_run_that_lives_is_not_disturbed(tmp_path: Path) -> None:
    mark = process_mark(os.getpid())
    (tmp_path / "run.json").write_text(json.dumps({"host": os.uname().nodename, "launcher": mark}))
    with pytest.raises(RunError, match="give another --run-dir"):
        run_folder.create(job("--run-dir", str(tmp_path)), tmp_path, first=True)
    run_folder.create(job("--run-dir", str(tmp_path)), tmp_path, first=False)
    (tmp_path / "run.json").write_text("{")  # cut short: nobody lives there
    run_folder.create(job("--run-dir", str(tmp_path)), tmp_path, first=True)


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="--run-dir"):
        run_folder.create(job("--run-dir", str(tmp_path / "file" / "x")), tmp_path / "file" / "x", first=True)


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(RunError, match=r"can be written by others .*; --run-dir names another run folder"):
        run_folder.create(job("--run-dir", str(tmp_path)), tmp_path, first=True)


def test_a_link_in_the_place_of_a_new_run_folder_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to(tmp_path / "elsewhere")
    assert run_folder.create(job(), tmp_path / "x", first=True) == tmp_path / "x.2"
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_folder_is_reached_over_a_link_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    assert run_folder.create(job(), tmp_path / "runs" / "x", first=True) == tmp_path / "scratch" / "x"
    wanted = job("--run-dir", str(tmp_path / "runs"))
    assert run_folder.create(wanted, tmp_path / "runs", first=True) == tmp_path / "scratch"


def test_links_of_an_earlier_run_are_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "controller.log").symlink_to(tmp_path / "absent")
    run_folder.create(job("--run-dir", str(tmp_path)), tmp_path, first=True)
    assert [path.name for path in tmp_path.iterdir()] == ["previous"]
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "previous").rename(tmp_path / "before")
    (tmp_path / "previous").symlink_to("before")
    with pytest.raises(RunError, match=r"previous: .* no link is followed there"):
        run_folder.create(job("--run-dir", str(tmp_path)), tmp_path, first=True)


def test_where_the_secret_lies(tmp_path: Path) -> None:
    two = ("--nnodes", "2", "--rdzv-endpoint", "h:1")
    home = Path("/home/me")
    assert run_folder.secret_path(job(), tmp_path, home) == tmp_path / "secret"
    assert run_folder.secret_path(job(*two), tmp_path, home) == home / ".config/keepstep/secret"
    assert run_folder.secret_path(job(*two, "--run-dir", "/r"), tmp_path, home) == tmp_path / "secret"
    assert run_folder.secret_path(job(*two, "--secret-file", "/s"), tmp_path, home) == Path("/s")


def test_the_secret_is_private_and_made_once(tmp_path: Path) -> None:
    from keepstep.wire.secret import read_secret

    path = tmp_path / "deep" / "secret"
    run_folder.ensure_secret(path)
    made = read_secret(path)
    run_folder.ensure_secret(path)
    assert read_secret(path) == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_log_files_of_attempts(tmp_path: Path) -> None:
    logs = run_folder.LogFiles(tmp_path, None, "id")
    error = logs.error_file(3, 1, 0)
    assert error == tmp_path / "logs/rank-00003/error.json"
    error.write_text("first")
    logs.error_file(3, 1, 1)
    assert (error.parent / "error.0.json").read_text() == "first"
    assert not error.exists()
    error.symlink_to(tmp_path / "elsewhere")  # torch opens it by name, and would make what it leads to
    logs.error_file(3, 1, 2)
    assert not error.is_symlink()


def test_log_dir_keeps_torchruns_layout(tmp_path: Path) -> None:
    logs = run_folder.LogFiles(tmp_path / "run", tmp_path / "logs", "my/id")
    assert logs.error_file(3, 1, 2) == tmp_path / "logs/my-id_run/attempt_2/1/error.json"


def test_where_the_working_directory_cannot_be_written_it_is_in_that_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, temporary = tmp_path / "kept", tmp_path / "temporary"
    for folder in (kept, temporary):
        folder.mkdir()
    monkeypatch.chdir(kept)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    make = run_folder.make_new_folder

    def refuse(path: Path) -> None:
        """As on a file system that is mounted for reading; root may write wherever modes forbid it."""
        if path.is_relative_to(kept):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        make(path)

    monkeypatch.setattr(run_folder, "make_new_folder", refuse)
    made = run_folder.create(job(), kept / "runs" / "x", first=True)
    assert made == temporary / f"keepstep-{os.getuid()}" / "runs" / "x"
    with pytest.raises(RunError, match="Read-only file system; name another"):
        run_folder.create(job(KEEPSTEP_RUNS_DIR=str(kept)), kept / "x", first=True)
