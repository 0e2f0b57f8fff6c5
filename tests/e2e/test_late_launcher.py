"""Launchers of nodes that come when their job has ended."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from keepstep.launch.controller import late_launcher
from keepstep.report.ended_run import end_of

PATIENCE_S = 120


def launcher(folder: Path, *flags: str, code: int = 0) -> subprocess.Popen[str]:
    """``keepstep run`` of a job that ends with ``code``, in the run folder ``folder/run``."""
    script = folder / "job.py"
    script.write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    words = ["-m", "keepstep.cli", "run", "--run-dir", folder / "run", *flags, script, str(code)]
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, text=True, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def ended_run(folder: Path, code: int = 0) -> None:
    """A run of one node that has ended with ``code``, in the folder ``folder/run``."""
    done = launcher(folder, code=code)
    _, said = done.communicate(timeout=PATIENCE_S)
    assert done.returncode == code, said


def late_launcher_of(folder: Path, wait_s: int) -> subprocess.Popen[str]:
    """The launcher of a second node, whose controller never answers, once it has begun to look for it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--verbose"]
    late = launcher(folder, *flags, "--rdzv-conf", f"is_host=false,join_timeout={wait_s}")
    assert late.stderr is not None
    while "joining the other nodes" not in (line := late.stderr.readline()):
        assert line, late.wait(PATIENCE_S)
    return late


@pytest.mark.parametrize(("code", "exits"), [(0, 0), (75, 75), (3, 0)])
def test_it_leaves_when_the_job_ends_without_it(tmp_path: Path, code: int, exits: int) -> None:
    late = late_launcher_of(tmp_path, 600)
    try:
        ended_run(tmp_path, code)
        _, said = late.communicate(timeout=PATIENCE_S)
    finally:
        late.kill()
    assert late.returncode == exits, said
    assert f"run {tmp_path / 'run'} has ended: node {os.uname().nodename} came too late to join it" in said


def test_an_end_that_was_there_before_it_is_not_its_jobs(tmp_path: Path) -> None:
    ended_run(tmp_path)
    late = late_launcher_of(tmp_path, 4)
    _, said = late.communicate(timeout=PATIENCE_S)
    assert late.returncode == 2, said
    assert "no place in the job after 4 s" in said


def test_in_a_folder_of_this_start_alone_it_counts_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_run(tmp_path, 75)
    monkeypatch.setattr(late_launcher, "_PATIENCE_S", 1.0)
    first, link = end_of(tmp_path / "run"), SimpleNamespace(connected=asyncio.Event())

    async def found(is_own: bool) -> object:
        ending = late_launcher.ended_before(tmp_path / "run", first, link, is_of_this_job=is_own)  # pyright: ignore
        return await asyncio.wait_for(ending, 3)

    assert asyncio.run(found(True)) == first
    with pytest.raises(TimeoutError):
        asyncio.run(found(False))
    link.connected.set()
    with pytest.raises(TimeoutError):
        asyncio.run(found(True))
