"""How an iteration's time passes from call to call of a host whose waits are not recorded."""

from __future__ import annotations

import numpy as np
import pytest

from keepstep.agent.ranks.cut import Cut
from keepstep.agent.ranks.event_buffer import Rows
from keepstep.agent.ranks.intervals import NOTHING, Union
from keepstep.agent.ranks.summarise import summarise
from keepstep.agent.ranks.time_between_calls import time_between_calls
from keepstep.core.events import Kind, Op
from keepstep.ring.reader import RECORD

BIG = 1 << 20
COLLECTIVE, P2P = Kind.COLLECTIVE, Kind.P2P
CALLS = [
    (10, COLLECTIVE, Op.ALLREDUCE, BIG),
    (30, P2P, Op.RECV, BIG),
    (60, COLLECTIVE, Op.ALLREDUCE, BIG),
    (65, P2P, Op.SEND, BIG),
    (70, COLLECTIVE, Op.ALLREDUCE, 4),
]


def rows(calls: list[tuple[int, Kind, Op, int]]) -> Rows:
    table: Rows = np.zeros(len(calls), RECORD)
    for row, (start_ns, kind, op, nbytes) in zip(table, calls, strict=True):
        row["start_ns"], row["end_ns"] = start_ns, start_ns + 1
        row["kind"], row["op"], row["bytes"] = kind, op, nbytes
    return table


def cut(calls: list[tuple[int, Kind, Op, int]], pauses: Union = NOTHING) -> Cut:
    return Cut(0, 0, 100, rows(calls), pauses)


@pytest.mark.parametrize("order", [1, -1])
def test_time_after_receives_and_small_collectives_is_not_between_calls(order: int) -> None:
    one = cut(CALLS[::order])
    assert time_between_calls(one) == (20 + 5 + 5, 30)


def test_pauses_and_calls_of_the_iteration_before_do_not_count() -> None:
    pause = Union(np.array([40], np.int64), np.array([50], np.int64))
    one = cut([(-5, P2P, Op.RECV, BIG), *CALLS], pause)
    assert time_between_calls(one) == (20 + 5 + 5, 30 - 10)


def test_without_calls_nothing_is_known() -> None:
    one = cut([])
    assert time_between_calls(one) == (-1, 0)
    assert summarise(one, 0, {}, on_device=True).between_calls_s == -1.0


def test_only_ranks_with_groups_of_a_device_have_them() -> None:
    known = summarise(cut(CALLS), 0, {}, on_device=True)
    assert (known.between_calls_s, known.after_receives_s) == pytest.approx((30e-9, 30e-9))
    assert summarise(cut(CALLS), 0, {}).between_calls_s == -1.0
