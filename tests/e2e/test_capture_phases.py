"""Phases of a real training process, its death, and what an import costs that is not watched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import keepstep
from keepstep import ring
from keepstep.core.events import Flag, Kind, Phase

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("capture_phases")]

JOB = Path(__file__).with_name("capture_phases_job.py")


def run(job: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP")}
    return subprocess.run(
        [sys.executable, str(job)], env=clean | environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, list[str], str, Path]:
    """Records, sites, stderr and error file of the watched job."""
    folder = tmp_path_factory.mktemp("phases")
    descriptor = ring.create(4096)
    error_file = folder / "error.json"
    ended = run(
        JOB,
        {
            "KEEPSTEP_RUN_DIR": str(folder),
            "KEEPSTEP_RING": f"/proc/{os.getpid()}/fd/{descriptor}",
            "TORCHELASTIC_ERROR_FILE": str(error_file),
        },
    )
    assert ended.returncode == 1
    reader = ring.RingReader(descriptor)
    os.close(descriptor)
    return reader.snapshot(), reader.sites(), ended.stderr, error_file


def test_each_phase_is_counted_once(watched: tuple[np.ndarray, list[str], str, Path]) -> None:
    records, sites, stderr, _ = watched
    assert (records["kind"] == Kind.PHASE).all()
    found = Counter(Phase(int(op)) for op in records["op"])
    del found[Phase.GC]  # the interpreter collects also on its way out
    assert found == {
        Phase.DATA: 3 + 2,
        Phase.EVALUATION: 3,
        Phase.CHECKPOINT: 3,
        Phase.BACKWARD: 2 + 3 + 1 + 1 + 1 + 1,
        Phase.OPTIMIZER: 3 + 3 + 1 + 2 + 1 + 1,
    }, stderr
    assert not [site for site in sites if site.startswith("keepstep:")]


def test_phases_end_and_lie_in_each_other(watched: tuple[np.ndarray, list[str], str, Path]) -> None:
    records = watched[0]
    done = records[records["op"] != Phase.GC]
    assert (done["end_ns"] >= done["start_ns"]).all()
    failed = done[(done["flags"] & Flag.FAILED) != 0]
    assert [Phase(int(op)) for op in failed["op"]] == [Phase.OPTIMIZER] * 2
    evaluations = done[done["op"] == Phase.EVALUATION]
    data = done[done["op"] == Phase.DATA]
    inside = (data["start_ns"] > evaluations[0]["start_ns"]) & (data["end_ns"] < evaluations[0]["end_ns"])
    assert inside.sum() == 2
    assert records[records["op"] == Phase.GC].size >= 1


def test_the_reason_of_death_is_left(watched: tuple[np.ndarray, list[str], str, Path]) -> None:
    _, _, stderr, error_file = watched
    assert stderr.rstrip().endswith("RuntimeError: the end")
    frames = re.findall(r'^  File "(.*)", line', stderr, re.MULTILINE)
    assert frames
    assert not [frame for frame in frames if Path(frame).is_relative_to(Path(keepstep.__file__).parent)]
    left = json.loads(error_file.read_text())["message"]
    assert left["message"] == "RuntimeError: the end"
    assert "capture_phases_job.py" in left["extraInfo"]["py_callstack"]


def test_unwatched_the_script_sees_torch_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "ours = [name for name in sys.modules if name.startswith('keepstep')]\n"
        "assert set(ours) <= {'keepstep', 'keepstep._autoload'}, ours\n"
        "assert torch.save.__module__ == 'torch.serialization'\n"
        "assert 'keepstep' not in torch.distributed.ProcessGroup.allreduce.__doc__\n"
    )
    ended = run(script, {})
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""


def test_whatever_is_broken_in_us_the_script_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nsys.modules['keepstep.capture'] = None\nimport torch\nprint(torch.ones(1).item())\n"
    )
    ended = run(script, {"KEEPSTEP_RUN_DIR": str(tmp_path), "KEEPSTEP_RING": "7"})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "1.0\n"
    assert ended.stderr.count("trains unwatched") == 1


def test_a_ring_that_cannot_be_opened_in_an_optimizer_step_does_not_break_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        "print('trained')\n"
    )
    ended = run(script, {"KEEPSTEP_RUN_DIR": str(tmp_path), "KEEPSTEP_RING": "/nowhere/ring"})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "trained\n"
    assert ended.stderr.count("trains unwatched") == 1
