"""Which folders the command lines of this machine's processes name as those of runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from keepstep.view.live_runs import live_folders


def process(proc: Path, pid: int, *words: str, cwd: str = "/data") -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cmdline").write_bytes("\0".join(words).encode() + b"\0")
    (proc / str(pid) / "cwd").symlink_to(cwd)


def test_folders_of_our_own_programs_each_once(tmp_path: Path) -> None:
    process(tmp_path, 1, "python", "-m", "keepstep.agent", "--run-dir", "/runs/a", "--x")
    process(tmp_path, 2, "python", "-m", "keepstep.control", "--run-dir", "/runs/a")
    process(tmp_path, 3, "/venv/bin/python", "/venv/bin/keepstep", "run", "--run-dir=runs/b", "train.py")
    process(tmp_path, 4, "tar", "--run-dir", "/runs/c")
    process(tmp_path, 5, "keepstep", "run", "train.py")
    process(tmp_path, 6, "keepstep", "run", "--run-dir")
    (tmp_path / "7").mkdir()  # it has ended
    (tmp_path / "self").mkdir()
    assert sorted(live_folders(tmp_path)) == [Path("/data/runs/b"), Path("/runs/a")]


def test_processes_of_others_are_for_root_alone(tmp_path: Path) -> None:
    process(tmp_path, 1, "python", "-m", "keepstep.agent", "--run-dir", "/runs/a")
    mine = os.stat(tmp_path / "1").st_uid
    assert live_folders(tmp_path, mine) == [Path("/runs/a")]
    assert live_folders(tmp_path, 0) == [Path("/runs/a")]
    assert live_folders(tmp_path, mine + 1) == []


def test_a_real_process() -> None:
    words = [sys.executable, "-c", "input('there ')", "keepstep.agent", "--run-dir", "/runs/of-a-test"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.read(5) == b"there"  # its command line is set by now
        assert Path("/runs/of-a-test") in live_folders()
        child.communicate(b"\n")
