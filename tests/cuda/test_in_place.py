"""Trainings that go on in their processes on NCCL, behind a gate that keeps aborted collectives from their steps."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.stand_in.faults import Fault, Phase
from benchmarks.stand_in.launch import ROOT, Done, run, start

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
    late = {"late": True, "renewed": False} if kind == "gated" else {}
    assert json.loads((tmp_path / "fed").read_text()) == {"before": kind == "open", "after": True, **late}


def losses(folder: Path) -> list[dict[int, set[str]]]:
    """Of each rank the losses of each step that it noted."""
    found: list[dict[int, set[str]]] = []
    for rank in range(2):
        steps: dict[int, set[str]] = {}
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss, _, _ = line.split()
            steps.setdefault(int(step), set()).add(loss)
        found.append(steps)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, set[str]]]:
    """The losses of a training to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run(SESSION, [str(STEPS), str(folder)], folder, ranks=2, values=True)
    assert done.exit_code == 0, done.console
    return losses(folder)


def hurt(
    where: Path,
    settings: Mapping[str, str],
    undisturbed: list[dict[int, set[str]]],
    phase: Phase = "optimizer",
) -> tuple[Done, dict[str, Any]]:
    """A training of which rank 1 is killed in a step while the device is behind; and the incident.

    The losses of all steps are those of an undisturbed one.
    """
    flags = ("--max-restarts", "2", "--in-place", "--verbose")
    leave_s = "3" if settings.get("STAND_IN_ABORT") == "never" else "60"
    more = {"WAIT_AT": str(AT - 2), "KEEPSTEP_STANDBY_IDLE_S": "0.5", "KEEPSTEP_LEAVE_S": leave_s, **settings}
    faults = [Fault("die", rank=1, step=AT, where=phase)]
    with start(SESSION, [str(STEPS), str(where)], where, ranks=2, flags=flags, faults=faults, values=True,
               settings=more) as job:  # fmt: skip
        until_s = time.monotonic() + 200
        while "standbys are warm" not in job.console() and time.monotonic() < until_s:
            assert not job.is_over(), job.console()
            time.sleep(0.05)
        (where / "go").touch()
        done = job.finish(200)
    assert done.exit_code == 0, done.console
    assert re.search(r"training again .* \(ended \S+, standbys ", done.console), done.console
    for noted, whole in zip(losses(where), undisturbed, strict=True):
        assert set(whole) == set(range(STEPS))
        assert {step: whole[step] for step in noted} == noted
    incidents = [json.loads(one.read_bytes()) for one in (where / "run/incidents").glob("*.json")]
    (incident,) = [one for one in incidents if one["kind"] == "crash"]
    return done, incident


@pytest.mark.parametrize(
    ("phase", "abort"),
    [
        ("optimizer", "quick"),
        pytest.param("backward", "stream", marks=pytest.mark.long),
        pytest.param("optimizer", "never", marks=pytest.mark.long),
        pytest.param("backward", "late", marks=pytest.mark.long),
    ],
)
def test_when_a_rank_dies_the_other_goes_on_in_its_process_and_no_loss_changes(
    tmp_path: Path, undisturbed: list[dict[int, set[str]]], phase: Phase, abort: str
) -> None:
    settings = {"STAND_IN_ABORT": abort}
    if abort == "late":  # the training is left while its host sleeps, long before the abort
        settings = {"STAND_IN_ABORT": "quick", "ABORT_LATE_S": "0.7", "PAUSE_S": "0.3"}
    done, incident = hurt(tmp_path, settings, undisturbed, phase)
    assert incident["recovery"]["survived"] == (abort != "never"), done.console
    assert done.console.count("rank 0 does not leave its training: it is ended") == (abort == "never")


SMALL = {"STAND_IN_MEMORY_GB": "1", "HELD": "1"}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        pytest.param(
            # Torch's own watchdog would end the process, where it is the first to abort.
            {"STAND_IN_ABORT": "fails", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
            "its operations on the GPU cannot be ended: ",
            id="no-abort",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"MORE": "fake"},
            "groups of fake are made again in a fresh process",
            id="backend",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {**SMALL, "BALLAST_GB": "0.6"},
            "something outside the training still holds 0.60 GiB of its GPU's memory, of which 0.40 GiB is left",
            id="held",
            marks=pytest.mark.long,
        ),
        pytest.param({**SMALL, "BALLAST_GB": "0.3"}, "", id="held-fits", marks=pytest.mark.long),
        pytest.param({"GATE": "unopened"}, "", id="unopened", marks=pytest.mark.long),
    ],
)
def test_where_the_other_cannot_stay_a_standby_takes_over_and_it_is_said_why(
    tmp_path: Path, undisturbed: list[dict[int, set[str]]], settings: Mapping[str, str], line: str
) -> None:
    done, incident = hurt(tmp_path, settings, undisturbed)
    assert incident["recovery"]["survived"] == (not line), done.console
    told = [one for one in done.console.splitlines() if "begins anew in another process: " in one]
    assert len(told) == bool(line), done.console
    if line:
        assert told[0].startswith(f"keepstep: rank 0 begins anew in another process: {line}"), told
