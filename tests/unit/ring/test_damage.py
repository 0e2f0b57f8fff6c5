"""What is no ring of ours, or not whole, is refused with what and where; what is damaged inside is skipped."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.core.errors import RingError
from keepstep.ring import RingReader, RingWriter, create

pytestmark = pytest.mark.usefixtures("ring_part")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved ring of 64 records."""
    fd = create(64)
    writer = RingWriter(fd, rank=0, world_size=4)
    group = writer.group("world", range(4), "gloo", "")
    site = writer.site("train.py:7")
    for number in range(64):
        writer.start(1, 1, group, -1, number, 0, site)()
    path = tmp_path / "rank-00000.ring"
    RingReader(fd).save(path)
    os.close(fd)
    return path


def rewrite(path: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


@pytest.mark.parametrize("size", [0, 1, 39, 40, 4095, 4096, 5000, -64, -1])
def test_a_truncated_file(saved: Path, size: int) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[:size])
    with pytest.raises(RingError, match=f"ring {saved}: truncated"):
        RingReader(saved)


def test_foreign_content(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(os.urandom(8) + bytes(10_000))
    with pytest.raises(RingError, match="foreign"):
        RingReader(path)


def test_another_version_is_named(saved: Path) -> None:
    rewrite(saved, lambda c: struct.pack_into("<Q", c, 8, 7))
    with pytest.raises(RingError, match="ring format 7, this keepstep reads format 1"):
        RingReader(saved)


@pytest.mark.parametrize("records", [0, 1, 63, 100, 128, 2**22, 2**40, 2**64 - 1])
def test_a_torn_header(saved: Path, records: int) -> None:
    rewrite(saved, lambda c: struct.pack_into("<Q", c, 16, records))
    with pytest.raises(RingError, match="torn"):
        RingReader(saved)


def fnv1a(data: bytes) -> int:
    h = 2166136261
    for byte in data:
        h = (h ^ byte) * 16777619 % 2**32
    return h


@pytest.mark.parametrize(
    ("records", "total"), [(0, 4096), (2**60, 2**63), (65, 2**20), (2**22, 300_000_000), (64, 1)]
)
def test_sizes_are_not_believed_even_with_a_right_checksum(saved: Path, records: int, total: int) -> None:
    def change(content: bytearray) -> None:
        struct.pack_into("<QQ", content, 16, records, total)
        struct.pack_into("<Q", content, 32, fnv1a(bytes(content[:32])))

    rewrite(saved, change)
    with pytest.raises(RingError, match=r"torn|truncated"):
        RingReader(saved)


@pytest.mark.parametrize("where", ["/nonexistent/ring", "/", "/dev/null", "/proc/self/fd/999"])
def test_places_where_no_ring_can_be(where: str) -> None:
    with pytest.raises(RingError, match=f"ring {where}: "):
        RingReader(where)
    with pytest.raises(RingError, match=f"ring {where}: "):
        RingWriter(where, rank=0, world_size=1)


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RingError, match="not a regular file"):
        RingReader(pipe)


def test_descriptors_that_are_none() -> None:
    with pytest.raises(RingError, match="descriptor -1"):
        RingReader(-1)


def test_a_saved_copy_cannot_be_written(saved: Path) -> None:
    with pytest.raises(RingError, match="only one made by create"):
        RingWriter(saved, rank=0, world_size=1)


def test_an_unsealed_memfd_is_copied_not_mapped(saved: Path) -> None:
    fd = os.memfd_create("unsealed")
    os.write(fd, saved.read_bytes())
    reader = RingReader(fd)
    os.ftruncate(fd, 0)  # a mapping would answer the next look with SIGBUS
    assert len(reader.snapshot()) == 64
    os.close(fd)


def test_the_size_of_a_ring_is_sealed() -> None:
    fd = create(64)
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    assert seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    assert not os.get_inheritable(fd)
    os.close(fd)


@pytest.mark.parametrize("records", [0, 63, 2**22 + 1, 2**63])
def test_sizes_that_create_refuses(records: int) -> None:
    with pytest.raises(RingError, match="records must be 64 to 4194304"):
        create(records)


def test_create_rounds_up_to_a_power_of_two() -> None:
    fd = create(100)
    assert RingReader(fd).header.records == 128
    os.close(fd)


def test_a_damaged_record_is_skipped_and_counted(saved: Path) -> None:
    size = saved.stat().st_size
    rewrite(
        saved, lambda c: c.__setitem__(size - 64 * 3 + 33, c[size - 64 * 3 + 33] ^ 1)
    )  # bytes of record 61
    reader = RingReader(saved)
    assert reader.snapshot()["bytes"].tolist() == [*range(61), 62, 63]
    batch = reader.poll()
    assert len(batch.started) == 63
    assert batch.lost == 1


def test_a_record_that_was_never_published_is_skipped_and_counted(saved: Path) -> None:
    size = saved.stat().st_size
    rewrite(saved, lambda c: struct.pack_into("<Q", c, size - 64 * 5, 2 * 59 + 1))
    reader = RingReader(saved)
    batch = reader.poll()
    assert batch.started["bytes"].tolist() == [n for n in range(64) if n != 59]
    assert batch.lost == 1


def test_damaged_names_keep_their_places(saved: Path) -> None:
    content = saved.read_bytes()
    rewrite(saved, lambda c: c.__setitem__(content.index(b"world"), ord("W")))
    rewrite(saved, lambda c: c.__setitem__(content.index(b"train.py"), ord("T")))
    reader = RingReader(saved)
    assert [(g.name, g.members) for g in reader.groups()] == [("damaged group 0", ())]
    assert reader.sites() == ["", ""]
