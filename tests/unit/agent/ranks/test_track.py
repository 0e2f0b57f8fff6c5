"""What counts as progress of a rank that has stood still."""

from __future__ import annotations

import numpy as np
from tests.unit.agent import agent_generator as g

from keepstep.agent.ranks.event_buffer import Rows
from keepstep.agent.ranks.track import RankTrack
from keepstep.core.events import Flag
from keepstep.core.summary import DeviceCalls, GroupInfo, OpInFlight

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


def test_a_host_far_ahead_of_its_device_is_asked_on_while_that_works() -> None:
    """As at the end of an epoch, where the host waits for all the steps that it has enqueued."""
    group = GroupInfo("0", (0, 1), backend="cuda:nccl")
    track = RankTrack(0, "here", (0,))
    call = all_reduce(1, 1 * S)
    call["end_ns"], call["flags"] = 1 * S, 0
    track.take(call, call, 0, 1 * S, lambda: [group])
    working = DeviceCalls((OpInFlight("0", int(g.ALLREDUCE), -1, 1, 1.0),), is_whole=True)

    def look(second: int, still_s: float) -> str:
        track.know_device(track.progress, working, second * S, still_s)
        found = track.look(second * S, lambda: EMPTY)
        return "" if found is None else found.kind

    assert track.has_device
    assert not any(look(second, 0.2) for second in range(2, 400, 2))
    assert track.waiting
    assert track.watch.hang.overdue_s == 0
    assert track.asks_device
    # An answer does not stand for ever: the process may be held up and tell no more.
    kinds = [found.kind for second in range(399, 1000) if (found := track.look(second * S, lambda: EMPTY))]
    assert kinds == ["hang"]
    call["ticket"] = 2
    track.take(call, call, 0, 1001 * S, lambda: [group])
    found = track.look(1001 * S, lambda: EMPTY)
    assert found is not None
    assert found.kind == "resumed"
    assert not track.asks_device
