"""A snapshot that comes from elsewhere counts only when every byte of it is what was announced."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from tests.unit.checkpoint.conftest import Served
from tests.unit.checkpoint.stored_states import same, sample_state

from keepstep.checkpoint import native
from keepstep.checkpoint.memory.cache_server import Open, Reserve, ask
from keepstep.checkpoint.memory.incoming import Incoming
from keepstep.checkpoint.memory.slot import Board, Slot, backup_of
from keepstep.checkpoint.memory.slots import Key, Record
from keepstep.checkpoint.snapshot import Snapshots, Worker
from keepstep.core.errors import CheckpointError

KEY = Key(0, 7)


def _saved(served: Served, rank: int = 0) -> tuple[Record, bytes]:
    """Record and body of a snapshot of rank 0 in the cache."""
    with closing(Snapshots(served.address, Worker(rank=rank), lambda row: [row])) as snapshots:
        snapshots.save(sample_state(1), KEY.step, overlap=False)
    answer = ask(served.address, Open(rank))
    Board(answer.board).close()
    slots = [Slot(descriptor) for descriptor in answer.slots]
    record = next(filter(None, (slot.record() for slot in slots)))
    held = next(slot for slot in slots if slot.record())
    end = native.slot_bytes(record.data_bytes, record.header_bytes, record.storages)
    body = bytes(held.memory[native.DATA_OFFSET : end])
    for slot in slots:
        slot.close()
    return record, body


@pytest.fixture
def place(served: Served) -> tuple[Slot, Board, int]:
    owner = backup_of(0)
    answer = ask(served.address, Reserve(owner, 1 << 20, 1))
    return Slot(answer.slots[0]), Board(answer.board), owner


def test_what_was_saved_elsewhere_is_restored_bit_by_bit(served: Served) -> None:
    record, body = _saved(served)
    answer = ask(served.address, Open(0))
    board, slots = Board(answer.board), [Slot(descriptor) for descriptor in answer.slots]
    for index, slot in enumerate(slots):  # as after the loss of the node
        slot.clear()
        board.put(0, index, None)
    with Incoming(slots[1], board, 0, 1, record) as incoming:
        incoming.body[:] = body
        assert incoming.seal().step == KEY.step
    assert board.held(0) == {KEY}
    for slot in slots:
        slot.close()
    board.close()
    found = {name: torch.zeros(0) if name == "rng" else None for name in sample_state(1)}
    found.pop("rng")
    with closing(Snapshots(served.address, Worker(), lambda row: [row])) as snapshots:
        assert snapshots.load(found) == KEY.step
    assert same(found, sample_state(1))


@pytest.mark.parametrize("at", [0, 64, -1, -9, -300])
def test_a_flipped_bit_anywhere_is_found(served: Served, place: tuple[Slot, Board, int], at: int) -> None:
    record, body = _saved(served)
    slot, board, owner = place
    damaged = bytearray(body)
    damaged[at] ^= 4
    with Incoming(slot, board, owner, 0, record) as incoming:
        incoming.body[:] = damaged
        with pytest.raises(CheckpointError, match="damaged"):
            incoming.seal()
    assert slot.record() is None
    assert not board.held(owner)


def test_half_of_it_never_counts(served: Served, place: tuple[Slot, Board, int]) -> None:
    record, body = _saved(served)
    slot, board, owner = place
    with Incoming(slot, board, owner, 0, record) as incoming:
        incoming.body[:64] = body[:64]
    assert slot.record() is None
    assert slot.lock()


def test_a_record_that_claims_another_step_is_refused(served: Served, place: tuple[Slot, Board, int]) -> None:
    record, body = _saved(served)
    slot, board, owner = place
    with Incoming(slot, board, owner, 0, record._replace(step=8)) as incoming:
        incoming.body[:] = body
        with pytest.raises(CheckpointError, match="another snapshot"):
            incoming.seal()


def test_a_snapshot_that_is_larger_than_the_slot_is_refused(
    served: Served, place: tuple[Slot, Board, int]
) -> None:
    record, _ = _saved(served)
    slot, board, owner = place
    with pytest.raises(CheckpointError, match="a slot of 1048576 bytes"):
        Incoming(slot, board, owner, 0, record._replace(data_bytes=1 << 30))
    assert slot.lock()
