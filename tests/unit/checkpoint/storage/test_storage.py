"""Real faults of storage: a full device, a file size limit, a killed writer, an object store that loses bytes."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from tests.unit.checkpoint.stored_states import newest, rebuilt, same, sample_state, taken

from keepstep.checkpoint.header import encode_header
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.storage.backend import FsspecStorage, LocalStorage, open_storage
from keepstep.checkpoint.storage.persist import conclude, write_shard
from keepstep.checkpoint.storage.read import scan, verify
from keepstep.core.errors import CheckpointError, UsageError


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("step", "file", [b"old"])

    def chunks() -> Iterator[bytes]:
        yield b"new"
        raise OSError(errno.EIO, "injected")

    with pytest.raises(OSError, match="injected"):
        storage.write("step", "file", chunks())
    assert (tmp_path / "step" / "file").read_bytes() == b"old"
    assert files_in(tmp_path) == ["file"]


def test_a_file_size_limit_of_the_kernel_is_an_error(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, old[1]))
    try:
        # The kernel takes part of the chunk that crosses the limit, and refuses the rest.
        with pytest.raises(OSError, match="File too large"):
            storage.write("step", "file", [bytes(6000), bytes(6000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert files_in(tmp_path) == []


def put(storage: LocalStorage, step: int) -> bool:
    """Write a step; False when the device is full."""
    header, data = taken(sample_state(step), step)
    try:
        write_shard(storage, header, memoryview(data))
        conclude(storage, Key(0, step), [0], 1, leader=True)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
def test_a_full_device_keeps_the_step_before(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted: {made.stderr.decode().strip()}")
    try:
        storage, written = LocalStorage(mount), 0
        while put(storage, written):
            written += 1
        assert 1 < written < 20
        found, refused = newest(storage, 0, world_size=1)
        assert found
        assert found.header.step == written - 1
        assert same(rebuilt(found.header, found.data), sample_state(written - 1))
        assert len(refused) <= 1
        assert not [path for path in mount.rglob(".*") if path.is_file()]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


WRITER = """
    import itertools, sys
    from pathlib import Path
    from keepstep.checkpoint.header import decode_header
    from keepstep.checkpoint.storage.persist import conclude, write_shard
    from keepstep.checkpoint.memory.slots import Key
    from keepstep.checkpoint.storage.backend import LocalStorage
    import msgspec
    header = decode_header(Path(sys.argv[2]).read_bytes())
    data = memoryview(Path(sys.argv[3]).read_bytes())
    storage = LocalStorage(Path(sys.argv[1]))
    assert "torch" not in sys.modules  # what runs beside training stays small
    for step in itertools.count(int(sys.argv[4])):
        write_shard(storage, msgspec.structs.replace(header, step=step), data)
        conclude(storage, Key(0, step), [0], 1, leader=True)
        print(step, flush=True)
"""


def test_a_writer_killed_at_any_moment_loses_nothing_that_was_promised(tmp_path: Path) -> None:
    header, data = taken(sample_state(), 0)
    (tmp_path / "header").write_bytes(encode_header(header))
    (tmp_path / "data").write_bytes(data)
    chance, promised = random.Random(4), -1
    for _ in range(8):
        words = [tmp_path / "run", tmp_path / "header", tmp_path / "data", promised + 1]
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), *map(str, words)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout
        with writer.stdout:
            promised = int(writer.stdout.readline())
            time.sleep(chance.random() * 0.02)
            writer.kill()
            promised = max([promised, *map(int, writer.stdout.read().split())])
        writer.wait()
        storage = LocalStorage(tmp_path / "run")
        found, _ = newest(storage, 0, world_size=1)
        assert found
        assert found.header.step >= promised
        assert same(rebuilt(found.header, found.data), sample_state())
        whole = [step for step in scan(storage) if step.whole]
        assert len(whole) >= promised + 1
        for step in whole[:3]:
            assert step.manifest
            assert list(verify(storage, step.manifest)) == []


class BadStore(MemoryFileSystem):
    """An object store that raises errors of its own, loses the end of an upload, or flips a bit."""

    protocol = "badstore"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    mode = ""

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb" and self.mode == "read":
            raise RuntimeError("ClientError: SlowDown\nretry later")
        if mode == "wb" and self.mode == "write":
            raise RuntimeError("ClientError: AccessDenied")
        file = super()._open(path, mode, **kwargs)
        if mode == "wb" and self.mode in ("cut", "flip"):
            whole = type(file).close

            def close() -> None:
                content = bytearray(file.getvalue())
                if self.mode == "cut":
                    del content[-1:]
                else:
                    content[-1] ^= 1
                stored = MemoryFile(self, path, bytes(content))
                self.store[path] = stored
                whole(stored)

            file.close = close
        return file


@pytest.fixture
def bad() -> Iterator[type[BadStore]]:
    fsspec.register_implementation("badstore", BadStore, clobber=True)
    BadStore.store.clear()
    BadStore.mode = ""
    BadStore.clear_instance_cache()
    yield BadStore
    BadStore.store.clear()


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("write", "RuntimeError ClientError: AccessDenied"),
        ("read", "RuntimeError ClientError: SlowDown"),
        ("cut", "the store holds"),
        ("flip", "its bytes are not those that were written"),
    ],
)
def test_faults_of_an_object_store_are_told_and_the_step_before_is_taken(
    mode: str, said: str, bad: type[BadStore]
) -> None:
    storage = open_storage("badstore://bucket/run")
    assert isinstance(storage, FsspecStorage)
    header, data = taken(sample_state(), 1)
    write_shard(storage, header, memoryview(data))
    conclude(storage, Key(0, 1), [0], 1, leader=True)
    bad.mode = mode
    header, data = taken(sample_state(2), 2)
    with pytest.raises((OSError, CheckpointError), match=said) as told:
        write_shard(storage, header, memoryview(data))
    assert "\n" not in str(told.value)
    bad.mode = ""
    found, refused = newest(storage, 0, world_size=1)
    assert found
    assert found.header.step == 1
    assert refused == ["step-0000000002-i0000: has no manifest, it was not written to the end"]
    write_shard(storage, header, memoryview(data))
    conclude(storage, Key(0, 2), [0], 1, leader=True)
    assert [step.key.step for step in scan(storage) if step.whole] == [2, 1]


def test_urls_that_nothing_reaches_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"nosuch://bucket: fsspec cannot reach it"):
        open_storage("nosuch://bucket")
    assert open_storage("file:///tmp/x").where == "/tmp/x"
