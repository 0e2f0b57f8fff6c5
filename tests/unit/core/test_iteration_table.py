from __future__ import annotations

import msgspec
import numpy as np
import pytest

from keepstep.core.iteration_table import ROW, between, column, medians, table_of
from keepstep.core.summary import IterationSummary, StreamSummary
from keepstep.wire.messages import AgentMessage, PackedIterations, Profile
from keepstep.wire.packed import pack, unpack


def summary(rank: int, step: int, *groups: str) -> IterationSummary:
    streams = tuple(StreamSummary(name, 1, -1, 2, 64, 3, 0.5, 0.75, 0.25, 0.125, 0.0625) for name in groups)
    return IterationSummary(rank, step, 1000.0 + step, 1.0 + rank, 0.5, 0.5, streams=streams)


ROWS = [summary(rank, step, f"tp_{rank}", "world") for step in (3, 4, 5) for rank in (0, 1)] + [summary(2, 5)]


def test_a_table_is_the_same_sequence():
    table = table_of(ROWS)
    assert list(table) == ROWS
    assert len(table) == 7
    assert table[1] == ROWS[1]
    assert table[-1] == ROWS[-1]
    assert list(table[1:3]) == ROWS[1:3]
    assert table_of(table) is table


@pytest.mark.parametrize("rows", [ROWS, table_of(ROWS)])
def test_lists_and_tables_are_looked_through_alike(rows):
    assert column(rows, "rank").tolist() == [0, 1, 0, 1, 0, 1, 2]
    assert [(one.rank, one.step) for one in between(rows, 4, 5)] == [(0, 4), (1, 4)]
    assert medians(rows, "duration_s") == {0: 1.0, 1: 2.0, 2: 3.0}


def test_rows_are_picked_by_rank_and_by_step():
    table = table_of(ROWS)
    assert list(table.of_ranks({1})) == [one for one in ROWS if one.rank == 1]
    assert {one.step for one in table.newest_steps()} == {4, 5}


def test_streams_of_rows_picked_out_in_any_order():
    table = table_of(ROWS).where(np.array([6, 4, 1]))
    assert list(table) == [ROWS[6], ROWS[4], ROWS[1]]
    row, streams = table.flat()
    assert row.tolist() == [1, 1, 2, 2]
    assert [table.names[group] for group in streams["group"]] == ["tp_0", "world", "tp_1", "world"]
    assert len(table.where(np.zeros(3, np.bool_)).flat()[1]) == 0


def test_messages_of_several_nodes_become_one_table():
    sent = [msgspec.msgpack.encode(Profile(1, node, (), packed=pack(rows)))
            for node, rows in enumerate((ROWS[:3], [], ROWS[3:]))]  # fmt: skip
    answers = [msgspec.msgpack.decode(one, type=AgentMessage) for one in sent]
    assert (
        list(unpack([answer.packed for answer in answers if isinstance(answer, Profile) and answer.packed]))
        == ROWS
    )


def test_what_does_not_fit_together_is_left_out():
    good, bad = pack(ROWS[:3]), pack(ROWS[3:])
    for broken in (
        PackedIterations(bad.rows[:-1], bad.streams, bad.names),
        PackedIterations(bad.rows, bad.streams + b"x", bad.names),
        PackedIterations(bad.rows, bad.streams[: len(bad.streams) // 2], bad.names),
        PackedIterations(bad.rows[: ROW.itemsize], bad.streams, bad.names),
        PackedIterations(with_counts(bad.rows, [-2, 6, 2, 2]), bad.streams, bad.names),
    ):
        assert list(unpack([good, broken])) == ROWS[:3]
        assert list(unpack([broken, good])) == ROWS[:3]
    assert list(unpack([])) == []


def test_a_group_number_that_is_none_has_no_name():
    part = pack(ROWS[:1])
    table = unpack([PackedIterations(part.rows, part.streams, ()), pack(ROWS[1:2])])
    assert [stream.group for one in table for stream in one.streams] == ["?", "?", "tp_1", "world"]


def with_counts(rows: bytes, counts: list[int]) -> bytes:
    table = np.frombuffer(rows, ROW).copy()
    table["streams"] = counts
    return table.tobytes()
