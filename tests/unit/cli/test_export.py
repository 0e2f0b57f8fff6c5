"""Marks of incidents in a trace: what happened, when, on the clock of the ranks where it is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.unit.view.example_runs import NOW_S, SLOW

from keepstep.cli.export import _marks
from keepstep.core.incident import Action, Event, Incident
from keepstep.report.incidents import incident_to_json
from keepstep.traces import Run


def marks(tmp_path: Path, incident: Incident, starts: dict[int, float]) -> list[tuple[float, str]]:
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / "0001.json").write_bytes(incident_to_json(incident))
    return [(time_us / 1e6 - NOW_S, text) for time_us, text in _marks(Run(tmp_path), starts)]


def test_each_moment_of_an_incident(tmp_path: Path) -> None:
    events = (Event("noticed", NOW_S + 2.0), Event("verdict", NOW_S + 3.0, None, "rank 3 gpu-1"))
    action = Action("S2, micro-batches", None, "13, 7", begun_unix_s=NOW_S + 9.0)
    incident = replace(
        SLOW, events=events, actions=(action,), status="relieved", relief_step=415, closed_unix_s=NOW_S + 30.0
    )
    assert marks(tmp_path, incident, {400: NOW_S + 1.0}) == [
        (1.0, "incident 0001 slow: onset"),
        (2.0, "incident 0001 slow: noticed"),
        (3.0, "incident 0001 slow: verdict: rank 3 gpu-1"),
        (9.0, "incident 0001 slow: action: S2, micro-batches: 13, 7"),
        (30.0, "incident 0001 slow: relief"),
    ]


def test_what_has_no_time_has_no_mark(tmp_path: Path) -> None:
    incident = replace(SLOW, onset_unix_s=None, events=(Event("noticed", 1e300),), actions=(Action("a"),))
    assert marks(tmp_path, incident, {}) == []
