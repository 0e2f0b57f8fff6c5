"""Random and damaged files: a clear RingError or a clean skip, never a crash, a hang, or a record that never was."""

from __future__ import annotations

import os
import resource
import struct
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.effort import many
from tests.twins.ring.python_format import record_check

from keepstep.core.errors import RingError
from keepstep.ring import RECORD, RETIRED, RingReader, RingWriter, create

QUIET = settings(
    max_examples=many(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CHECKED = [name for name in RECORD.names or () if name not in ("end_ns", "wait_ns", "flags")]
NEXT_TICKET = 128  # where the header keeps it
TABLES = 4096 + 4096 * 64 + 1024 * 8 + 4096 * 8


@cache
def sound() -> bytes:
    """The content of a sound ring in its second lap."""
    fd = create(64)
    writer = RingWriter(fd, rank=0, world_size=4)
    group = writer.group("world", range(4), "gloo", "")
    pairs = [writer.group(f"pair{n}", [n, n + 7], "gloo", "") for n in range(8)]
    for number in range(100):
        operation = writer.start(1, 1, group, -1, number * 1001, 0, writer.site(f"f.py:{number % 9}"))
        if number % 3:
            operation.waiting()
            operation()
    assert len(pairs) == 8
    content = bytes(RingReader(fd)._native.content())  # pyright: ignore
    os.close(fd)
    return content


@cache
def sound_rows() -> set[tuple[object, ...]]:
    fd = os.memfd_create("sound")
    os.write(fd, sound())
    rows = set(RingReader(fd).snapshot()[CHECKED].tolist())
    os.close(fd)
    return rows


def use_everything(path: Path) -> np.ndarray | None:
    """All that a reader can do; the records it gave, None when the ring was refused."""
    try:
        reader = RingReader(path)
    except RingError:
        return None
    batches = [reader.poll() for _ in range(3)]
    assert sum(len(b.started) for b in batches) <= 64
    assert sum(len(b.finished) for b in batches) <= 64
    assert all(b.lost >= 0 for b in batches)
    assert len(reader.streams()) <= 4096
    groups = reader.groups()
    assert len(groups) <= 32_768
    assert sum(group is not RETIRED for group in groups) <= 1024
    assert len(reader.sites()) <= 4096
    assert reader.header.records == 64
    assert len(reader.in_flight()) <= 64
    reader.save(path.with_suffix(".copy"))
    assert len(RingReader(path.with_suffix(".copy")).snapshot()) <= 64
    return np.concatenate([reader.snapshot(), *(b.started for b in batches), *(b.finished for b in batches)])


def passes_by_chance(slot: bytes | bytearray) -> bool:
    """Whether the check of a record, of 16 bits, fits it: it does to one in 65,536 that are not what was written."""
    ticket, start, _, _, nbytes, seq_peer, thread_site, meta = struct.unpack_from("<8Q", slot)
    return meta >> 48 == record_check((ticket - 2) // 2, start, nbytes, seq_peer, thread_site, meta)


@given(st.binary(max_size=20_000))
@QUIET
def test_random_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.ring"
    path.write_bytes(content)
    assert use_everything(path) is None


@given(st.integers(0, 2**64 - 1))
@QUIET
def test_a_right_header_over_noise(tmp_path: Path, seed: int) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, len(sound()) - 40, dtype=np.uint8).tobytes()
    path = tmp_path / "x.ring"
    path.write_bytes(sound()[:40] + noise)
    rows = use_everything(path)
    assert rows is not None
    assert len(rows) == 0


@given(st.lists(st.tuples(st.integers(0, len(sound()) - 1), st.integers(0, 7)), min_size=1, max_size=6))
@QUIET
def test_flipped_bits_anywhere(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray(sound())
    for at, bit in flips:
        content[at] ^= 1 << bit
    path = tmp_path / "x.ring"
    path.write_bytes(content)
    rows = use_everything(path)
    if rows is not None:
        assert set(rows[CHECKED].tolist()) <= sound_rows()


@given(st.integers(0, 63), st.integers(0, 511))
@QUIET
def test_a_flipped_bit_in_a_record_costs_that_record_only(tmp_path: Path, slot: int, bit: int) -> None:
    content = bytearray(sound())
    content[len(content) - 64 * 64 + slot * 64 + bit // 8] ^= 1 << bit % 8
    path = tmp_path / "x.ring"
    path.write_bytes(content)
    rows = use_everything(path)
    assert rows is not None
    got = set(rows[CHECKED].tolist())
    if not got <= sound_rows():
        assume(not passes_by_chance(content[len(content) - (64 - slot) * 64 :]))
    assert got <= sound_rows()
    assert len(sound_rows() - got) <= 1


@given(
    st.lists(st.tuples(st.integers(8, TABLES // 8 - 1), st.integers(0, 2**64 - 1)), max_size=50),
    st.integers(0, 2**64 - 1),
)
@QUIET
def test_counters_and_tables_are_not_believed(
    tmp_path: Path, words: list[tuple[int, int]], written: int
) -> None:
    content = bytearray(sound())
    struct.pack_into("<Q", content, NEXT_TICKET, written)
    for at, value in words:
        struct.pack_into("<Q", content, at * 8, value)
    path = tmp_path / "x.ring"
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = use_everything(path)
    assert rows is not None
    assert set(rows[CHECKED].tolist()) <= sound_rows()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024


@given(st.integers(0, len(sound()) - 1))
@QUIET
def test_cut_anywhere(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.ring"
    path.write_bytes(sound()[:size])
    assert use_everything(path) is None
