"""Checksums, and copies that are summed on the way."""

from __future__ import annotations

import mmap
import random
import time
import weakref
from array import array

import pytest
import torch

from keepstep.checkpoint import native

pytestmark = pytest.mark.usefixtures("copy_engine")

POLYNOMIAL = 0x9A6C9329AC4BC9B5


def bitwise(data: bytes | memoryview) -> int:
    """CRC-64/NVME, one bit after the other."""
    crc = (1 << 64) - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (POLYNOMIAL if crc & 1 else 0)
    return crc ^ ((1 << 64) - 1)


def test_the_published_check_value() -> None:
    assert native.checksum(b"123456789") == 0xAE8B14860A799888
    assert native.checksum(b"") == 0


@pytest.mark.parametrize("length", [1, 7, 8, 15, 16, 17, 127, 128, 255, 256, 257, 300, 383, 384, 1000, 4099])
def test_every_length_is_summed_as_bit_by_bit(length: int) -> None:
    source = random.Random(length)
    data = memoryview(source.randbytes(length + 3))
    for offset in range(3):
        piece = data[offset : offset + length]
        assert native.checksum(piece) == bitwise(piece)
        cut = source.randint(0, length)
        assert native.checksum(piece[cut:], native.checksum(piece[:cut])) == bitwise(piece)
        combined = native.combine(native.checksum(piece[:cut]), native.checksum(piece[cut:]), length - cut)
        assert combined == bitwise(piece)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("lengths", [[0], [1, 100, 3 << 20], [(1 << 20) + 1] * 3, [64] * 50])
def test_copies_are_whole_and_summed(threads: int, lengths: list[int]) -> None:
    tensors = [torch.randint(0, 256, (length,), dtype=torch.uint8) for length in lengths]
    offsets = [sum(-(-n // 64) * 64 for n in lengths[:i]) for i in range(len(lengths))]
    data_bytes = offsets[-1] + lengths[-1]
    slot = mmap.mmap(-1, native.slot_bytes(data_bytes, 5, len(lengths)))
    board = mmap.mmap(-1, 4096)
    plan = array("Q")
    for i, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        plan.extend((tensor.data_ptr(), offset, tensor.numel(), i % 2))
    snapshot = native.Snapshot(
        slot, plan, header=b"hello", data_bytes=data_bytes, step=3, incarnation=1,
        board=board, board_index=2, board_value=77, threads=threads,
    )  # fmt: skip
    snapshot.wait(urgent=True)
    snapshot.wait()
    assert snapshot.finished
    assert board[16:24] == (77).to_bytes(8, "little")
    expected = [native.checksum(tensor.numpy().data) for tensor in tensors]
    assert snapshot.sums() == expected
    ranges = array("Q")
    back = [torch.zeros_like(tensor) for tensor in tensors]
    out = array("Q")
    for tensor, offset in zip(back, offsets, strict=True):
        ranges.extend((native.DATA_OFFSET + offset, tensor.numel()))
        out.extend((native.DATA_OFFSET + offset, tensor.data_ptr(), tensor.numel()))
    assert native.checksums(slot, ranges, threads) == expected
    assert native.copy_out(slot, out, threads, fresh=threads > 1) == expected
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))
    native.clear(slot)
    assert slot[:64] == bytes(64)


PATIENCE_S = 60


class Owner:
    """Owns memory."""


def test_what_owns_the_memory_is_held_as_long_as_it_may_be_copied() -> None:
    slot, tensor, owner = mmap.mmap(-1, 16384), torch.ones(4096, dtype=torch.uint8), Owner()
    lives = weakref.ref(owner)
    plan = array("Q", (tensor.data_ptr(), 0, 4096, 0))
    snapshot = native.Snapshot(slot, plan, owners=owner, header=b"", data_bytes=4096, step=0, incarnation=0)
    del owner
    snapshot.wait()
    assert lives() is not None
    del snapshot
    until_s = time.monotonic() + PATIENCE_S
    while lives() is not None:  # plain Python's thread holds it for a moment more
        assert time.monotonic() < until_s


def test_nothing_is_written_outside_a_slot() -> None:
    slot, tensor = mmap.mmap(-1, 8192), torch.ones(5000, dtype=torch.uint8)
    for offset, nbytes, data_bytes in [
        (0, 5000, 5000),
        (1 << 63, 1, 1),
        (0, 2, 1),
        (10, 4000, 4005),
        (0, 9000, (1 << 64) - 1),
    ]:
        with pytest.raises(ValueError, match="outside"):
            native.Snapshot(
                slot, array("Q", (tensor.data_ptr(), offset, nbytes, 0)), header=b"", data_bytes=data_bytes,
                step=0, incarnation=0, board=None,
            )  # fmt: skip
    with pytest.raises(ValueError, match="outside"):
        native.copy_out(slot, array("Q", (8000, tensor.data_ptr(), 200)))
    with pytest.raises(ValueError, match="outside"):
        native.checksums(slot, array("Q", (1 << 63, 1 << 63)))
    with pytest.raises(ValueError, match="broken length"):
        native.checksums(slot, array("Q", (1,)))
    with pytest.raises(ValueError, match="outside"):
        native.clear(mmap.mmap(-1, 100))
    assert slot[:] == bytes(8192)


def test_populating_changes_no_byte() -> None:
    memory = mmap.mmap(-1, 1 << 20)
    memory[5000] = 7
    native.populate(memory, 4096, 1 << 16)
    assert memory[5000] == 7
    with pytest.raises(ValueError, match="outside"):
        native.populate(memory, 4096, 1 << 20)
