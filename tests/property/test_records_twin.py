"""What the agent does with every record: C++ against its twin with numpy, on records that hold anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many
from tests.twins.agent import python_records as twin_records

from keepstep.agent.ranks import records
from keepstep.agent.ranks.intervals import Union
from keepstep.ring import RECORD

Rows = Any

record = st.tuples(
    st.integers(-3, 100),  # start
    st.sampled_from([0, 0, 1, 2, 5, 40, 200]),  # length; 0: in flight
    st.sampled_from([0, 0, 1, 3, 60]),  # wait after the start; 0: none
    st.integers(0, 3),  # bytes
    st.integers(-2, 2),  # peer
    st.integers(1, 2),  # thread
    st.integers(-1, 3),  # group
    st.sampled_from([1, 1, 2, 3, 3, 5]),  # kind
    st.integers(1, 8),  # operation
    st.sampled_from([0, 1, 2, 4, 8, 9, 9, 13]),  # flags
    st.integers(1, 3),  # tickets since the one before
)
tables = st.lists(record, max_size=30)
pauses = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), max_size=3)


def table(rows: list[tuple[int, ...]]) -> Rows:
    found, ticket = np.zeros(len(rows), RECORD), -1
    for at, (start, length, wait, size, peer, thread, group, kind, op, flags, step) in enumerate(rows):
        ticket += step
        end, waits = start + length if length else 0, start + wait if wait else 0
        found[at] = (ticket, start, end, waits, size, at + 1, peer, thread, 0, group, kind, op, flags)
    return found


def fields(rows: Any) -> list[tuple[int, ...]]:
    """Records without what lies between their fields."""
    return np.frombuffer(packed(rows), RECORD).tolist()


def packed(rows: Any) -> bytes:
    return rows.tobytes() if isinstance(rows, np.ndarray) else bytes(rows)


@settings(max_examples=many(300))
@given(tables, pauses, st.sets(st.integers(-1, 3)), st.booleans())
def test_an_iteration_is_summed_alike(
    rows: list[tuple[int, ...]], paused: list[tuple[int, int]], groups: set[int], throughout: bool
) -> None:
    given_rows = table(rows)
    union = Union(np.array([a for a, _ in paused], np.int64), np.array([a + b for a, b in paused], np.int64))
    span = 10, 90, union.starts, union.ends
    assert records.own_times(given_rows, *span) == twin_records.own_times(given_rows, *span)
    for told in (None, groups):
        ours = records.streams(given_rows, *span, told, throughout)
        assert ours == twin_records.streams(given_rows, *span, told, throughout)
    operations = given_rows[given_rows["kind"] != 3]
    theirs = twin_records.waits(operations, 90)
    assert [packed(one) for one in records.waits(operations, 90)] == [packed(one) for one in theirs]


@settings(max_examples=many(200))
@given(tables, st.integers(0, 40), st.integers(0, 40), st.integers(-5, 90))
def test_records_are_told_alike(rows: list[tuple[int, ...]], first: int, end: int, since: int) -> None:
    given_rows = table(rows)
    for kind in (1, 3, 5):
        assert records.of_kind(given_rows, kind) == twin_records.of_kind(given_rows, kind)
    assert records.outline(given_rows) == twin_records.outline(given_rows)
    for bounds in ((), (first, end), (first, end, since)):
        assert records.symbols(given_rows, *bounds) == twin_records.symbols(given_rows, *bounds)


@settings(max_examples=many(200))
@given(st.lists(st.tuples(tables, st.integers(0, 3), st.integers(0, 120)), max_size=4))
def test_records_are_kept_alike(batches: list[tuple[list[tuple[int, ...]], int, int]]) -> None:
    """Batches overlap, as those of a slow thread do: a record may come late, twice, or only with its end."""
    ours, twin = records.Pending(), twin_records.Pending()
    for rows, overlap, edge in batches:
        started = table(rows)
        started["ticket"] += max(len(twin) - overlap, 0)
        finished = started[started["end_ns"] != 0]
        started["end_ns"][::2] = 0
        assert ours.add(started[overlap:], finished) == twin.add(started[overlap:], finished)
        assert len(ours) == len(twin)
        assert fields(ours.rows()) == fields(twin.rows())
        assert fields(ours.begun_before(edge)) == fields(twin.begun_before(edge))
        assert fields(ours.repeating_from(edge)) == fields(twin.repeating_from(edge))
        assert ours.phases_since(edge) == twin.phases_since(edge)
        ours.drop_before(edge)
        twin.drop_before(edge)
        assert fields(ours.rows()) == fields(twin.rows())


def test_too_many_are_dropped_alike() -> None:
    ours, twin = records.Pending(), twin_records.Pending()
    none = np.zeros(0, RECORD)
    for batch in range(3):
        rows = np.zeros(50_000, RECORD)
        rows["ticket"] = np.arange(50_000) + 50_000 * batch
        assert ours.add(rows, none) == twin.add(rows, none) == (batch < 2)
    assert fields(ours.rows()) == fields(twin.rows())


@pytest.mark.parametrize("rows", [bytes(1), bytes(63), bytes(65), np.zeros(8), memoryview(bytes(128))[1:65]])
def test_what_is_no_table_is_refused(rows: Any) -> None:
    with pytest.raises(ValueError, match="rows"):
        records.outline(rows)


def test_numbers_of_a_damaged_ring_do_no_harm() -> None:
    rows = table([(0, 5, 0, 1, 0, 1, 0, 1, 1, 9, 1)] * 4)
    for name in ("start_ns", "end_ns", "wait_ns"):
        for value in (-(1 << 63), (1 << 63) - 1):
            rows[name] = value
            records.own_times(rows, 0, 100, b"", b"")
            assert records.streams(rows, 0, 100, b"", b"") is not None
            records.symbols(rows)
