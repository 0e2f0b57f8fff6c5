"""What nodes send to each other, reckoned from what ranks have called."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.core.events import Op
from keepstep.core.summary import GroupInfo, IterationSummary, StreamSummary
from keepstep.mitigate import volumes

GROUPS = {
    "dp": GroupInfo("dp", (0, 2, 4, 6)),
    "tp": GroupInfo("tp", (0, 1)),
    "all": GroupInfo("all", tuple(range(8))),
}
NODE_OF = {rank: rank // 2 for rank in range(8)}


def row(rank: int, step: int, *streams: tuple[str, Op, int, int]) -> IterationSummary:
    told = tuple(
        StreamSummary(group, op, peer, 1, size, step, 0.0, 0.1, 0.1, 0.0, 0.1)
        for group, op, peer, size in streams
    )
    return IterationSummary(rank, step, float(step), 1.0, 0.5, 0.5, streams=told)


def test_an_all_reduce_is_a_ring_and_counts_once_however_many_tell_of_it() -> None:
    rows = [row(rank, step, ("dp", Op.ALLREDUCE, -1, 1000)) for step in range(3) for rank in (0, 2, 4, 6)]
    each = pytest.approx(1500.0)
    assert volumes(rows, GROUPS, NODE_OF) == {(0, 1): each, (1, 2): each, (2, 3): each, (0, 3): each}
    assert volumes(rows[:5], GROUPS, NODE_OF)[(0, 1)] == each  # not all have told of all iterations


def test_halves_of_it_and_messages_add_up() -> None:
    rows = [
        row(0, 0, ("dp", Op.REDUCE_SCATTER, -1, 400), ("dp", Op.ALLGATHER, -1, 400), ("all", Op.SEND, 2, 50)),
        row(2, 0, ("all", Op.RECV, 0, 50), ("all", Op.SEND, 0, 7)),
    ]
    assert volumes(rows, GROUPS, NODE_OF)[(0, 1)] == pytest.approx(2 * 300 + 57)


def test_what_stays_on_a_node_or_is_not_known_is_left_out() -> None:
    rows = [row(0, 0, ("tp", Op.ALLREDUCE, -1, 1000), ("gone", Op.ALLREDUCE, -1, 9), ("all", Op.SEND, 99, 5))]
    assert volumes(rows, GROUPS, NODE_OF) == {}
    assert volumes([], GROUPS, NODE_OF) == {}


def test_iterations_of_a_gpu_that_tell_of_no_transfers_do_not_count() -> None:
    told = [row(0, 0, ("dp", Op.ALLREDUCE, -1, 1000)), row(2, 1, ("dp", Op.ALLREDUCE, -1, 1000))]
    rows = [replace(one, ahead_s=0.1) for one in (*told, *(row(rank, 2) for rank in range(8)))]
    assert volumes(rows, GROUPS, NODE_OF)[(0, 1)] == pytest.approx(750.0)
