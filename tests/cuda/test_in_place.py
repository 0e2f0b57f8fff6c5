"""Trainings that go on in their processes on NCCL, behind a gate that keeps aborted collectives from their steps."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from benchmarks.stand_in.faults import Fault, Phase
from benchmarks.stand_in.launch import ROOT, run, start

SESSION = ROOT / "benchmarks/stand_in/jobs/session.py"
GATE = Path(__file__).with_name("gate_job.py")
STEPS, AT = 30, 12


@pytest.mark.parametrize("kind", ["gated", pytest.param("left", marks=pytest.mark.long), "open"])
def test_only_without_a_gate_an_aborted_collective_feeds_the_step_behind_it(
    tmp_path: Path, kind: str
) -> None:
    done = run(
        GATE,
        [kind, str(tmp_path)],
        tmp_path,
        ranks=2,
        values=True,
        settings={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
    )
    assert done.exit_code == 0, done.console
    assert json.loads((tmp_path / "fed").read_text()) == {"before": kind == "open", "after": True}


def losses(folder: Path) -> list[dict[int, set[str]]]:
    """Of each rank the losses of each step that it noted."""
    found: list[dict[int, set[str]]] = []
    for rank in range(2):
        steps: dict[int, set[str]] = {}
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss, _ = line.split()
            steps.setdefault(int(step), set()).add(loss)
        found.append(steps)
    return found


@pytest.mark.parametrize(
    ("phase", "abort"),
    [
        ("optimizer", "quick"),
        pytest.param("backward", "stream", marks=pytest.mark.long),
        pytest.param("optimizer", "never", marks=pytest.mark.long),
        ("backward", "late"),
    ],
)
def test_when_a_rank_dies_the_other_goes_on_in_its_process_and_no_loss_changes(
    tmp_path: Path, phase: Phase, abort: str
) -> None:
    plain = tmp_path / "plain"
    done = run(SESSION, [str(STEPS), str(plain)], plain, ranks=2, values=True)
    assert done.exit_code == 0, done.console
    folder, settings = tmp_path / "hurt", {"WAIT_AT": str(AT - 2), "STAND_IN_ABORT": abort}
    if abort == "late":  # the training is left while its host sleeps, long before the abort
        settings |= {"STAND_IN_ABORT": "quick", "ABORT_LATE_S": "0.7", "PAUSE_S": "0.3"}
    flags = ("--max-restarts", "2", "--in-place", "--verbose")
    settings["KEEPSTEP_STANDBY_IDLE_S"] = "0.5"
    faults = [Fault("die", rank=1, step=AT, where=phase)]
    with start(SESSION, [str(STEPS), str(folder)], folder, ranks=2, flags=flags, faults=faults, values=True,
               settings=settings) as job:  # fmt: skip
        until_s = time.monotonic() + 200
        while "standbys are warm" not in job.console() and time.monotonic() < until_s:
            assert not job.is_over(), job.console()
            time.sleep(0.05)
        (folder / "go").touch()
        done = job.finish(200)
    assert done.exit_code == 0, done.console
    assert re.search(r"training again .* \(ended \S+, standbys ", done.console), done.console
    told = [json.loads(one.read_bytes()) for one in (folder / "run/incidents").glob("*.json")]
    (incident,) = [one for one in told if one["kind"] == "crash"]
    assert incident["recovery"]["survived"] == (abort != "never"), done.console
    for hurt, whole in zip(losses(folder), losses(plain), strict=True):
        assert set(whole) == set(range(STEPS))
        assert {step: whole[step] for step in hurt} == hurt
