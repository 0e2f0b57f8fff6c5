"""Paths of data sets and checkpoints in real folders; nothing is left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.errors import UsageError
from keepstep.core.node_row import PathSpeed
from keepstep.launch.node.checks import Subject, Wanted, paths

MIB = 1 << 20


def measure(path: Path, mode: str = "any") -> PathSpeed:
    return paths.measure(Wanted(str(path), mode), 8 * MIB, 5.0)  # pyright: ignore[reportArgumentType]


def trouble(path: Path, mode: str = "any") -> str:
    with pytest.raises(paths.PathTrouble) as raised:
        measure(path, mode)
    return str(raised.value)


def test_a_folder_is_written_read_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"own")
    found = measure(tmp_path, "rw")
    assert found.read > 0
    assert found.write > 0
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("data", b"own")]


def test_data_that_is_only_read(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "0").write_bytes(os.urandom(3 * MIB))
    found = measure(tmp_path, "ro")
    assert (found.read > 0, found.write, found.note) == (True, 0.0, "")
    assert measure(tmp_path / "shards" / "0").read > 0


def test_what_is_too_small_to_time_is_said_to_be(tmp_path: Path) -> None:
    assert measure(tmp_path, "ro").note == "no file to read"
    (tmp_path / "small").write_bytes(b"x")
    assert (measure(tmp_path, "ro").read, measure(tmp_path, "ro").note) == (0.0, "too little to time")


def test_what_is_not_there_or_is_neither_folder_nor_file(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert trouble(absent) == f"{absent}: No such file or directory; mount it there or correct the path"
    os.mkfifo(tmp_path / "fifo")
    assert "is neither a folder nor a file" in trouble(tmp_path / "fifo")
    (tmp_path / "file").touch()
    assert "is a file; give its folder" in trouble(tmp_path / "file", "rw")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    there = Path("/proc/self/net")  # nobody can make a file there
    assert trouble(there, "rw").startswith("/proc/self/net cannot be written: ")
    assert measure(there).note.startswith("read-only")


def test_bytes_that_come_back_changed_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def rot(descriptor: int) -> None:
        real(descriptor)
        with open(f"/proc/self/fd/{descriptor}", "r+b") as file:
            file.seek(4 * MIB)
            file.write(b"\0" * 8)

    monkeypatch.setattr(os, "fsync", rot)  # the kernel's part, which no test can damage otherwise
    assert "gives back other bytes than were written there, at 4194304 of 8388608" in trouble(tmp_path, "rw")
    assert list(tmp_path.iterdir()) == []


def test_one_that_does_not_answer_holds_up_no_other(tmp_path: Path) -> None:
    never = threading.Event()

    class Hanging(Wanted):
        @property
        def path(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
            if threading.current_thread() is not threading.main_thread():
                never.wait(60)
            return "/mnt/stale"

    stale = Hanging.__new__(Hanging)
    first, second = paths.measure_all([stale, Wanted(str(tmp_path))], 3.0, 4 * MIB, 0.1)
    never.set()
    assert (
        first == "/mnt/stale has not answered within 3 s; see whether its server answers, and mount it anew"
    )
    assert isinstance(second, PathSpeed)


def test_before_the_start_only_what_cannot_be_used_is_found(tmp_path: Path) -> None:
    wanted = Wanted(str(tmp_path), "rw"), Wanted("/no/such/data", "ro")
    found = list(paths.paths(Subject("gpu-1", 1, fresh=True, paths=wanted)))
    assert [(one.text, one.unfit) for one in found] == [
        ("node gpu-1: /no/such/data: No such file or directory; mount it there or correct the path", True)
    ]
    assert list(paths.paths(Subject("gpu-1", 1, paths=wanted))) == []  # beside a recovery


@pytest.mark.parametrize(
    ("text", "path", "mode"),
    [
        ("/a", "/a", "any"),
        ("/a:ro", "/a", "ro"),
        ("/a:rw", "/a", "rw"),
        ("/a:b", "/a:b", "any"),
        ("a:b:ro", "a:b", "ro"),
    ],
)
def test_paths_on_the_command_line(text: str, path: str, mode: str) -> None:
    assert paths.wanted_path(text) == Wanted(path, mode)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("text", ["", ":ro", "s3://bucket/data", "a\0b"])
def test_what_is_no_path(text: str) -> None:
    with pytest.raises(UsageError):
        paths.wanted_path(text)


@given(st.text(max_size=40))
def test_every_text_is_a_path_or_an_error_of_one_line(text: str) -> None:
    try:
        found = paths.wanted_path(text)
    except UsageError:
        pass
    else:
        assert found.path in text
        assert found.mode in ("any", "ro", "rw")


def test_paths_of_the_settings(tmp_path: Path) -> None:
    made = paths.configured_paths(str(tmp_path / "not" / "yet"), f"{tmp_path}/a, {tmp_path}/b,")
    checkpoints = Wanted(f"{tmp_path}/not/yet", "rw", is_made=True)
    assert made == (Wanted(f"{tmp_path}/a", "ro"), Wanted(f"{tmp_path}/b", "ro"), checkpoints)
    assert paths.measure(checkpoints, MIB, 1.0).path == checkpoints.path
    assert paths.configured_paths("s3://bucket/run", "") == ()
    assert paths.configured_paths("", "") == ()


@pytest.fixture(autouse=True)
def no_probe_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.rglob(".keepstep-check-*"))


def test_storage_that_refuses_to_be_read_back_is_told_and_starts_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "fsync", refuse)
    (found,) = paths.paths(Subject("gpu-1", 1, fresh=True, paths=(Wanted(str(tmp_path)),)))
    assert not found.unfit
    assert "a file of 4 MiB could not be written and read back: Operation not supported" in found.text
