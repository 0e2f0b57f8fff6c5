"""Which snapshot all ranks go on from, which slot may be overwritten, and what a slot is taken for."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import subprocess
import sys
import textwrap
from array import array

import pytest
import torch

from keepstep.checkpoint import native
from keepstep.checkpoint.header import StateHeader, encode_header
from keepstep.checkpoint.memory.cache import Cache
from keepstep.checkpoint.memory.slot import Slot
from keepstep.checkpoint.memory.slots import (
    Key,
    agree,
    damaged_storages,
    newest_common,
    next_slot,
    read_header,
    read_record,
)
from keepstep.checkpoint.state import flatten
from keepstep.core.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("copy_engine")


def k(step: int, incarnation: int = 0) -> Key:
    return Key(incarnation, step)


def test_keys_are_packed_in_their_order() -> None:
    keys = [k(0), k(1), k(2**40), k(0, 1), k(7, 32767)]
    packed = [key.pack() for key in keys]
    assert packed == sorted(packed)
    assert [Key.unpack(number) for number in packed] == keys
    assert Key.unpack(0) is None
    for key in (k(2**47), k(0, 2**15), k(-1)):
        with pytest.raises(CheckpointError, match="too large"):
            key.pack()


def test_all_ranks_go_on_from_the_newest_that_each_has() -> None:
    assert agree({0: {k(10), k(11)}, 1: {k(9), k(10)}}) == k(10)
    assert agree({0: {k(10), k(3, 1)}, 1: {k(10), k(3, 1)}}) == k(
        3, 1
    )  # the later incarnation went back on purpose
    assert agree({0: set(), 1: set()}) is None


def test_nothing_is_restored_when_nothing_is_common() -> None:
    with pytest.raises(CheckpointError) as said:
        agree({0: {k(10)}, 1: {k(10, 1)}, 2: set(), 3: set()})
    lacks = (
        "(ranks 2-3: nothing (never saved, or lost); ranks 0: step 10 of incarnation 0; ranks 1: step 10 of"
    )
    assert lacks in str(said.value)
    with pytest.raises(CheckpointError) as said:
        agree({0: {k(10)}, 1: set(), 2: set()}, unreadable={0, 2})
    assert "(ranks 1: nothing (never saved, or lost); ranks 2: nothing (damaged, or not to be read);" in str(
        said.value
    )
    with pytest.raises(CheckpointError, match="no snapshot is whole on every rank"):
        agree({0: {k(10)}, 1: set()})


@pytest.mark.parametrize(
    ("keys", "complete", "busy", "slot"),
    [
        ([None, None], None, set(), 0),
        ([k(5), None], None, set(), 1),
        ([k(5), k(6)], k(6), set(), 0),
        ([k(5), k(6)], k(5), set(), None),  # other ranks may still need 5
        ([k(5), k(6)], None, set(), None),
        ([k(5), k(6)], k(6), {0}, None),
        ([k(7), k(6), k(5)], k(7), {2}, 1),
        ([k(9), k(1, 1)], k(1, 1), set(), 0),
        ([None, k(6)], k(6), {0}, None),
    ],
)
def test_what_may_be_needed_is_not_overwritten(
    keys: list[Key | None], complete: Key | None, busy: set[int], slot: int | None
) -> None:
    assert next_slot(keys, complete, busy) == slot


@pytest.mark.parametrize("seed", range(30))
def test_whenever_ranks_die_they_have_a_snapshot_in_common(seed: int) -> None:
    """Ranks save every step with two slots, each at its own pace and against what it last saw of the others."""
    chance, ranks = random.Random(seed), 4
    slots: list[list[Key | None]] = [[None, None] for _ in range(ranks)]
    step, filling = [0] * ranks, [-1] * ranks
    common: list[Key] = []
    for _ in range(3000):
        rank = chance.randrange(ranks)
        if filling[rank] >= 0:
            slots[rank][filling[rank]] = k(step[rank])
            filling[rank] = -1
        else:
            held = [frozenset(key for key in of_rank if key) for of_rank in slots]
            found = next_slot(slots[rank], newest_common(held))
            if found is not None:
                filling[rank], slots[rank][found] = found, None
                step[rank] += 1
        now = newest_common(frozenset(key for key in of_rank if key) for of_rank in slots)
        if now is not None:
            common.append(now)
        else:
            assert not common
    assert common == sorted(common)
    assert common[-1].step > 100


STATE = {"w": torch.arange(3000.0), "b": torch.ones(7, dtype=torch.bfloat16), "n": 5}


def filled(step: int = 4) -> tuple[mmap.mmap, StateHeader]:
    header, spans = flatten(STATE, step=step, incarnation=1)
    text = encode_header(header)
    slot = mmap.mmap(-1, native.slot_bytes(header.data_bytes, len(text), len(spans)))
    plan = array("Q")
    for entry, span in zip(header.storages, spans, strict=True):
        plan.extend((span.pointer, entry.offset, entry.nbytes, 0))
    native.Snapshot(
        slot, plan, header=text, data_bytes=header.data_bytes, step=step, incarnation=1, board=None
    ).wait()
    return slot, header


def whole(slot: mmap.mmap) -> StateHeader | None:
    """What a restore would take from the slot."""
    with memoryview(slot) as view:
        record = read_record(view)
        if record is None:
            return None
        header = read_header(view, record)
        if damaged_storages(view, header, 1):
            raise CheckpointError("damaged storages")
        return header


def test_a_sealed_slot_reads_as_what_was_saved() -> None:
    slot, header = filled()
    found = whole(slot)
    assert found is not None
    assert (found.step, found.tree, found.tensors) == (header.step, header.tree, header.tensors)
    assert all(entry.checksum for entry in found.storages)


def test_no_flipped_byte_of_a_slot_is_taken_for_a_snapshot() -> None:
    slot, header = filled()
    begin = native.DATA_OFFSET + -(-header.data_bytes // 64) * 64
    text = begin + len(encode_header(header))
    padding = set(range(text, begin + -(-(text - begin) // 64) * 64))
    for entry in header.storages:
        end = native.DATA_OFFSET + entry.offset + entry.nbytes
        padding |= set(range(end, -(-end // 64) * 64))
    chance = random.Random(1)
    places = [*range(64), *range(begin, len(slot)), *chance.sample(range(native.DATA_OFFSET, begin), 400)]
    for place in places:
        if place in padding:
            continue
        for mask in {1 << chance.randrange(8), 0xFF}:
            slot[place] ^= mask
            with contextlib.suppress(CheckpointError):
                assert whole(slot) is None, place
            slot[place] ^= mask
    assert whole(slot) is not None


def test_no_cut_slot_is_taken_for_a_snapshot() -> None:
    slot, _ = filled()
    data = slot[:]
    for length in [
        *range(200),
        *range(native.DATA_OFFSET - 3, native.DATA_OFFSET + 3),
        *range(len(data) - 999, len(data)),
    ]:
        with memoryview(data[:length]) as view:
            assert read_record(view) is None
    for length in range(len(data) - 999, len(data), 7):
        short = mmap.mmap(-1, len(data))
        short[:length] = data[:length]
        with contextlib.suppress(CheckpointError):
            assert whole(short) is None or data[length:].strip(b"\0") == b""


WRITER = """
    import ctypes, mmap, os, sys
    from array import array
    from keepstep.checkpoint import native
    from keepstep.checkpoint.header import StateHeader, StorageEntry, encode_header

    slots = [mmap.mmap(int(fd), 0) for fd in sys.argv[2:]]
    nbytes = int(sys.argv[1])
    source = mmap.mmap(-1, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(source))
    storages = tuple(StorageEntry(i * nbytes // 4, nbytes // 4) for i in range(4))
    plan = array("Q", [n for e in storages for n in (address + e.offset, e.offset, e.nbytes, 0)])
    os.write(1, b"ready")
    for step in range(1, 1 << 40):
        ctypes.memset(address, step % 251, nbytes)
        header = StateHeader(step, 0, 0, 1, "", nbytes, None, storages, ())
        native.Snapshot(slots[step % 2], plan, header=encode_header(header), data_bytes=nbytes,
                        step=step, incarnation=0, board=None, threads=2).wait()
"""


@pytest.mark.parametrize("copy_engine", ["native"], indirect=True)
def test_a_writer_killed_at_any_moment_leaves_the_snapshot_before() -> None:
    cache, chance, nbytes = Cache(1 << 30), random.Random(3), 16 << 20
    cache.reserve(0, native.slot_bytes(nbytes, 4096, 4), 2)
    slots = [Slot(os.dup(descriptor)) for descriptor in cache.slots(0)]
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(nbytes), *map(str, cache.slots(0))]
    unsealed = 0
    try:
        for kill in range(100):
            if kill >= 12 and unsealed:
                break  # one in ten or so comes while a slot is written
            for slot in slots:
                slot.clear()
            seen = _run_and_kill(command, cache.slots(0), slots, chance)
            found = [whole(slot.memory) for slot in slots]
            unsealed += found.count(None)
            assert max(header.step for header in found if header) >= seen
            for header, slot in zip(found, slots, strict=True):
                if header is not None:
                    begin = native.DATA_OFFSET
                    assert slot.memory[begin : begin + nbytes].count(header.step % 251) == nbytes
    finally:
        for slot in slots:
            slot.close()
        cache.close()
    assert unsealed > 0


def _run_and_kill(
    command: list[str], descriptors: list[int], slots: list[Slot], chance: random.Random
) -> int:
    """Run the writer and kill it some time after it sealed a step; gives that step."""
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=descriptors)
    try:
        assert writer.stdout is not None
        assert writer.stdout.read(5) == b"ready"
        seen, wanted = 0, chance.randrange(2, 9)
        while seen < wanted:
            seen = max(record.step if (record := slot.record()) else 0 for slot in slots)
        if chance.random() < 0.8:
            while all(slot.record() for slot in slots):
                pass  # until it is writing
        return seen
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
