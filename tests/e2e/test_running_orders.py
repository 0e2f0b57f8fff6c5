"""`keepstep ctl` on a job that goes on training: thresholds, watching off and on, traces, a step on storage."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

JOB = Path(__file__).with_name("running_train.py")
PATIENCE_S = 240


class Run:
    """One job on this machine, which trains until it is told to end."""

    def __init__(self, folder: Path, does: tuple[str, ...], flags: tuple[str, ...], ranks: int) -> None:
        self.folder, self.run = folder, folder / "run"
        folder.mkdir()
        self.out = (folder / "said").open("w")
        command = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(self.run), "--no-check"]
        command += ["--standbys", "0", "--nproc-per-node", str(ranks), *flags, str(JOB), str(folder), *does]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=subprocess.STDOUT,
        )

    def ctl(self, *words: str) -> tuple[int, str]:
        return self.keepstep("ctl", str(self.run), *words)

    def keepstep(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "keepstep.cli", *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        return done.returncode, done.stdout + done.stderr

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    @property
    def step(self) -> int:
        path = self.folder / "steps-0"
        return int((path.read_text() or "0") if path.exists() else 0)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, self.said
            assert self.process.poll() is None, self.said
            time.sleep(0.05)

    def steps(self, count: int) -> None:
        target = self.step + count
        self.until(lambda: self.step >= target)

    def incidents(self) -> list[dict[str, Any]]:
        return [
            json.loads(path.read_bytes()) for path in sorted((self.run / "incidents").glob("[0-9]*.json"))
        ]

    @property
    def newest_step(self) -> int:
        """As the controller knows it; -1 before it is there."""
        return self.status()["newest_step"] if (self.run / "status.json").exists() else -1

    def status(self) -> dict[str, Any]:
        return json.loads((self.run / "status.json").read_bytes())

    def ends(self) -> int:
        (self.folder / "end").touch()
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its guard ends what it started
            self.process.wait()
        self.out.close()


Make = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Run] = []

    def one(*does: str, flags: tuple[str, ...] = (), ranks: int = 2) -> Run:
        made.append(Run(tmp_path / f"job-{len(made)}", does, flags, ranks))
        made[-1].until(lambda: made[-1].newest_step > 8)
        return made[-1]

    yield one
    for run in made:
        run.close()


def controller_of(run: Run) -> int:
    return next(
        one.pid
        for one in psutil.process_iter(["cmdline"])
        if {"keepstep.control", str(run.run)} <= set(one.info["cmdline"] or ())
    )


def worker_of(run: Run, rank: int) -> int:
    return next(
        one.pid
        for one in psutil.process_iter(["cmdline"])
        if {str(JOB), str(run.folder)} <= set(one.info["cmdline"] or ())
        and one.environ().get("RANK") == str(rank)
    )


def test_traces_of_two_ranks_lie_in_the_runs_folder(make: Make, tmp_path: Path) -> None:
    run = make(ranks=3)
    code, told = run.ctl("profile", "--ranks", "0,2", "--steps", "2", "--dry-run")
    assert (code, "would trace 2 steps of ranks 0,2" in told) == (0, True), told
    assert not (run.run / "traces").exists()
    code, told = run.ctl("profile", "--ranks", "0,2", "--steps", "2")
    assert code == 0, told + run.said
    names = sorted(path.name for path in (run.run / "traces").iterdir())
    assert [name[:11] for name in names] == ["rank-00000-", "rank-00002-"]
    trace = json.loads(gzip.decompress((run.run / "traces" / names[0]).read_bytes()))
    assert [one.get("name") for one in trace["traceEvents"]].count("aten::linear") == 2
    copy = tmp_path / "copy.json.gz"
    code, told = run.ctl("profile", "--ranks", "1", "--steps", "1", "-o", str(copy))
    assert code == 0, told
    assert copy.read_bytes()[:2] == b"\x1f\x8b"
    for words, why in (
        (("--ranks", "9"), "there is no rank 9; the job has 0-2"),
        (("--ranks", "0-99"), "give 1 to 16 ranks of the job"),
        (("--ranks", "9" * 5000), "give 1 to 16 ranks of the job"),
        (("--ranks", "0", "--steps", "51"), "51 is not between 1 and 50"),
    ):
        code, told = run.ctl("profile", *words)
        assert (code, len(told.splitlines())) == (2, 1), told
        assert why in told
    run.steps(10)
    assert run.incidents() == []
    assert run.ends() == 0, run.said


@pytest.mark.long
def test_a_script_that_uses_the_profiler_keeps_it(make: Make) -> None:
    run = make("profiles")
    code, told = run.ctl("profile", "--ranks", "0")
    assert code == 1, told
    assert "rank 0: no trace: the script uses torch's profiler itself" in told
    assert run.ends() == 0, run.said


def test_a_rank_that_dies_while_it_is_traced(make: Make) -> None:
    run = make(flags=("--max-restarts", "1"))
    order = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "keepstep.cli",
            "ctl",
            str(run.run),
            "profile",
            "--ranks",
            "1",
            "--steps",
            "50",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log = run.run / "controller.log"
    run.until(lambda: "trace" in log.read_text())
    run.steps(3)
    os.kill(worker_of(run, 1), signal.SIGKILL)
    told, _ = order.communicate(timeout=PATIENCE_S)
    assert order.returncode in (1, 2), told
    assert len(told.splitlines()) == 1, told
    run.steps(5)
    assert run.ends() == 0, run.said


def test_nothing_is_told_while_watching_is_off_and_slowness_that_lasts_is_told_after(make: Make) -> None:
    run = make()
    run.steps(30)
    assert run.ctl("watch", "off", "--dry-run")[0] == 0
    code, told = run.ctl("watch", "off")
    assert (code, "watching is off" in told) == (0, True), told
    before = {one["number"] for one in run.incidents()}  # none, but on a machine that is busy

    def told_since() -> list[dict[str, Any]]:
        return [one for one in run.incidents() if one["number"] not in before]

    (run.folder / "slow").touch()
    run.steps(25)
    (run.folder / "stand").touch()
    time.sleep(4.0)  # over the limit of a second that such a standstill has
    (run.folder / "stand").unlink()
    run.steps(5)
    assert told_since() == []
    run.until(lambda: run.status()["unwatched_since_unix_s"] > 0)
    assert "watching off since" in run.keepstep("status", str(run.run))[1]
    # The order outlives the controller.
    os.kill(controller_of(run), signal.SIGKILL)
    code, told = run.ctl("watch", "off")
    assert (code, "it has not been watched since" in told) == (2, True), told
    run.steps(10)
    assert told_since() == []
    code, told = run.ctl("watch", "on")
    assert code == 0, told
    run.until(lambda: bool(told_since()))
    assert [(one["kind"], [who["rank"] for who in one["culprits"]]) for one in told_since()] == [
        ("slow", [1])
    ]
    assert "watching off" not in run.keepstep("status", str(run.run))[1]
    (run.folder / "slow").unlink()
    assert run.ends() == 0, run.said


def test_thresholds_are_shown_changed_kept_and_taken_back(make: Make) -> None:
    run = make(flags=("--mitigate", "advise"))
    code, told = run.ctl("thresholds")
    assert code == 0, told
    rows = {line.split()[0]: line.split()[1:3] for line in told.splitlines()}
    assert rows["mitigate"] == ["advise", "flag"]
    assert rows["hang-after"] == ["0", "default"]
    code, told = run.ctl("thresholds", "hang-after=300", "mitigate=off")
    assert (code, "changed: mitigate advise → off, hang-after 0 → 300" in told) == (0, True), told
    assert "hang-after 0 → 300" in (run.run / "controller.log").read_text()
    os.kill(controller_of(run), signal.SIGKILL)
    code, told = run.ctl("thresholds")
    assert (code, "order, was advise" in told) == (0, True), told
    code, told = run.ctl("thresholds", "--default")
    assert (code, "hang-after 300 → 0" in told) == (0, True), told
    assert run.ctl("thresholds", "mitigate=never")[0] == 2
    assert run.ends() == 0, run.said


def test_a_step_is_on_storage_when_the_order_returns(make: Make, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    run = make("save", flags=("--checkpoint-dir", str(storage), "--checkpoint-every", "0"))
    code, told = run.ctl("checkpoint", "now", "--dry-run")
    assert (code, "would go to storage; nothing was done" in told) == (0, True), told
    code, told = run.ctl("checkpoint", "now")
    assert (code, "is on storage" in told) == (0, True), told + run.said
    step = int(told.split("step ")[1].split()[0])
    listed = run.keepstep("checkpoint", "list", str(storage))[1]
    assert str(step) in listed
    assert run.ctl("checkpoint")[0] == 0
    assert run.ends() == 0, run.said


@pytest.mark.long
def test_a_job_that_saves_nothing_or_has_no_storage_says_what_it_needs(make: Make, tmp_path: Path) -> None:
    bare = make(flags=("--checkpoint-dir", str(tmp_path / "storage"), "--checkpoint-every", "0"))
    code, told = bare.ctl("checkpoint")
    assert (code, "the script has to use keepstep.Session or keepstep.checkpoint.save()" in told) == (
        2,
        True,
    ), told
    assert bare.ends() == 0, bare.said
    without = make("save")
    code, told = without.ctl("checkpoint")
    assert (code, "start the job with --checkpoint-dir" in told) == (2, True), told
    assert without.ends() == 0, without.said
    code, told = without.ctl("watch", "off")
    assert (code, len(told.splitlines())) == (2, 1), told
    assert "only a running job takes orders" in told
