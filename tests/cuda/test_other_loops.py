"""Trainings that are made otherwise than by DDP and one optimizer recover as well: ``loops_job.py`` has them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from benchmarks.stand_in.faults import Fault
from benchmarks.stand_in.launch import run, start

JOB = Path(__file__).with_name("loops_job.py")
STEPS, AT = 20, 12


def losses(folder: Path) -> list[dict[int, set[str]]]:
    """Of each rank the losses of each step, over all times that it was made."""
    found: list[dict[int, set[str]]] = [{}, {}]
    for rank, steps in enumerate(found):
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss = line.split()
            steps.setdefault(int(step), set()).add(loss)
    return found


@pytest.mark.parametrize("kind", ["tp", pytest.param("backward", marks=pytest.mark.long), "own"])
def test_a_training_of_another_kind_recovers_and_no_loss_changes(tmp_path: Path, kind: str) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "go").touch()
    done = run(JOB, [kind, str(whole), str(STEPS)], whole, ranks=2, values=True, flags=("--no-validate",))
    assert done.exit_code == 0, done.console
    flags = ("--max-restarts", "2", "--in-place", "--verbose", "--no-validate")
    faults = [Fault("die", rank=1, step=AT, where="backward")]
    more = {"KEEPSTEP_STANDBY_IDLE_S": "0.5", "KEEPSTEP_LEAVE_S": "60"}
    with start(
        JOB, [kind, str(tmp_path), str(STEPS)], tmp_path, ranks=2, flags=flags, faults=faults, values=True,
        settings=more,
    ) as job:  # fmt: skip
        until_s = time.monotonic() + 200
        while "standbys are warm" not in job.console() and time.monotonic() < until_s:
            assert not job.is_over(), job.console()
            time.sleep(0.05)
        (tmp_path / "go").touch()
        done = job.finish(200)
    assert done.exit_code == 0, done.console
    assert losses(tmp_path) == losses(whole)
    incidents = [json.loads(one.read_bytes()) for one in (tmp_path / "run/incidents").glob("*.json")]
    (crash,) = [one for one in incidents if one["kind"] == "crash"]
    assert crash["recovery"]["survived"] == (kind != "own"), done.console
    assert crash["onset_step"] in (AT, AT + 1), crash
    assert "training again" in done.console
    told = "its newest step on the GPU was behind no gate, as without an optimizer of torch.optim"
    assert done.console.count(told) == (kind == "own"), done.console
    for never in ("never saved", "Do all ranks save the same steps"):
        assert never not in done.console
