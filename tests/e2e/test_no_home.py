"""Real runs of a user without a password entry and without HOME, as with `docker run -u 12345` or `env -i`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

UID = 54321
SCRIPT = """
import os, pwd, sys, time
for _ in range(600):
    if all(map(os.path.exists, sys.argv[1:])):  # agent and controller start beside the worker
        break
    time.sleep(0.1)
try:
    print("an entry", pwd.getpwuid(os.getuid()))
except KeyError:
    print("ran as", os.getuid(), os.environ.get("HOME"), "rank", os.environ["RANK"])
"""


def as_nobody(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run it with another user number, in a namespace where that number owns what is ours (also without root)."""
    return subprocess.run(
        ["unshare", "--user", f"--map-user={UID}", "--", *command],
        cwd=folder,
        env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    probe = as_nobody([sys.executable, "-c", "import os; print(os.getuid())"], tmp_path)
    if probe.returncode != 0 or probe.stdout.strip() != str(UID):
        pytest.skip(f"no user namespace can be made here: {probe.stderr.strip() or probe.stdout.strip()}")
    (tmp_path / "job.py").write_text(SCRIPT)
    return tmp_path


def keepstep(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return as_nobody([sys.executable, "-m", "keepstep.cli", *words], folder)


@pytest.mark.parametrize("flags", [(), ("--no-watch",)], ids=["watched", "not watched"])
def test_a_run_starts_and_ends_as_usual(folder: Path, flags: tuple[str, ...]) -> None:
    logs = () if flags else ("run/controller.log", "run/nodes/0/agent.log", "run/status.json")
    done = keepstep(folder, "run", "--nproc-per-node", "1", "--run-dir", "run", *flags, "job.py", *logs)
    assert (done.returncode, done.stdout) == (0, f"ran as {UID} None rank 0\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((folder / "run" / "end.json").read_text())["exit_code"] == 0
    assert not any("Traceback" in (folder / log).read_text() for log in logs)


def test_nodes_that_share_no_home_say_so_in_one_line(folder: Path) -> None:
    nodes = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "1")
    done = keepstep(folder, "run", "--nproc-per-node", "1", *nodes, "job.py")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert (
        "HOME is not set, and this user has no home folder; name a file that all nodes have with --secret-file"
        in (done.stderr)
    )
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "runs").exists()
