"""Loops without an optimizer are cut by their calls alone; what a set-up calls is no loop."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from keepstep.agent.ranks.custom import CustomLoop
from keepstep.agent.ranks.event_buffer import EventBuffer, Rows
from keepstep.core.events import Kind, Op
from keepstep.ring import RECORD

MS = 1_000_000


def calls(starts_ns: Iterable[int]) -> Rows:
    starts = np.array(list(starts_ns), np.int64)
    rows = np.zeros(len(starts), RECORD)
    rows["ticket"], rows["seq"] = np.arange(len(starts)) + 1, np.arange(len(starts)) + 1
    rows["start_ns"], rows["end_ns"] = starts, starts + 10_000
    rows["kind"], rows["op"], rows["peer"], rows["bytes"] = Kind.COLLECTIVE, Op.ALLREDUCE, -1, 8
    return rows


def edges(rows: Rows) -> list[tuple[int, int]]:
    buffer = EventBuffer()
    buffer.add(rows, rows)
    return CustomLoop().edges(buffer, int(rows["end_ns"][-1]))


def test_calls_at_a_pace_are_a_loop() -> None:
    assert len(edges(calls(1 + 10 * MS * number for number in range(400)))) >= 398


def test_bursts_of_calls_in_a_set_up_are_none() -> None:
    """Megatron makes its groups and broadcasts its weights so, with seconds of other work in between."""
    bursts = (1 + 2000 * MS * burst + 50_000 * number for burst in range(4) for number in range(60))
    assert edges(calls(bursts)) == []


def test_calls_within_microseconds_are_none() -> None:
    assert edges(calls(1 + 70_000 * number for number in range(60_000))) == []
