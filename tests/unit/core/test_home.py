"""A process without a home: neither HOME nor an entry in the password database."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from keepstep.cli import main
from keepstep.core import home
from keepstep.core.config import config_path
from keepstep.core.home import home_folder
from keepstep.launch.command.run_folder import ensure_secret


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """This user has no entry, and the environment names no home."""

    def getpwuid(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(home.pwd, "getpwuid", getpwuid)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("KEEPSTEP_CONFIG", raising=False)


def test_the_environment_counts_before_the_password_database() -> None:
    assert home_folder({"HOME": "/home/me"}) == Path("/home/me")
    assert home_folder({}) == home_folder({"HOME": ""}) == Path(pwd.getpwuid(os.getuid()).pw_dir)


@pytest.mark.usefixtures("nobody")
def test_there_may_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home_folder({}) is None
    assert home_folder({"HOME": "/home/me"}) == Path("/home/me")
    monkeypatch.chdir(tmp_path)
    assert config_path({}) is None
    own = tmp_path / "keepstep" / "config.toml"
    own.parent.mkdir()
    own.touch()
    assert config_path({"XDG_CONFIG_HOME": str(tmp_path)}) == own


@pytest.mark.usefixtures("nobody")
def test_several_nodes_without_a_home_need_a_file_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").touch()
    nodes = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "1")
    for dry in ((), ("--dry-run",)):
        assert main(["run", *dry, "--nproc-per-node", "1", *nodes, "job.py"]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert [line for line in told.err.splitlines() if "HOME" in line] == [
            "keepstep: no place for the nodes' secret: HOME is not set, and this user has no home folder; "
            "name a file that all nodes have with --secret-file, or a shared folder with --run-dir"
        ]
        assert not (tmp_path / "runs").exists()
    secret = ("--secret-file", str(tmp_path / "secret"))
    assert main(["run", "--dry-run", "--nproc-per-node", "1", *nodes, *secret, "job.py"]) == 0


def test_a_home_in_which_we_may_not_look_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container whose image says HOME=/root, run as another user."""
    from keepstep.core.errors import AuthenticationError

    real_stat, real_mkdir = os.stat, os.mkdir

    def forbidden(path: object) -> bool:
        return isinstance(path, (str, Path)) and Path(path).is_relative_to(tmp_path / "root")

    def stat(path: object, *rest: object, **more: object) -> os.stat_result:
        if forbidden(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real_stat(path, *rest, **more)  # type: ignore[arg-type]

    def mkdir(path: object, *rest: object, **more: object) -> None:
        if forbidden(path):
            raise PermissionError(13, "Permission denied", str(path))
        real_mkdir(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "mkdir", mkdir)
    assert config_path({"HOME": str(tmp_path / "root")}) is None
    with pytest.raises(AuthenticationError, match="Permission denied; name a file with --secret-file"):
        ensure_secret(tmp_path / "root" / ".config" / "keepstep" / "secret")
