from __future__ import annotations

import pytest

from keepstep import wire
from keepstep.launch.controller.lease import Elector
from keepstep.launch.controller.member import LEASE_S, Member
from keepstep.launch.controller_orders import LONG_STILL_S, CutOff, Standstill


def test_it_is_told_once_it_is_longer_than_the_job_ever_paused() -> None:
    standstill = Standstill()
    assert [standstill.look(0, float(at)) for at in range(0, 3000, 500)] == [0.0] * 6  # imports, a first step
    assert standstill.look(1, 3000.0) == 0.0
    assert standstill.look(2, 3020.0) == 0.0  # an evaluation
    assert standstill.look(2, 3100.0) == 0.0
    assert standstill.look(2, 3101.0) == 81.0
    assert standstill.look(3, 3102.0) == 0.0
    assert standstill.look(3, 3429.0) == 0.0  # usual by now
    assert standstill.look(3, 3431.0) == 329.0


def test_another_incarnation_begins_anew_and_who_is_not_counted_stands_never_still() -> None:
    standstill = Standstill()
    standstill.look(50, 0.0)
    assert standstill.look(50, 100.0) == 100.0
    assert standstill.look(0, 101.0) == 0.0
    assert standstill.look(0, 5000.0) == 0.0
    assert standstill.look(1, 5001.0) == 0.0
    assert standstill.look(-2, 6000.0) == standstill.look(-2, 9000.0) == 0.0


@pytest.mark.parametrize("restarts", [0, 3])
def test_without_the_controllers_host_workers_end_once_they_may_be_replaced_or_stand_still(
    restarts: int,
) -> None:
    join = wire.Join("gpu-1", "10.0.0.1", 2, 29500, -1, 2, 2, restarts)
    member = Member(join, 7, lambda: 4711)
    member.received(wire.Placement(0, 0, 2, 2, "10.0.0.1", 29500, 0))
    member.started()
    cut_off = CutOff(member)
    assert cut_off.look(5, 0.0) == ""
    assert member.runs
    member.disconnected(0.0)
    assert cut_off.look(6, LEASE_S - 1) == ""
    assert bool(cut_off.look(7, LEASE_S + 1)) == (restarts > 0)
    if not restarts:
        still_from = LEASE_S + 1
        assert cut_off.look(7, still_from + LONG_STILL_S) == ""  # four times the longest pause, 30 s
        assert cut_off.look(7, still_from + 4 * (LEASE_S - 1) + 1).startswith("no step for 117 s")
        assert cut_off.look(8, still_from + 4 * (LEASE_S - 1) + 2) == ""
        member.connected()
        assert cut_off.look(8, 9999.0) == ""


def test_a_controllers_node_without_a_majority_ends_what_runs_and_is_away_like_the_others() -> None:
    def seat(n: int) -> wire.Seat:
        return wire.Seat(n, f"gpu-{n}", n, f"10.0.0.{n}", 7000)

    member = Member(wire.Join("gpu-1", "10.0.0.1", 2, 29500, -1, 3, 3, 3), 1, lambda: 4711)
    elector = Elector(seat(1), lambda: 0.5)
    member.vote(seat(1), elector)
    member.received(wire.Placement(0, 0, 6, 3, "10.0.0.1", 29500, 0))
    member.started()
    elector.received(wire.Council(1, 1, seat(1), 29400, (seat(1), seat(2), seat(3))), 0.0)
    cut_off = CutOff(member)
    for second in range(40):
        elector.tick(float(second), connected=True)
        why = cut_off.look(5, float(second))
        assert bool(why) == (second >= LEASE_S), second
    assert "majority" in why
    member.halted()
    assert cut_off.look(5, 41.0) == ""  # nothing runs: it only waits
    assert member.away_s(61.0) == 61.0
