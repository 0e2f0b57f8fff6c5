"""What counts as progress of a rank that has stood still."""

from __future__ import annotations

import numpy as np
from tests.unit.agent import agent_generator as g

from keepstep.agent.ranks.event_buffer import Rows
from keepstep.agent.ranks.track import RankTrack
from keepstep.core.events import Flag
from keepstep.core.summary import GroupInfo

EMPTY = np.zeros(0, g.RECORD)
S = 1_000 * g.MS


def all_reduce(ticket: int, start_ns: int) -> Rows:
    row = np.zeros(1, g.RECORD)
    row["ticket"], row["seq"], row["start_ns"], row["group"] = ticket, ticket, start_ns, g.WORLD
    row["kind"], row["op"], row["flags"] = g.COLLECTIVE, g.ALLREDUCE, g.SYNC_KNOWN
    return row


def test_an_operation_that_fails_ends_no_standstill() -> None:
    track = RankTrack(0, "here", (0,))
    in_flight = all_reduce(1, 1 * S)

    def take(started: Rows, finished: Rows, now_ns: int) -> None:
        track.take(started, finished, 0, now_ns, lambda: [GroupInfo("0", (0, 1))])

    def looks(first_s: int, last_s: int) -> list[str]:
        found = [track.look(second * S, lambda: in_flight) for second in range(first_s, last_s)]
        return [one.kind for one in found if one is not None]

    take(in_flight, EMPTY, 1 * S)
    assert looks(2, 1000) == ["hang"]
    assert track.waiting
    failed = in_flight.copy()
    failed["end_ns"], failed["flags"] = 1000 * S, g.SYNC_KNOWN | Flag.FAILED
    in_flight, progress = EMPTY, track.progress
    take(EMPTY, failed, 1000 * S)
    assert looks(1001, 1010) == []
    assert track.waiting
    assert (track.progress, track.last_progress_ns) == (progress, 1 * S)
    backward = all_reduce(2, 1000 * S)
    backward["kind"], backward["group"], backward["end_ns"] = g.PHASE, -1, 1010 * S  # it winds up
    take(backward, backward, 1010 * S)
    in_flight = all_reduce(3, 1010 * S)
    take(in_flight, EMPTY, 1010 * S)
    assert looks(1011, 1012) == []
    ended = in_flight.copy()
    ended["end_ns"] = 1012 * S
    in_flight = EMPTY
    take(EMPTY, ended, 1012 * S)
    assert looks(1012, 1013) == ["resumed"]


def test_a_phase_that_is_interrupted_ends_no_standstill() -> None:
    track = RankTrack(0, "here", (0,))
    forward = all_reduce(1, 1 * S)
    forward["kind"], forward["op"], forward["group"] = g.PHASE, 8, -1
    track.take(forward, EMPTY, 0, 1 * S, list)
    looks = [track.look(second * S, lambda: forward) for second in range(2, 1000)]
    assert [one.kind for one in looks if one is not None] == ["hang"]
    interrupted = forward.copy()
    interrupted["end_ns"], interrupted["flags"] = 1000 * S, Flag.FAILED
    track.take(EMPTY, interrupted, 0, 1000 * S, list)
    assert track.look(1001 * S, lambda: EMPTY) is None
    assert track.last_progress_ns == 1 * S
