"""Whatever stands in a link table: its reader refuses it or gives rows that can be, and never fails."""

from __future__ import annotations

import itertools
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.core.errors import RingError
from keepstep.core.link_counters import WINDOW
from keepstep.detect.link_flow import judge
from keepstep.ring.link_reader import MOST_UNDER_WAY, LinkReader
from keepstep.ring.link_table import FEWEST, create, total_bytes

COMMS, ROWS, ROW = 4096, 4096 + 255 * 384, 1216
STAGES = ("finished", "completed", "posted", "ready", "started")
WORDS = st.one_of(
    st.integers(0, 200),
    st.integers(0, (1 << 64) - 1),
    st.sampled_from([1 << 63, (1 << 64) - 1, 10**9, 5 << 48 | 7]),
)
KEYS = st.builds(
    lambda send, channel, comm, generation, peer: (
        1 | send << 1 | channel << 2 | comm << 10 | generation << 18 | peer << 34
    ),
    *(
        st.integers(0, 1),
        st.integers(0, 255),
        st.sampled_from([0, 1, 255]),
        st.integers(0, 2),
        st.integers(0, 1 << 24),
    ),
)


@given(
    st.lists(
        st.tuples(st.integers(0, FEWEST - 1), KEYS, st.lists(WORDS, min_size=15, max_size=15)), max_size=6
    ),
    st.lists(st.tuples(st.integers(8, total_bytes(FEWEST) // 8 - 1), WORDS), max_size=40),
    st.integers(0, 1 << 62),
)
@settings(max_examples=many(300), deadline=None)
def test_rows_that_cannot_be_are_left_out(
    rows: list[tuple[int, int, list[int]]], words: list[tuple[int, int]], now_ns: int
) -> None:
    descriptor = create(FEWEST)
    try:
        os.pwrite(descriptor, struct.pack("<Q", 1 << 2 | 2), COMMS)
        for place, key, content in rows:
            os.pwrite(descriptor, struct.pack("<16Q", key, *content), ROWS + place * ROW)
        for place, word in words:
            os.pwrite(descriptor, struct.pack("<Q", word), 8 * place)
        seen = LinkReader(descriptor).snapshot(now_ns)
        assert seen.windows.shape == (len(seen.links), WINDOW)
        for lower, upper in itertools.pairwise(STAGES):
            assert (seen.links[lower] <= seen.links[upper]).all()
        assert (seen.links["started"] - seen.links["finished"] <= MOST_UNDER_WAY).all()
        assert (seen.windows["time_ns"] <= now_ns).all()
        for comm in seen.communicators:
            assert comm.name.isascii()
            assert comm.last is None  # no check of random words is right
        judged = judge(seen)
        assert len(judged) == len(seen.links)
        assert (judged["quiet_s"] >= 0).all()
    finally:
        os.close(descriptor)


def header_of(descriptor: int) -> tuple[int, ...]:
    """The words that are checked: not the fourth, a size that the reader computes itself."""
    words = struct.unpack("<5Q", os.pread(descriptor, 40, 0))
    return (*words[:3], words[4])


@given(st.lists(st.tuples(st.integers(0, 4), WORDS), min_size=1, max_size=3))
@settings(max_examples=many(100), deadline=None)
def test_another_header_is_refused(words: list[tuple[int, int]]) -> None:
    descriptor = create(FEWEST)
    try:
        before = header_of(descriptor)
        for place, word in words:
            os.pwrite(descriptor, struct.pack("<Q", word), 8 * place)
        if header_of(descriptor) == before:
            return
        with pytest.raises(RingError):
            LinkReader(descriptor)
    finally:
        os.close(descriptor)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "links"
    for content in (b"", b"x" * 100, bytes(total_bytes(FEWEST)), bytes(total_bytes(FEWEST) + 3)):
        path.write_bytes(content)
        with pytest.raises(RingError):
            LinkReader(str(path))
    for where in ("/nonexistent", "/dev/zero", str(tmp_path)):
        with pytest.raises(RingError):
            LinkReader(where)


@pytest.mark.parametrize("count", [-1, 0, 15, (1 << 16) + 1])
def test_a_table_has_a_bounded_number_of_links(count: int) -> None:
    with pytest.raises(ValueError, match="links"):
        create(count)


def test_a_saved_copy_is_read_as_it_was(tmp_path: Path) -> None:
    descriptor = create(FEWEST)
    try:
        os.pwrite(descriptor, struct.pack("<Q", 1 << 2 | 2), COMMS)
        os.pwrite(descriptor, struct.pack("<6Q", 1 | 1 << 18 | 3 << 34, 5, 5, 5, 4, 4), ROWS)
        path = tmp_path / "links"
        path.write_bytes(os.pread(descriptor, total_bytes(FEWEST), 0))
        live, saved = LinkReader(descriptor).snapshot(10**9), LinkReader(str(path)).snapshot(10**9)
        assert np.array_equal(live.links, saved.links)
        assert [(int(row["peer"]), int(row["posted"])) for row in saved.links] == [(3, 5)]
        with pytest.raises(OSError, match="Operation not permitted"):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
