"""Another user has been in the run folder before us, or sends us words: no file and no log of ours suffers from it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ANOTHER_USER = 65533
PATIENCE_S = 120
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user's")


def start(
    folder: Path, script: str, *flags: str, arguments: tuple[str, ...] = (), umask: int = -1, **environ: str
):
    (folder / "job.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, "-m", "keepstep.cli", "run", *flags, "job.py", *arguments],
        cwd=folder,
        env={**os.environ, **environ},
        umask=umask,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@needs_root
@pytest.mark.parametrize("flags", [("--run-dir", "runs"), ()], ids=["run-dir", "runs"])
def test_a_folder_that_another_user_made_for_us_is_refused(tmp_path: Path, flags: tuple[str, ...]) -> None:
    victim, runs = tmp_path / "bashrc", tmp_path / "runs"
    victim.write_text("mine\n")
    runs.mkdir()
    (runs / "controller.log").symlink_to(victim)
    runs.chmod(0o777)
    os.chown(runs, ANOTHER_USER, -1)
    process = start(tmp_path, "print('ran')", *flags)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"keepstep: {runs}: belongs to user {ANOTHER_USER}")
    assert err.endswith("; --run-dir names another run folder\n")
    assert [path.name for path in runs.iterdir()] == ["controller.log"]
    assert victim.read_text() == "mine\n"


@pytest.mark.parametrize("log", [pytest.param("controller.log", marks=pytest.mark.long), "nodes/0/agent.log"])
def test_no_link_in_the_run_folder_is_followed(tmp_path: Path, log: str) -> None:
    """The folder itself lies behind a link of the user's own, whose umask is 002. The job trains on unwatched."""
    victim, scratch = tmp_path / "bashrc", tmp_path / "scratch"
    victim.write_text("mine\n")
    (scratch / "run" / "nodes" / "0").mkdir(parents=True)
    (tmp_path / "runs").symlink_to("scratch")
    for name in (log, "status.json", "run.json", "end.json"):
        (scratch / "run" / name).symlink_to(victim if name != "run.json" else tmp_path / "absent")
    script = "import time; time.sleep(5)"
    process = start(tmp_path, script, "--run-dir", "runs/run", umask=0o002)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert victim.read_text() == "mine\n"
    assert not (tmp_path / "absent").exists()
    assert f"{scratch}/run/{log}: is reached over a symbolic link" in err
    assert (scratch / "run" / "end.json").is_symlink() is False


@pytest.mark.parametrize("name", ["logs", "logs/rank-00000", "logs/rank-00000/stdout.log"])
def test_no_worker_writes_over_a_link(tmp_path: Path, name: str) -> None:
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.mkdir()
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(mine / "stdout.log" if name.endswith(".log") else mine)
    process = start(tmp_path, "print('ran')", "--no-watch", "--redirects", "3", "--run-dir", "run")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert "is reached over a symbolic link" in err
    assert list(mine.iterdir()) == []


def test_no_node_puts_a_line_of_its_own_into_our_logs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
    evil = "evil\nkeepstep: all is well\x1b[2J"
    flags = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", at, "--rdzv-backend", "static")
    script = (
        "import os, time\nif os.environ['RANK'] == '0': time.sleep(60)\ntime.sleep(5)\nraise SystemExit(3)\n"
    )
    nodes = [
        start(tmp_path, script, *flags, "--node-rank", rank, "--run-dir", "run", KEEPSTEP_NODE_NAME=name)
        for rank, name in (("0", "gpu-0"), ("1", evil))
    ]
    said = [process.communicate(timeout=PATIENCE_S)[1] for process in nodes]
    assert "keepstep: the job was ended: node evil\\nkeepstep: all is well\\x1b[2J failed" in said[0]
    logs = [*(tmp_path / "run").glob("*.log"), *(tmp_path / "run").glob("nodes/*/agent.log")]
    lines = [line for path in logs for line in path.read_text().split("\n")]
    assert len(logs) == 3
    assert any("agent of node 1 (evil\\nkeepstep: all is well\\x1b[2J)" in line for line in lines)
    for line in (*lines, *said[0].split("\n")):
        assert line.isprintable()
        assert not line.startswith("keepstep: all is well")
