"""The secret's file: made private, refused when it is not."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from keepstep import wire
from keepstep.core.errors import AuthenticationError


def test_written_private_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = wire.write_secret(path)
    assert len(secret) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert wire.read_secret(path) == secret


def test_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    wire.write_secret(path)
    with pytest.raises(AuthenticationError, match="already"):
        wire.write_secret(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_refused_when_others_can_reach_it(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    wire.write_secret(path)
    path.chmod(mode)
    with pytest.raises(AuthenticationError, match=r"run: chmod 600"):
        wire.read_secret(path)


@pytest.mark.parametrize("text", ["", "abcd", "z" * 64, "é" * 64, "ab" * 5000])
def test_refused_when_it_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(AuthenticationError, match="openssl rand"):
        wire.read_secret(path)


def test_missing_or_folder(tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError, match="every node needs the secret file"):
        wire.read_secret(tmp_path / "none")
    with pytest.raises(AuthenticationError, match="regular file"):
        wire.read_secret(tmp_path)
