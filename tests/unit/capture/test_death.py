"""What a process will end by is left for the launcher, unless the script goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.capture import death


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def test_an_error_that_is_foreseen_is_there_until_the_script_goes_on(error_file: Path) -> None:
    death.foresee(ValueError("boom"))
    assert json.loads(error_file.read_text())["message"]["message"] == "ValueError: boom"
    death.go_on()
    assert not error_file.exists()
    death.go_on()


def test_what_another_has_written_is_left_there(error_file: Path) -> None:
    error_file.write_text("theirs")
    death.foresee(ValueError("boom"))
    death.go_on()
    assert error_file.read_text() == "theirs"
