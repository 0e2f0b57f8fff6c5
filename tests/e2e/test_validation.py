"""Validation of a real 4-rank training: held, tested, released, and not a bit of it changed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e import testbed as beds

from keepstep.faults import SlowLink, parse

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples" / "gpt" / "train.py"
SHAPE = ("--dp", "2", "--pp", "2", "--layers", "2", "--microbatches", "2", "--batch", "4")
EMULATED = ("--emulate-compute-ms", "20")

pytestmark = pytest.mark.e2e

PATIENCE_S = 200
STEPS = 80  # enough for a command that takes long to start


class Run:
    """A training under ``keepstep run``, 4 ranks."""

    def __init__(self, folder: Path, *script: str, environ: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder), "--nproc-per-node", "4",
             str(TRAIN), *SHAPE, *EMULATED, *script],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environ or {})},
        )  # fmt: skip

    def finish(self) -> tuple[str, str]:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, err
        assert until(lambda: not self.left())
        return out, err

    def left(self) -> list[psutil.Process]:
        return [
            p
            for p in psutil.process_iter(["cmdline"])
            if str(self.folder) in " ".join(p.info["cmdline"] or ())
        ]

    def steps(self) -> int:
        log = self.folder / "nodes/0/iterations.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def program(self, module: str) -> int:
        (found,) = [p.pid for p in self.left() if module in (p.info["cmdline"] or ())]
        return found

    def validate(self, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "keepstep.cli", "validate", str(self.folder), *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def incidents(self) -> list[dict[str, Any]]:
        return [
            json.loads(path.read_bytes()) for path in sorted((self.folder / "incidents").glob("[0-9]*.json"))
        ]


def until(what: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.02)
    return found


def losses(run: Run) -> dict[int, list[float | None]]:
    """Every rank's own loss of every step, to the last bit."""
    return {
        rank: [json.loads(line)["loss"] for line in (run.folder / f"times-{rank}").read_text().splitlines()]
        for rank in range(4)
    }


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(steps: int, *script: str, environ: dict[str, str] | None = None) -> Run:
        folder = tmp_path / f"run{len(runs)}"
        told = ("--steps", str(steps), "--step-times", str(folder / "times-{rank}"))
        runs.append(Run(folder, *told, *script, environ=environ))
        return runs[-1]

    yield begin
    for run in runs:
        run.process.kill()
        run.process.communicate()
        until(lambda run=run: not run.left())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float | None]]:
    """The losses of a training that nobody held."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    run = Run(folder, "--steps", str(STEPS), "--step-times", str(folder / "times-{rank}"))
    run.finish()
    return losses(run)


def test_a_validation_in_between_changes_no_bit(
    start: Callable[..., Run], expected: dict[int, list[float | None]]
) -> None:
    run = start(STEPS)
    until(lambda: run.steps() > 12)
    answer = run.validate("--json", "--hold", "20")
    assert answer.returncode in (0, 1), answer.stderr
    outcome = json.loads(answer.stdout)
    _, err = run.finish()
    assert losses(run) == expected
    assert any(loss is not None for loss in expected[3])
    assert [one["rank"] for one in outcome["figures"]] == [0, 1, 2, 3]
    # What a busy machine adds to an outcome is no part of this test.
    assert [line for line in outcome["missing"] if "other processes had its core" not in line] == []
    assert all(one["devices"] for one in outcome["figures"])
    links = {(link["source"], link["target"]) for one in outcome["figures"] for link in one["links"]}
    assert {(0, 1), (1, 2), (2, 3), (3, 0)} <= links
    assert not re.search(r"HANG|DESYNC|CRASH", err)
    assert {one["kind"] for one in run.incidents()} <= {"slow"}  # as other tests make the machine
    lines = (run.folder / "nodes/0/iterations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(STEPS))
    ended = run.validate()
    assert ended.returncode == 2
    assert "only a running job can be validated" in ended.stderr


def custom_test(folder: Path, body: str) -> dict[str, str]:
    """A device test of the user's own, installed by its entry point; ``body`` may use ``rank``. The environment."""
    package = folder / "extra"
    information = package / "extra-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[keepstep.validate_tests]\nextra = extra_device:test\n")
    lines = "import os, pathlib, time\nrank = int(os.environ['RANK'])\n\n\ndef test(device):\n"
    (package / "extra_device.py").write_text(lines + textwrap.indent(textwrap.dedent(body), "    "))
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))}


@pytest.mark.parametrize(
    "module", ["keepstep.control", pytest.param("keepstep.agent", marks=pytest.mark.long)]
)
def test_a_slow_device_is_told_and_when_who_holds_the_job_dies_the_training_is_unharmed(
    start: Callable[..., Run], expected: dict[int, list[float | None]], tmp_path: Path, module: str
) -> None:
    waits = tmp_path / "waits"
    mark = f"pathlib.Path({str(tmp_path)!r}, f'testing-{{rank}}').touch()"
    body = f"if os.path.exists({str(waits)!r}): {mark}; time.sleep(2)\nreturn 1.0 if rank == 2 else 2.0\n"
    run = start(STEPS, environ=custom_test(tmp_path, body))
    until(lambda: run.steps() > 12)
    answer = run.validate()
    assert answer.returncode == 1, answer.stderr
    assert re.search(r"^2 .* extra .* slow$", answer.stdout, re.MULTILINE), answer.stdout
    waits.touch()
    command = [sys.executable, "-m", "keepstep.cli", "validate", str(run.folder)]
    asking = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: all((tmp_path / f"testing-{rank}").exists() for rank in range(4)))
        os.kill(run.program(module), signal.SIGKILL)
        _, told = asking.communicate(timeout=PATIENCE_S)
        assert ("the controller went away" in told) is (module == "keepstep.control")
        _, err = run.finish()
    finally:
        asking.kill()
        asking.communicate()
    assert losses(run) == expected
    assert not re.search(r"HANG|CRASH", err)


@pytest.mark.quiet
@pytest.mark.long
def test_a_slowdown_that_profiles_do_not_explain_is_validated_by_itself(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    faults = [
        word for rank in range(4) for word in ("--fault", f"slow rank {rank} by 2x at step 20 for 60 steps")
    ]
    run = start(70, *faults, environ=custom_test(tmp_path, "return 1.0 if rank == 2 else 2.0"))
    run.finish()
    (incident,) = run.incidents()
    assert [(culprit["rank"], culprit["cause"]) for culprit in incident["culprits"]] == [(2, "device")]
    assert incident["evidence"][0].startswith("validation (")


@pytest.mark.quiet
@pytest.mark.long
@pytest.mark.root
def test_a_slow_link_between_hosts_is_named(tmp_path: Path) -> None:
    if beds.missing():
        pytest.skip(beds.missing())
    folder = tmp_path / "run"
    run = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder), "--nnodes", "4"]
    meet = ["--master-addr", "node-a", "--master-port", "29511", "--nproc-per-node", "1"]
    script = [str(TRAIN), "--dp", "4", "--layers", "1", "--dim", "32", "--steps", "400", *EMULATED]
    with beds.four_hosts(rate="400mbit") as bed:
        hosts = list(bed.hosts.values())
        jobs = [
            host.start([*run, "--node-rank", str(number), *meet, *script])
            for number, host in enumerate(hosts)
        ]
        log = folder / "nodes/0/iterations.jsonl"
        until(lambda: log.exists() and len(log.read_text().splitlines()) > 12)
        (fault,) = parse("slow link from node-b to node-c to 40mbit")
        assert isinstance(fault, SlowLink)
        with bed.links.inject(fault):
            asking = hosts[0].start(
                [sys.executable, "-m", "keepstep.cli", "validate", str(folder), "--json", "--hold", "20"]
            )
            answer = beds.collect({"asking": asking}, PATIENCE_S)["asking"]
        for job in jobs:
            assert job.poll() is None
    assert answer.returncode == 1, answer.stderr
    outcome = json.loads(answer.stdout)
    assert {(link["source"], link["target"]) for link in outcome["links"]} == {(1, 2)}
    assert outcome["devices"] == []
