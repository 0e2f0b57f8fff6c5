"""Recorded hangs replayed into rings: the agents and the controller of a live job name whom ``analyze`` names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.recorded.replayed_job import ReplayedJob

from keepstep.analyze import analyze
from keepstep.core.incident import Incident
from keepstep.traces.plain_data import read_pickle

H100 = Path(__file__).parent / "h100"
SAMPLES = Path(os.environ.get("KEEPSTEP_SAMPLES", "/nonexistent")) / "flight_recorder"
with_samples = pytest.mark.skipif(not SAMPLES.exists(), reason="KEEPSTEP_SAMPLES names no folder with dumps")
INJECTED = {9, 14}


def load(folder: Path) -> dict[int, dict[str, Any]]:
    files = [path for path in folder.iterdir() if "dump" in path.name or "trace" in path.name]
    return {int(path.name.rsplit("_", 1)[1]): read_pickle(path.read_bytes()) for path in files}


def live(folder: Path, into: Path, patch: pytest.MonkeyPatch, **how: Any) -> tuple[Incident, float]:
    """The incident, and how many seconds the ranks had stood still when it was told."""
    with ReplayedJob(load(folder), into, patch, **how) as job:
        job.train()
        job.call()
        job.stand_still()
        (incident,) = job.incidents.values()
        return incident, job.first_s


def blamed(incident: Incident) -> set[int | None]:
    return {culprit.rank for culprit in incident.culprits}


def alike(one: Incident, other: Incident) -> bool:
    """Whether two incidents have the same kind, culprits and victims."""
    return (one.kind, blamed(one), set(one.victims)) == (other.kind, blamed(other), set(other.victims))


@pytest.mark.parametrize("case", ["asleep_before_backward", "asleep_host_waits", "barrier_of_one_rank"])
def test_hangs_of_a_gpu_are_told_as_analyze_tells_them(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incident, _ = live(H100 / case, tmp_path, monkeypatch)
    (offline,) = analyze(H100 / case).incidents
    assert alike(incident, offline), (incident, offline)


@with_samples
@pytest.mark.parametrize("recorder", [True, False])
@pytest.mark.parametrize(("sample", "mute"), [("gpu_error_2nd", ()), ("lock_gil_1st", INJECTED)])
def test_the_injected_ranks_are_named_live_as_well(
    sample: str, mute: set[int], recorder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks whose interpreter was held had empty dumps: live, they do not answer. Without answers counts alone tell."""
    how = {"mute": frozenset(mute), "recorder": recorder}
    incident, stood_s = live(SAMPLES / sample, tmp_path, monkeypatch, **how)
    (offline,) = analyze(SAMPLES / sample).incidents
    assert alike(incident, offline), (incident, offline)
    assert blamed(incident) == INJECTED
    assert stood_s < 45
