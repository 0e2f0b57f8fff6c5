"""Whatever happened to the files of a step: what is brought from there is every bit of what was saved, or nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many
from tests.unit.checkpoint.stored_states import sample_state, taken

from keepstep.checkpoint import native
from keepstep.checkpoint.memory.cache import Cache
from keepstep.checkpoint.memory.incoming import Incoming
from keepstep.checkpoint.memory.slot import Board, Slot
from keepstep.checkpoint.memory.slots import Key, Record, read_header
from keepstep.checkpoint.storage.backend import LocalStorage
from keepstep.checkpoint.storage.manifest import folder_name
from keepstep.checkpoint.storage.persist import conclude, write_shard
from keepstep.checkpoint.storage.source import StorageSource
from keepstep.core.errors import CheckpointError

KEY = Key(3, 12)
SAVED = [taken(sample_state(rank), KEY.step, rank, 2, KEY.incarnation) for rank in range(2)]


@contextmanager
def place() -> Iterator[tuple[Slot, Board]]:
    cache = Cache(1 << 30)
    cache.reserve(1, 1 << 17, 1)
    slot, board = Slot(os.dup(cache.slots(1)[0])), Board(os.dup(cache.board))
    try:
        yield slot, board
    finally:
        slot.close()
        board.close()
        cache.close()


damages = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "remove", "swap"]), st.integers(0, 4), st.integers(0, 1 << 20)),
    max_size=3,
)


def damage(folder: Path, kind: str, which: int, at: int) -> None:
    names = sorted(os.listdir(folder))
    if not names:
        return
    path = folder / names[which % len(names)]
    data = bytearray(path.read_bytes())
    if kind == "remove":
        path.unlink()
    elif kind == "swap":
        other = folder / names[(which + 1) % len(names)]
        path.write_bytes(other.read_bytes())
    elif data:
        at %= len(data)
        if kind == "flip":
            data[at] ^= 1 << at % 8
        path.write_bytes(data if kind == "flip" else data[:at])


@given(damages)
@settings(max_examples=many(150), deadline=None)
def test_every_bit_or_nothing(done: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as where, place() as (slot, board):
        storage = LocalStorage(Path(where))
        for header, data in SAVED:
            write_shard(storage, header, memoryview(data))
        conclude(storage, KEY, range(2), 2, leader=True)
        for one in done:
            damage(Path(where) / folder_name(KEY), *one)

        def room(record: Record) -> Incoming:
            return Incoming(slot, board, 1, 0, record)

        try:
            StorageSource(storage, 2).bring(KEY, 1, room)
        except CheckpointError:
            assert slot.record() is None
            assert board.held(1) == frozenset()
            assert done
            return
        record = slot.record()
        assert record
        assert board.held(1) == {KEY}
        header, data = SAVED[1]
        with memoryview(slot.memory) as view:
            found = read_header(view, record)
            assert found == header
            for entry in header.storages:
                begin = native.DATA_OFFSET + entry.offset
                assert bytes(view[begin : begin + entry.nbytes]) == data[entry.offset :][: entry.nbytes]
