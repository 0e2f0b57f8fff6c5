"""Sealed states in a cache, made without a worker, and read back."""

from __future__ import annotations

import time
from array import array
from contextlib import ExitStack
from typing import Any

from tests.unit.checkpoint.stored_states import taken

from keepstep.checkpoint import native
from keepstep.checkpoint.header import encode_header
from keepstep.checkpoint.memory.cache_server import Open, Reserve, ask
from keepstep.checkpoint.memory.incoming import Incoming
from keepstep.checkpoint.memory.slot import Board, Slot
from keepstep.checkpoint.memory.slots import Key, Record, slot_bytes


def seal_state(
    address: str,
    owner: int,
    state: Any,
    key: Key,
    *,
    rank: int = 0,
    world_size: int = 1,
    slots: int = 2,
    index: int = 0,
) -> bytes:
    """Have a state in a slot of a cache; the bytes of its storages."""
    header, data = taken(state, key.step, rank, world_size, key.incarnation)
    text = encode_header(header)
    table = array("Q", [storage.checksum or 0 for storage in header.storages]).tobytes()
    record = Record(
        key.step,
        key.incarnation,
        len(data),
        len(text),
        len(header.storages),
        native.checksum(table, native.checksum(text)),
    )
    with ExitStack() as stack:
        answer = ask(
            address, Reserve(owner, slot_bytes(record), slots, tuple(i for i in range(8) if i != index))
        )
        board = Board(answer.board)
        stack.callback(board.close)
        found = [Slot(descriptor, apart=True) for descriptor in answer.slots]
        for slot in found:
            stack.callback(slot.close)
        with Incoming(found[index], board, owner, index, record) as incoming:
            body = bytearray(len(incoming.body))
            body[: len(data)] = data
            at = -(-len(data) // 64) * 64
            body[at : at + len(text)] = text
            body[len(body) - len(table) :] = table
            incoming.body[:] = body
            incoming.seal()
    return data


def stands(address: str, owner: int) -> dict[Key, bytes]:
    """The bytes of the storages of every sealed state of an owner; slots and board tell the same, a seal apart."""
    for _ in range(500):
        found, told = _look(address, owner)
        if set(found) == told:
            return found
        time.sleep(0.01)
    raise AssertionError(f"slots hold {set(found)}, the board tells {told}")


def _look(address: str, owner: int) -> tuple[dict[Key, bytes], frozenset[Key]]:
    answer = ask(address, Open(owner))
    board = Board(answer.board)
    found: dict[Key, bytes] = {}
    for descriptor in answer.slots:
        slot = Slot(descriptor, apart=True)
        record = slot.record()
        if record:
            found[record.key] = bytes(
                slot.memory[native.DATA_OFFSET : native.DATA_OFFSET + record.data_bytes]
            )
        slot.close()
    told = board.held(owner)
    board.close()
    return found, told
