"""Folders that others own or may write are refused, and no symbolic link below a run folder is followed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.agent.ranks.step_log import StepLog
from keepstep.control.control_server import RunFiles
from keepstep.core import own_folders
from keepstep.core.errors import UnsafePathError
from keepstep.core.log_lines import log_into
from keepstep.launch.command import run_folder
from keepstep.launch.workers.streams import open_for_worker
from keepstep.wire.messages import Stop

ANOTHER_USER = 65533
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user's")


@pytest.fixture(autouse=True)
def _groups_anew() -> Iterator[None]:
    own_folders._is_private.cache_clear()
    yield
    own_folders._is_private.cache_clear()


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    folder = tmp_path / "foreign"
    folder.mkdir()
    os.chown(folder, ANOTHER_USER, -1)
    return folder


@needs_root
def test_a_folder_of_another_user_is_refused_and_left_as_it_is(foreign: Path) -> None:
    for use in (own_folders.make_folder, lambda path: own_folders.write_whole(path / "run.json", b"{}")):
        with pytest.raises(UnsafePathError, match=f"foreign: belongs to user {ANOTHER_USER}, not to you"):
            use(foreign)
    assert list(foreign.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(UnsafePathError, match=r"can be written by others .* chmod go-w"):
        own_folders.make_folder(tmp_path)
    with pytest.raises(UnsafePathError, match="can be written by others"):
        own_folders.open_file(tmp_path / "controller.log", APPEND)
    tmp_path.chmod(0o755)
    own_folders.make_folder(tmp_path)


@needs_root
def test_a_group_that_writes_must_be_the_users_own(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)  # made by hand under umask 002, where each user has a group of their own
    own_folders.make_folder(tmp_path)
    os.chown(tmp_path, -1, 65532)
    with pytest.raises(UnsafePathError, match=r"can be written by others \(mode 0775\)"):
        own_folders.make_folder(tmp_path)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_what_is_made_is_ours_alone_under_every_umask(
    tmp_path: Path, umask: Callable[[int], int], mask: int
) -> None:
    umask(mask)
    own_folders.make_folder(tmp_path / "runs" / "one")
    own_folders.make_new_folder(tmp_path / "new" / "two")
    own_folders.write_whole(tmp_path / "runs" / "one" / "run.json", b"{}")
    os.close(own_folders.open_file(tmp_path / "runs" / "one" / "agent.log", APPEND))
    made = [*tmp_path.glob("*/**"), *tmp_path.glob("runs/one/*")]
    assert len(made) >= 6
    assert [path for path in made if path.stat().st_mode & 0o022] == []


@needs_root
def test_a_file_system_that_tells_no_owners_and_modes_is_used(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign.chmod(0o777)
    (foreign / "file").touch(mode=0o777)
    os.chown(foreign / "file", ANOTHER_USER, -1)
    (foreign / "file").chmod(0o777)
    monkeypatch.setitem(own_folders._made, foreign.stat().st_dev, (foreign / "file").stat())
    own_folders.write_whole(foreign / "run.json", b"{}")


WRITERS: dict[str, Callable[[Path], object]] = {
    "run.json": lambda run: run_folder.write_json(run / "run.json", {}),
    "nodes/0/iterations.jsonl": lambda run: StepLog(run / "nodes/0/iterations.jsonl", {0}),
    "controller.log": lambda run: log_into(run / "controller.log", "%(message)s"),
    "logs/stdout.log": lambda run: os.close(open_for_worker(run / "logs/stdout.log") or -1),
    "stop.json": lambda run: RunFiles(run).write_stop(Stop(0, "over")),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path, name: str) -> None:
    mine, run = tmp_path / "bashrc", tmp_path / "run"
    mine.write_text("mine\nand mine")
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).symlink_to(mine)
    if name.endswith(".json"):  # written whole: it takes the place of the link
        WRITERS[name](run)
        assert not (run / name).is_symlink()
    else:
        with pytest.raises(UnsafePathError, match=f"{run / name}: .* no link is followed there: remove it"):
            WRITERS[name](run)
    assert mine.read_text() == "mine\nand mine"


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.mkdir()
    folder = (run / name).parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(mine)
    with pytest.raises(UnsafePathError, match="no link is followed there: remove it"):
        WRITERS[name](run)
    assert list(mine.iterdir()) == []


def test_a_draft_that_somebody_has_left_is_not_written_to(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / f".status.json.{os.getpid()}").symlink_to(mine)
    own_folders.write_whole(tmp_path / "status.json", b"{}")
    assert (mine.read_text(), json.loads((tmp_path / "status.json").read_text())) == ("mine", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "status.json"]


def test_a_link_of_the_users_own_leads_to_the_folder(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    found = own_folders.real_path(tmp_path / "runs" / "one")
    assert found == tmp_path / "scratch" / "one"
    own_folders.make_folder(found)
    own_folders.write_whole(found / "run.json", b"{}")


@needs_root
def test_a_link_that_another_user_put_where_everybody_may_is_refused(tmp_path: Path) -> None:
    shared, mine = tmp_path / "tmp", tmp_path / "mine"
    mine.mkdir()
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "runs").symlink_to(mine)
    own_folders.real_path(shared / "runs" / "one")  # ours
    os.lchown(shared / "runs", ANOTHER_USER, -1)
    with pytest.raises(UnsafePathError, match="runs: is a symbolic link that another user put there"):
        own_folders.real_path(shared / "runs" / "one")


@needs_root
def test_a_folder_of_another_user_that_all_may_write_has_no_run_in_it(foreign: Path) -> None:
    own_folders.real_path(foreign / "one")  # as when root runs in a user's folder
    foreign.chmod(0o1777)
    with pytest.raises(UnsafePathError, match=r"foreign: belongs to user .* written by everybody"):
        own_folders.real_path(foreign / "one")


def test_where_everybody_may_rename_the_run_folder_is_found(tmp_path: Path) -> None:
    for mode, found in ((0o755, None), (0o1777, None), (0o777, tmp_path)):
        tmp_path.chmod(mode)
        assert own_folders.open_to_all(tmp_path / "runs") == found
    tmp_path.chmod(0o700)


def test_an_empty_dir_is_known_by_the_kubelets_folder(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    kubelets = "/var/lib/kubelet/pods/4c1/volumes"
    mounts.write_text(
        f"900 880 8:1 {kubelets}/kubernetes.io~empty-dir/run /run/keepstep rw,relatime - ext4 /dev/sda1 rw\n"
        f"901 880 8:1 {kubelets}/kubernetes.io~nfs/runs /runs rw,relatime - ext4 /dev/sda1 rw\n"
    )
    assert own_folders.is_empty_dir(Path("/run/keepstep"), mounts)
    assert not own_folders.is_empty_dir(Path("/runs"), mounts)
    assert not own_folders.is_empty_dir(Path("/run"), mounts)
    assert not own_folders.is_empty_dir(Path("/run/keepstep"), tmp_path / "none")
