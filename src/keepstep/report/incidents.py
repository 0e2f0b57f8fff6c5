"""Incidents as JSON, as in ``RUN/incidents/NNNN.json``; checked when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from keepstep.core.errors import RunError
from keepstep.core.incident import INCIDENT_SCHEMA, Incident
from keepstep.core.regular_files import read_regular

_MOST_BYTES = 16 << 20
SCHEMA_ID = "https://keepstep.dev/schema/incident.json"


class _Version(msgspec.Struct):
    schema: int


def incident_to_json(incident: Incident, *, indent: int = 2) -> bytes:
    """An incident as a JSON object in UTF-8; with ``indent`` 0 on one line."""
    encoded = msgspec.json.encode(incident)
    return msgspec.json.format(encoded, indent=indent) if indent else encoded


def incident_from_json(data: bytes, *, where: str = "incident") -> Incident:
    """The incident in a JSON object; ``where`` names the file in errors.

    Raises:
        RunError: the data is no incident, or was written by a newer keepstep.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).schema
        if version > INCIDENT_SCHEMA:
            raise RunError(
                f"{where}: written with incident schema {version}, this keepstep reads up to {INCIDENT_SCHEMA}; "
                f"read it with the keepstep that wrote it, or a newer one"
            )
        return msgspec.json.decode(data, type=Incident)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"{where}: is no incident of keepstep: {error}") from error


def read_incident(path: Path) -> Incident:
    """The incident in a file. Raises RunError as ``incident_from_json``, or because the file cannot be read."""
    try:
        return incident_from_json(read_regular(path, _MOST_BYTES), where=str(path))
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error


def read_incidents(folder: Path) -> list[Incident]:
    """All incidents in the folder ``RUN/incidents``, by number; none without such a folder.

    Raises:
        RunError: a file in it is no incident, cannot be read, or is newer than this keepstep.
    """
    found = [read_incident(path) for path in sorted(folder.glob("[0-9]*.json"))]
    return sorted(found, key=lambda incident: incident.number)


def incident_schema() -> dict[str, Any]:
    """The JSON schema of an incident, made from the dataclasses. It is in ``docs/reference/incident-schema.json``."""
    schema = msgspec.json.schema(Incident)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **schema}
