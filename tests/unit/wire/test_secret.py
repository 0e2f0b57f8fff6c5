"""The secret's file: made private, refused when it is not."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o660, 0o666])
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


USER, FS_GROUP, OTHER_GROUP = 4711, 4712, 4713
READ = """
import os, sys
sys.path[:0] = sys.argv[2].split(os.pathsep)
from keepstep import wire
os.setgroups([int(one) for one in sys.argv[3].split()])
os.setgid(int(sys.argv[4]))
os.setuid(int(sys.argv[4]))
try:
    print(len(wire.read_secret(sys.argv[1])))
except Exception as error:
    print(error)
"""
root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@pytest.fixture
def mount() -> Iterator[Path]:
    """A secret as Kubernetes projects it: a link to a link's folder, 0440, root's, of the pod's fsGroup."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        folder = Path(name)
        (folder / "..2026_01").mkdir()
        wire.write_secret(folder / "..2026_01/secret")
        (folder / "..data").symlink_to("..2026_01")
        (folder / "secret").symlink_to("..data/secret")
        give(folder, 0o440, 0, FS_GROUP)
        folder.chmod(0o755)
        yield folder / "secret"


def give(folder: Path, mode: int, owner: int, group: int) -> None:
    path = (folder / "secret").resolve()
    os.chown(path, owner, group)
    path.chmod(mode)


def read_as(path: Path, *groups: int, user: int = USER) -> str:
    where = os.pathsep.join(one or os.curdir for one in sys.path)
    command = [sys.executable, "-c", READ, str(path), where, " ".join(map(str, groups)), str(user)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@root
def test_taken_as_kubernetes_mounts_it_for_a_pods_user(mount: Path) -> None:
    assert read_as(mount, FS_GROUP) == "32"
    give(mount.parent, 0o400, 0, 0)
    assert read_as(mount, user=0) == "32"
    give(mount.parent, 0o640, 0, FS_GROUP)
    assert read_as(mount, FS_GROUP) == "32", "root may write it"


@root
@pytest.mark.parametrize(
    ("mode", "owner", "group", "said"),
    [
        (0o444, 0, FS_GROUP, "mode 0444"),
        (0o460, 0, FS_GROUP, "mode 0460"),
        (0o450, 0, FS_GROUP, "mode 0450"),
        (0o440, 0, OTHER_GROUP, "Permission denied"),
        (0o640, USER, FS_GROUP, "mode 0640"),
        (0o440, USER + 1, FS_GROUP, "mode 0440"),
    ],
)
def test_refused_as_others_might_mount_it(mount: Path, mode: int, owner: int, group: int, said: str) -> None:
    give(mount.parent, mode, owner, group)
    told = read_as(mount, FS_GROUP)
    assert said in told
    assert "\n" not in told


@root
def test_a_group_that_is_not_ours_is_refused_although_root_could_read_it(mount: Path) -> None:
    assert "defaultMode 0440" in read_as(mount, user=0)
