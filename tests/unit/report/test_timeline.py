"""The timeline in the report of one incident."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from keepstep.core.incident import Action, Culprit, Event, Incident
from keepstep.report.incidents import incident_from_json, incident_to_json
from keepstep.report.timeline import rows
from keepstep.report.verdict import render, render_action
from keepstep.report.wording import accelerator_time, done

ONSET = 1_795_000_000.0
S2 = Action(
    "S2, micro-batches",
    0.0,
    "13 to replicas 0-2, 7 to replica 3",
    before_iteration_s=0.49,
    expected_iteration_s=0.31,
    measured_iteration_s=0.33,
    step=1240,
    begun_unix_s=ONSET + 12.4,
)
INCIDENT = Incident(
    number=4,
    kind="slow",
    onset_step=1215,
    detected_step=1217,
    relief_step=1980,
    job_slowdown=1.96,
    culprits=(Culprit(3, None, "gpu-1", "forward", 1.9, "high", "compute"),),
    victims=(0, 1, 2),
    evidence=(),
    missing=(),
    actions=(
        S2,
        Action(
            "S3, exchange of nodes",
            9.0,
            "a and b take each other's ranks",
            step=1300,
            begun_unix_s=ONSET + 130,
        ),
    ),
    status="relieved",
    iteration_before_s=0.25,
    iteration_after_s=0.49,
    world_size=4,
    detected_unix_s=ONSET + 1.9,
    closed_unix_s=ONSET + 4000,
    lost_s=30.0,
    saved_s=9000.0,
    onset_unix_s=ONSET,
    events=(
        Event("noticed", ONSET + 1.5, 1217),
        Event("verdict", ONSET + 1.9, 1217, "rank 3 gpu-1, compute, confidence medium"),
        Event(
            "validation",
            ONSET + 7.6,
            1228,
            "validation (ranks 0-3 held 3.1 s): rank 3 fp32 1 TFLOP/s against 2",
        ),
        Event("sharper", ONSET + 7.6, 1228, "rank 3 gpu-1, compute, confidence high"),
    ),
)


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_the_report_of_one_incident() -> None:
    assert render(INCIDENT, timeline=True).splitlines() == [
        "SLOW      step 1215  iteration 250 ms → 490 ms (×1.96)  seen at step 1217",
        "culprit   rank 3  gpu-1  compute ×1.9; in forward",
        "victims   ranks 0-2 waiting (3 of 4)",
        "evidence                                                                  confidence high",
        "timeline  from ≈ 2026-11-18 11:06:40 UTC",
        "               +0.0 s  step 1215  slow from here on",
        "               +1.5 s  step 1217  noticed",
        "               +1.9 s  step 1217  verdict: rank 3 gpu-1, compute, confidence medium",
        "               +7.6 s  step 1228  validation (ranks 0-3 held 3.1 s): rank 3 fp32 1 TFLOP/s against 2",
        "               +7.6 s  step 1228  sharper verdict: rank 3 gpu-1, compute, confidence high",
        "              +12.4 s  step 1240  S2, micro-batches: 13 to replicas 0-2, 7 to replica 3; "
        "expected 490 ms → 310 ms an",
        "                                  iteration, measured 330 ms",
        "          +2 min 10 s  step 1300  S3, exchange of nodes: a and b take each other's ranks; expected cost 9 s",
        "          +1 h 06 min  step 1980  over",
        "status    step 1980  over after 765 steps, 120 GPU-seconds lost, 10 GPU-hours saved",
        "next      keepstep report RUN 0004",
    ]


def test_without_a_timeline_actions_stand_by_themselves() -> None:
    text = render(INCIDENT)
    assert "timeline" not in text
    assert "action    S2, micro-batches: 13 to replicas 0-2, 7 to replica 3; expected 490 ms → 310 ms" in text


def test_an_open_slowdown_says_what_it_has_cost_so_far() -> None:
    lasting = replace(INCIDENT, status="open", relief_step=None, closed_unix_s=None)
    assert "status    open, 120 GPU-seconds lost, 10 GPU-hours saved so far" in render(lasting).splitlines()


def test_a_slowdown_that_ends_with_the_job_says_what_it_has_cost() -> None:
    ended = replace(INCIDENT, status="ended", relief_step=None)
    line = "status    over with the job, or by what came after it, 120 GPU-seconds lost, 10 GPU-hours saved"
    assert line in render(ended).splitlines()


def test_files_of_earlier_versions_have_the_times_they_have() -> None:
    known = json.loads(incident_to_json(INCIDENT))
    for name in ("onset_unix_s", "events"):
        del known[name]
    for action in known["actions"]:
        for name in (
            "step",
            "begun_unix_s",
            "before_iteration_s",
            "expected_iteration_s",
            "measured_iteration_s",
        ):
            del action[name]
    old = incident_from_json(json.dumps(known).encode())
    assert [(row.text, row.step) for row in rows(old)] == [("verdict", 1217), ("over", 1980)]
    text = render(old, timeline=True)
    assert "action    S2, micro-batches: 13 to replicas 0-2, 7 to replica 3" in text
    assert "timeline  from 2026-11-18 11:06:41 UTC" in text


def test_what_is_known_of_effects_is_said() -> None:
    assert done(Action("S2")) == "S2"
    assert done(Action("S2", expected_iteration_s=0.31)) == "S2; expected 310 ms an iteration"
    measured = Action("S2", before_iteration_s=0.5, measured_iteration_s=0.33)
    assert done(measured) == "S2; measured 500 ms → 330 ms an iteration"
    both = replace(measured, expected_iteration_s=0.31)
    assert done(both) == "S2; expected 500 ms → 310 ms an iteration, measured 330 ms"
    assert render_action(replace(INCIDENT, actions=(both,))).endswith(done(both))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 GPU-seconds"),
        (7.23, "7.23 GPU-seconds"),
        (3599, "3,599 GPU-seconds"),
        (3600, "1 GPU-hour"),
        (5400, "1.5 GPU-hours"),
        (36e6, "10,000 GPU-hours"),
    ],
)
def test_accelerator_time(value: float, text: str) -> None:
    assert accelerator_time(value) == text
