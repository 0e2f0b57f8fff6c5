"""`keepstep ctl` on a running job: suspended and resumed it gives the very losses; stopped, a code of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

JOB = Path(__file__).with_name("standby_train.py")
STEPS = 250
PATIENCE_S = 700


class Run:
    """One job of two ranks on this machine."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self.folder = folder
        folder.mkdir()
        self.out = (folder / "said").open("w")
        command = [
            sys.executable,
            "-m",
            "keepstep.cli",
            "run",
            "--run-dir",
            str(folder / "run"),
            "--no-validate",
        ]
        command += ["--max-restarts", "1", "--standbys", "0", "--nproc-per-node", "2"]
        self.process = subprocess.Popen(
            [*command, str(JOB), str(folder), str(STEPS), ""],
            env={**os.environ, "OMP_NUM_THREADS": "1", "STEP_S": str(step_s)},
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=subprocess.STDOUT,
        )

    def ctl(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "keepstep.cli", "ctl", str(self.folder / "run"), *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        return done.returncode, done.stdout + done.stderr

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def steps(self) -> int:
        log = self.folder / "losses-1"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def state(self) -> str:
        return str(json.loads((self.folder / "run" / "status.json").read_bytes())["state"])

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, self.said
            assert self.process.poll() is None, self.said
            time.sleep(0.05)

    def losses(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for rank in range(2):
            for line in (self.folder / f"losses-{rank}").read_text().splitlines():
                step, loss = line.split()
                found.setdefault(f"{rank}/{step}", set()).add(loss)
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its guard ends what it started
            self.process.wait()
        self.out.close()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(name: str, step_s: float = 0.2) -> Run:
        made.append(Run(tmp_path / name, step_s))
        return made[-1]

    yield make
    for run in made:
        run.end()


@pytest.mark.long
def test_a_job_that_is_suspended_and_resumed_gives_the_very_losses(runs: Callable[..., Run]) -> None:
    run = runs("run")
    run.until(lambda: run.steps() > 5)
    code, told = run.ctl("suspend")
    assert code == 0, told
    assert "suspended after step" in told
    made = run.steps()
    assert made < STEPS
    run.until(lambda: run.state() == "suspended")
    assert run.steps() == made
    code, told = run.ctl("suspend")
    assert (code, "it is suspended already" in told) == (2, True)
    assert run.ctl("resume")[0] == 0
    assert run.process.wait(PATIENCE_S) == 0, run.said
    found = run.losses()
    assert found.keys() == {f"{rank}/{step}" for rank in range(2) for step in range(STEPS)}
    assert all(len(losses) == 1 for losses in found.values())
    assert "restart 1" not in run.said
    undisturbed = runs("undisturbed", 0.0)
    assert undisturbed.process.wait(PATIENCE_S) == 0, undisturbed.said
    assert found == undisturbed.losses()


def test_a_stopped_job_says_so_and_ends_with_its_own_code(runs: Callable[..., Run]) -> None:
    run = runs("run")
    run.until(lambda: run.steps() > 1)
    assert run.ctl("stop") == (0, f"{run.folder / 'run'}: the job ends\n")
    assert run.process.wait(PATIENCE_S) == 79, run.said
    assert "the job was ended: stopped by an operator" in run.said
    assert json.loads((run.folder / "run" / "end.json").read_text())["exit_code"] == 79
    code, told = run.ctl("resume")
    assert (code, "the run has ended or is not watched; only a running job takes orders" in told) == (2, True)
