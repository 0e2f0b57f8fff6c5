"""Native parts and their twins in plain Python: the same bytes, whichever side writes and which reads."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many
from tests.twins.checkpoint import python_native
from tests.twins.ring import python_format, python_reader, python_writer

from keepstep.checkpoint import native as checkpoint_native
from keepstep.ring import native as ring_native
from keepstep.ring.reader import RECORD, STREAM

MAKERS = {"native": ring_native.create, "python": python_format.create}
WRITERS: dict[str, Any] = {"native": ring_native.RingWriter, "python": python_writer.RingWriter}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("seed", range(5))
def test_rings_are_the_same(maker: str, writer: str, seed: int) -> None:
    dice = random.Random(seed)
    descriptor = MAKERS[maker](64)
    try:
        written = WRITERS[writer](descriptor, rank=3, world_size=8, incarnation=2)
        readers: list[Any] = [ring_native.Reader(descriptor), python_reader.Reader(descriptor)]
        groups = [
            written.group("world", list(range(8)), "gloo", "default"),
            written.group("odd", [1, 3, 5, 9], "nccl", "ungleich ä"),
        ]
        site = written.site("train.py:3 step")
        operations: list[Any] = []
        for number in range(300):
            _act(dice, written, operations, [*groups, -1], site, number)
            if dice.random() < 0.2:
                _assert_same_poll(readers)
        one, two = readers
        assert tuple(one.header()) == tuple(two.header())
        for only_in_flight in (False, True):
            assert bytes(one.snapshot(only_in_flight)) == bytes(two.snapshot(only_in_flight))
        streams = [np.frombuffer(reader.streams(), STREAM) for reader in readers]
        assert (streams[0] == streams[1]).all()
        assert one.groups() == two.groups()
        assert one.sites() == two.sites() == ["", "train.py:3 step"]
        assert one.writer_lives() is two.writer_lives() is True
        assert bytes(one.content()) == bytes(two.content())
        del written, operations
        assert one.writer_lives() is two.writer_lives() is False
    finally:
        os.close(descriptor)


def _act(
    dice: random.Random, written: Any, operations: list[Any], groups: list[int], site: int, n: int
) -> None:
    what = dice.random()
    if what < 0.6 or not operations:
        kind, op = dice.choice((1, 2, 3)), dice.choice((1, 10, 11))
        operations.append(
            written.start(kind, op, dice.choice(groups), dice.randrange(-1, 8), n * 10, 1, site)
        )
    elif what < 0.8:
        dice.choice(operations)()
    elif what < 0.87:
        dice.choice(operations).fail()
    elif what < 0.95:
        dice.choice(operations).waiting()
    else:
        written.start(1, 1, 1 << 20)  # no such group: dropped, and counted


def _assert_same_poll(readers: list[Any]) -> None:
    one, two = (reader.poll() for reader in readers)
    assert bytes(one[0] or b"") == bytes(two[0] or b"")
    ended = [np.sort(np.frombuffer(bytes(told[1] or b""), RECORD), order="ticket") for told in (one, two)]
    assert ended[0].tolist() == ended[1].tolist()
    assert one[2:] == two[2:]


@given(st.binary(max_size=200), st.integers(0, (1 << 64) - 1), st.integers(0, 70_000))
@settings(max_examples=many(100), deadline=None)
def test_checksums_are_the_same(data: bytes, before: int, more: int) -> None:
    data += bytes(range(256)) * (more // 256)
    assert python_native.checksum(data, before) == checkpoint_native.checksum(data, before)
    whole = checkpoint_native.checksum(data)
    assert python_native.combine(before, whole, len(data)) == checkpoint_native.combine(
        before, whole, len(data)
    )


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=6), st.binary(max_size=100))
@settings(max_examples=many(60), deadline=None)
def test_slots_are_the_same(sizes: list[tuple[int, bool]], header: bytes) -> None:
    sources = [np.random.default_rng(n).integers(0, 256, size, np.uint8) for n, (size, _) in enumerate(sizes)]
    plan, offset = np.zeros((len(sizes), 4), np.uint64), 0
    for n, (size, urgent) in enumerate(sizes):
        plan[n] = (sources[n].ctypes.data, offset, size, urgent)
        offset += (size + 63) // 64 * 64
    slots: list[bytes] = []
    for native in (checkpoint_native, python_native):
        slot, board = bytearray(native.slot_bytes(offset, len(header), len(sizes))), bytearray(16)
        snapshot = native.Snapshot(
            slot, plan.tobytes(), header=header, data_bytes=offset, step=7, incarnation=2,
            board=board, board_index=1, board_value=99,
        )  # fmt: skip
        snapshot.wait(True)
        assert list(snapshot.sums()) == [python_native.checksum(source.tobytes()) for source in sources]
        slots.append(bytes(slot) + bytes(board))
    assert slots[0] == slots[1]
