"""Processes are known by pid and start time, killed only when they carry the run's mark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.agent.sensors.processes import ProcessId, alive, carriers, identify, kill_carriers, state_of


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    environment = dict(os.environ, KEEPSTEP_RING=f"/proc/{os.getpid()}/fd/77", KEEPSTEP_RUN_DIR="/runs/a")
    code = "import sys; print(flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_process_is_recognised_while_it_lives(child: subprocess.Popen[bytes]) -> None:
    known = identify(child.pid)
    assert known is not None
    assert alive(known)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert state_of(known) == "T"
    assert alive(known)
    assert not alive(ProcessId(child.pid, known.started + 1)), "another process that got the same pid"
    child.kill()
    child.wait()
    assert state_of(known) == ""
    assert identify(child.pid) is None


def test_only_what_carries_ring_and_run_is_killed(child: subprocess.Popen[bytes]) -> None:
    ring = f"/proc/{os.getpid()}/fd/77"
    for other in (
        {"KEEPSTEP_RING": {ring}, "KEEPSTEP_RUN_DIR": {"/runs/b"}},
        {"KEEPSTEP_RING": {ring + "8"}},
    ):
        assert carriers(other) == []
        assert kill_carriers(other) == 0
    assert child.poll() is None
    mine = {"KEEPSTEP_RING": {ring, "x"}, "KEEPSTEP_RUN_DIR": {"/runs/a"}}
    assert carriers(mine) == [child.pid]
    assert kill_carriers(mine) == 1
    assert child.wait() == -signal.SIGKILL


def test_a_name_with_brackets_does_not_confuse(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = " ".join(["S", "1", *["0"] * 17, "4711", "0"])
    (tmp_path / "7" / "stat").write_text(f"7 (a) b (c)) {fields}\n")
    assert identify(7, tmp_path) == ProcessId(7, 4711)
    assert state_of(ProcessId(7, 4711), tmp_path) == "S"
