from __future__ import annotations

from typing import Any

import numpy as np

from keepstep.agent.ranks.cut import Cut
from keepstep.agent.ranks.intervals import NOTHING
from keepstep.agent.ranks.summarise import MOST_BLOCKS, blocks_of
from keepstep.core.events import Flag, Kind, Op, Phase
from keepstep.ring.reader import RECORD

MS = 1_000_000


def record(kind: Kind, op: int, start_ms: float, end_ms: float, peer: int = -1, wait_ms: float = 0) -> Any:
    row = np.zeros(1, RECORD)
    row["kind"], row["op"], row["peer"] = kind, op, peer
    row["start_ns"], row["end_ns"], row["wait_ns"] = start_ms * MS, end_ms * MS, wait_ms * MS
    row["flags"] = Flag.END_BY_WAIT if wait_ms else Flag.SYNC_KNOWN
    return row


def cut(*rows: Any, start_ms: int = 0, end_ms: int = 100) -> Cut:
    return Cut(7, start_ms * MS, end_ms * MS, np.concatenate(rows), NOTHING)


def told(one: Cut) -> list[tuple[str, int, int, float, float, float]]:
    return [
        (
            b.kind,
            b.peer,
            b.index,
            round(b.start_s * 1e3, 6),
            round(b.duration_s * 1e3, 6),
            round(b.own_s * 1e3, 6),
        )
        for b in blocks_of(one, 3)
    ]


def test_passes_and_messages_in_order() -> None:
    found = told(
        cut(
            record(Kind.P2P, Op.RECV, 0, 12, peer=1, wait_ms=10),
            record(Kind.PHASE, Phase.MODEL, 12, 32),
            record(Kind.P2P, Op.SEND, 32, 50, peer=5, wait_ms=49),
            record(Kind.PHASE, Phase.MODEL, 33, 48),
            record(Kind.PHASE, Phase.BACKWARD, 60, 90),
            record(Kind.COLLECTIVE, Op.ALLREDUCE, 80, 90),
            record(Kind.PHASE, Phase.OPTIMIZER, 91, 99),
        )
    )
    assert found == [
        ("forward", -1, 0, 12, 20, 20),
        ("forward", -1, 1, 33, 15, 15),
        ("backward", -1, 0, 60, 30, 20),
        ("send", 5, 0, 32, 18, 17),
        ("recv", 1, 0, 0, 12, 10),
    ]


def test_what_is_in_flight_ends_with_the_iteration_and_what_came_before_is_left_out() -> None:
    found = told(
        cut(
            record(Kind.PHASE, Phase.BACKWARD, 5, 20),
            record(Kind.PHASE, Phase.BACKWARD, 60, 0),
            start_ms=10,
        )
    )
    assert found == [("backward", -1, 0, 60, 40, 40)]


def test_more_blocks_than_anybody_wants_are_none() -> None:
    rows = [record(Kind.PHASE, Phase.MODEL, 1, 2)] * (MOST_BLOCKS + 1)
    assert blocks_of(cut(*rows), 3) == ()
