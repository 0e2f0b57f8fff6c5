"""Incident files: written, read back, refused when they are newer or none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.core.errors import RunError
from keepstep.core.incident import Culprit, Incident, Link
from keepstep.report.incidents import (
    incident_from_json,
    incident_schema,
    incident_to_json,
    read_incidents,
)

INCIDENT = Incident(
    number=3,
    kind="slow",
    onset_step=30,
    detected_step=32,
    relief_step=None,
    job_slowdown=1.5,
    culprits=(Culprit(None, Link((0, 4), ("a", "b")), "a", "transfer", 9.0, "high", "network"),),
    victims=(1, 2),
    evidence=("×9",),
    missing=(),
)


@pytest.mark.parametrize("indent", [0, 2])
def test_round_trip(indent: int) -> None:
    text = incident_to_json(INCIDENT, indent=indent)
    assert incident_from_json(text) == INCIDENT
    assert (b"\n" in text) == (indent > 0)


def test_newer_schema_says_what_to_do() -> None:
    newer = replace(INCIDENT, schema=99)
    with pytest.raises(RunError, match=r"incidents/0003.json: written with incident schema 99.*newer one"):
        incident_from_json(incident_to_json(newer), where="incidents/0003.json")


def test_fields_of_a_newer_minor_version_are_ignored() -> None:
    row = {**json.loads(incident_to_json(INCIDENT)), "colour": "red"}
    assert incident_from_json(json.dumps(row).encode()) == INCIDENT


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b'{"schema": 1}', b'{"schema": 1, "number": "x"}', b"\xff"]
)
def test_other_files_are_refused(text: bytes) -> None:
    with pytest.raises(RunError, match="is no incident"):
        incident_from_json(text)


def test_folder_by_number(tmp_path: Path) -> None:
    assert read_incidents(tmp_path / "none") == []
    for number in (2, 1, 10000):
        incident = replace(INCIDENT, number=number)
        (tmp_path / f"{number:04d}.json").write_bytes(incident_to_json(incident))
        (tmp_path / f"{number:04d}.txt").write_text("for people")
    assert [incident.number for incident in read_incidents(tmp_path)] == [1, 2, 10000]


def test_published_schema_is_current() -> None:
    """Renew it: python -c 'see docs/design/wire.md, "Incident files"'."""
    path = Path(__file__).parents[3] / "docs" / "reference" / "incident-schema.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(incident_schema()))
