"""A node that cannot run the job says so before anything is started: one line, exit code 2."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def run(folder: Path, *flags: str) -> tuple[int, str, str]:
    script = folder / "job.py"
    script.write_text("print('ran')\n")
    command = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run"), *flags]
    done = subprocess.run(
        [*command, str(script)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "KEEPSTEP_NODE_NAME": "gpu-1"},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = run(tmp_path, "--no-watch", "--master-port", str(port))
        told = [line for line in err.splitlines() if "port" in line]
        assert (code, out) == (2, ""), err
        assert told == [
            f"keepstep: node gpu-1: port {port} cannot be used: Address already in use; "
            "give another --master-port, or none for any free one (--no-check starts it anyway)"
        ]
        code, out, err = run(tmp_path, "--no-watch", "--master-port", str(port), "--no-check")
        assert (code, out) == (0, "ran\n"), err


def test_data_that_is_missing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_DATASET_PATHS", f"{tmp_path},/no/such/data")
    code, out, err = run(tmp_path, "--no-watch")
    assert (code, out) == (2, ""), err
    assert err.splitlines()[-1] == (
        "keepstep: node gpu-1: /no/such/data: No such file or directory; mount it there or correct the path "
        "(--no-check starts it anyway)"
    )
    code, out, err = run(tmp_path, "--no-watch", "--no-check")
    assert (code, out) == (0, "ran\n"), err
