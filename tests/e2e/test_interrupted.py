"""An interrupted job: to unwind is no relief of its hang, and the verdict names the group as before the restart."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(400)]

JOB = Path(__file__).with_name("interrupted_train.py")
PATIENCE_S = 240


def test_a_hang_that_is_interrupted_after_a_restart(tmp_path: Path) -> None:
    run, said = tmp_path / "run", tmp_path / "said"
    command = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(run), "--nproc-per-node", "2"]
    with said.open("w") as file:
        job = subprocess.Popen(
            [*command, "--max-restarts", "1", "--standbys", "0", str(JOB)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while "HANG " not in said.read_text():
            assert job.poll() is None, said.read_text()
            assert time.monotonic() < deadline_s, said.read_text()
            time.sleep(0.1)
        job.send_signal(signal.SIGINT)
        job.wait(PATIENCE_S)
    finally:
        job.kill()
        job.wait()
    text = said.read_text()
    assert re.search(r"HANG +step \d+  group 0 ALLREDUCE seq \d+", text), text
    assert re.search(r"culprit +rank 0 .*in forward", text), text
    assert not re.search(r"RELIEF.*\(hang", text), text
    incidents = [json.loads(path.read_bytes()) for path in sorted((run / "incidents").glob("[0-9]*.json"))]
    assert [(one["kind"], one["status"]) for one in incidents] == [("crash", "relieved"), ("hang", "ended")]
