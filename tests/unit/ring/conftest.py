"""Lets a module's tests run against the compiled ring and against its twin in plain Python."""

from __future__ import annotations

import pytest
from tests.twins.ring import python_format, python_reader, python_writer

from keepstep.ring import reader

TWIN = {
    "create": python_format.create,
    "RingWriter": python_writer.RingWriter,
    "Operation": python_writer.Operation,
}


@pytest.fixture(params=["native", "twin"])
def ring_part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which ring the test module's ``create``, ``RingWriter``, ``Operation`` and ``RingReader`` are."""
    if request.param == "twin":
        monkeypatch.setattr(reader, "Reader", python_reader.Reader)
        for name in TWIN.keys() & vars(request.module):
            monkeypatch.setattr(request.module, name, TWIN[name])
    return request.param
