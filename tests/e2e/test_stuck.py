"""A process that even SIGKILL does not end: its node is unfit, and another process takes over its rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.e2e.hanging_mount import hanging_mount

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]

JOB = Path(__file__).with_name("stuck_train.py")


@pytest.mark.parametrize("flags", [(), ("--in-place",)])
def test_a_worker_that_is_stuck_in_the_kernel_is_told_and_the_job_trains_on(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    mount, asked, done = tmp_path / "mount", tmp_path / "asked", tmp_path / "done"
    console = tmp_path / "console"  # no pipe: who is stuck would keep it open
    mount.mkdir()
    command = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(tmp_path / "run"), *flags]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", "--shutdown-timeout", "1"]
    with hanging_mount(mount) as is_asked, console.open("w") as output:
        threading.Thread(target=lambda: is_asked.wait(60) and asked.touch(), daemon=True).start()
        job = subprocess.run(
            [*command, str(JOB), str(mount / "file"), str(asked), str(done)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=200,
            env={**os.environ, "OMP_NUM_THREADS": "1", "KEEPSTEP_LEAVE_S": "2"},
            check=False,
        )
    said = console.read_text()
    assert job.returncode == 0, said
    assert len(re.findall(r"rank 1 \(process \d+\) is stuck in the kernel, even when killed", said)) == 1, (
        said
    )
    assert ("rank 1 does not leave its training: it is ended" in said) == bool(flags), said
    assert [int(step) for step in done.read_text().split()][-1] == 5
