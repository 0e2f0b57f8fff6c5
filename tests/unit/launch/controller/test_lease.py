"""One elector: whom it grants a lease, when it stands, and what it makes of councils."""

from __future__ import annotations

from msgspec import structs

from keepstep import wire
from keepstep.launch.controller.lease import TTL_S, UNREACHED_S, Elector
from keepstep.launch.controller.member import Member

SEATS = tuple(wire.Seat(n + 1, f"gpu-{n}", 100 + n, f"10.0.0.{n}", 7000) for n in range(3))
COUNCIL = wire.Council(1, 1, SEATS[0], 0, SEATS)


def electors() -> list[Elector]:
    found = [Elector(seat, lambda: 0.5) for seat in SEATS]
    for one in found:
        assert one.received(COUNCIL, 0.0) == wire.Kept(1, 1)
    return found


def deliver(found: list[Elector], asks: list[tuple[wire.Seat, wire.Ask]], now_s: float) -> list[bool]:
    granted: list[bool] = []
    for seat, ask in asks:
        answer = found[seat.token - 1].asked(ask, now_s)
        assert answer is not None
        granted.append(answer.granted)
        found[ask.by - 1].answered(answer, now_s)
    return granted


def test_the_first_leader_is_elected_by_nobody_and_renews() -> None:
    found = electors()
    assert [one.leads for one in found] == [1, 0, 0]
    asks = found[0].tick(0.1, connected=True)
    assert not found[0].may_act(0.1)
    assert {ask.previous for _, ask in asks} == {1}
    assert deliver(found, asks, 0.1) == [True, True]
    assert found[0].may_act(0.1 + TTL_S - 0.01)
    assert not found[0].may_act(0.2 + TTL_S)


def test_of_two_nodes_the_one_that_is_left_elects_nobody() -> None:
    one = electors()[1]
    assert one.can_elect
    one.received(wire.Council(1, 2, SEATS[0], 0, SEATS[:2], SEATS), 1.0)
    one.received(wire.Council(1, 3, SEATS[0], 0, SEATS[:2]), 2.0)
    assert not one.can_elect


def test_nobody_stands_while_a_lease_runs_or_the_controller_is_there() -> None:
    found = electors()
    assert found[1].tick(TTL_S - 0.1, connected=False) == []
    assert found[1].tick(TTL_S + 9, connected=True) == []


def test_one_is_elected_when_the_leader_is_gone_and_the_other_learns_it() -> None:
    found = electors()
    assert found[1].tick(TTL_S + 0.1, connected=False) == []  # begins to wait, each for another time
    asks = found[1].tick(TTL_S + 1.1, connected=False)
    assert [ask.term for _, ask in asks] == [2, 2]
    deliver(found, asks[1:], TTL_S + 1.1)
    assert (found[1].leads, found[1].may_act(TTL_S + 1.2)) == (2, True)
    found[1].serves(4000)
    deliver(found, found[1].tick(TTL_S + 1.3, connected=False)[1:], TTL_S + 1.3)
    assert found[2].leader == wire.Leads(2, "10.0.0.1", 4000)


def test_a_former_leader_that_lets_another_lead_is_not_away() -> None:
    """Its controller could not be kept running there; its workers train on."""
    found = electors()
    found[0].resign(0.5)
    found[1].tick(TTL_S + 0.1, connected=False)
    asks = found[1].tick(TTL_S + 1.1, connected=False)
    deliver(found, asks[1:], TTL_S + 1.1)
    assert (found[1].leads, found[1].inheritance) == (2, COUNCIL)
    deliver(found, asks[:1], TTL_S + 1.1)
    assert found[1].inheritance == structs.replace(COUNCIL, leader=SEATS[1])


def test_a_lease_that_runs_is_granted_to_nobody_else() -> None:
    one = electors()[1]
    ask = wire.Ask(1, 2, 3, 2, 0, (1, 1))
    answers = [one.asked(ask, TTL_S - 0.1), one.asked(ask, TTL_S + 0.1)]
    assert [answer is not None and answer.granted for answer in answers] == [False, True]


def test_a_term_is_granted_once() -> None:
    one = electors()[1]
    asked = [one.asked(wire.Ask(1, 2, by, 2, 0, (1, 1)), 99.0 + by) for by in (3, 1, 3)]
    assert [answer is not None and answer.granted for answer in asked] == [True, False, True]


def test_one_that_knows_an_older_council_is_not_elected() -> None:
    one = electors()[1]
    one.received(structs.replace(COUNCIL, version=2), 1.0)
    answer = one.asked(wire.Ask(1, 2, 3, 2, 0, (1, 1)), 99.0)
    assert answer == wire.Answer(1, 2, False, 1)


def test_a_launcher_that_began_anew_is_another_one() -> None:
    again = Elector(structs.replace(SEATS[1], token=9), lambda: 0.5)
    assert again.asked(wire.Ask(1, 2, 3, 2, 0, (1, 1)), 99.0) is None
    answer = again.asked(wire.Ask(1, 9, 3, 2, 0, (1, 1)), 99.0)
    assert answer is not None
    assert not answer.granted


def test_a_leader_that_was_replaced_knows_it_from_the_first_answer() -> None:
    found = electors()
    found[1].asked(wire.Ask(1, 2, 3, 2, 0, (1, 1)), 99.0)
    deliver(found, found[0].tick(100.0, connected=True)[:1], 100.0)
    assert found[0].leads == 0
    assert (
        found[0].received(structs.replace(COUNCIL, version=2), 100.0) is None
    )  # its controller is the old one


def test_how_long_a_leader_has_been_without_the_lease() -> None:
    found = electors()
    deliver(found, found[0].tick(0.0, connected=True), 0.0)
    for now_s in (1.0, 2.0, 3.0, 20.0):
        found[0].tick(now_s, connected=True)
    assert found[0].idle_s(20.0) == 18.0


def test_who_hosts_the_controller_is_told_as_it_moves() -> None:
    join = wire.Join("gpu-1", "10.0.0.1", 2, 29500, max_restarts=2)
    part = Member(join, 101, lambda: 30000)

    def told() -> list[bool]:
        return [one.hosts_controller for one in part.greet() if isinstance(one, wire.Join)]

    elector = Elector(SEATS[1], lambda: 0.5)
    part.vote(SEATS[1], elector)
    assert elector.received(COUNCIL, 0.0) is not None
    assert told() == [False]
    elector.leads = 2
    assert told() == [True]


def unreached(found: list[Elector], until_s: float, since_s: float = 0.0) -> None:
    """The first renews its lease every second, and reaches the controller beside it at ``since_s`` only."""
    for second in range(int(since_s), int(until_s) + 1):
        deliver(found, found[0].tick(float(second), connected=second == since_s), float(second))


def test_one_that_does_not_reach_its_controller_gives_the_lease_up() -> None:
    found = electors()
    unreached(found, UNREACHED_S - 1)
    assert found[0].may_act(UNREACHED_S - 1)
    found[0].tick(UNREACHED_S, connected=False)
    assert (found[0].leads, found[0].may_act(UNREACHED_S)) == (0, False)
    now_s = UNREACHED_S + TTL_S + 0.1
    found[1].tick(now_s, connected=False)
    deliver(found, found[1].tick(now_s + 2, connected=False), now_s + 2)
    assert found[1].may_act(now_s + 2)


def test_one_that_reaches_it_again_keeps_it() -> None:
    found = electors()
    unreached(found, UNREACHED_S - 1)
    unreached(found, 2 * UNREACHED_S - 2, since_s=UNREACHED_S - 1)
    assert found[0].leads == 1


def test_nobody_gives_up_what_nobody_else_could_have() -> None:
    alone = Elector(SEATS[0], lambda: 0.5)
    alone.received(structs.replace(COUNCIL, seats=SEATS[:1]), 0.0)
    for second in range(100):
        assert alone.tick(float(second), connected=False) == []
    assert alone.leads == 1


def test_a_leader_that_most_still_grant_stays_whatever_term_few_others_have_come_to() -> None:
    found = electors()
    asks = found[0].tick(0.1, connected=True)
    deliver(found, asks, 0.1)
    late = wire.Answer(asks[0][1].number, 2, False, 9)
    found[0].answered(late, 1.0)
    assert found[0].may_act(1.0)
    found[0].answered(late, 0.2 + TTL_S)
    assert found[0].leads == 0


def test_who_refuses_one_that_was_elected_learns_where_the_controller_is() -> None:
    one = electors()[1]
    assert one.asked(wire.Ask(1, 2, 3, 2, 0, (1, 1)), 99.0) == wire.Answer(1, 2, True, 2)
    elected = wire.Ask(1, 2, 1, 3, 3, (1, 1), "10.0.0.0", 4000)
    assert one.asked(elected, 99.1) == wire.Answer(1, 2, False, 2)
    assert one.leader == wire.Leads(3, "10.0.0.0", 4000)
