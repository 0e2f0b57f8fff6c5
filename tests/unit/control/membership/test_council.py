"""The leader's half: what is proposed when, and what is settled by whom."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from keepstep.control.control_server import RunFiles
from keepstep.control.membership.council import Councils
from keepstep.control.membership.rendezvous import Launcher
from keepstep.wire.messages import Council, Kept, Placement, Seat, Stop

LAUNCHERS = [Launcher(f"gpu-{n}", 100 + n) for n in range(12)]


def seat(n: int) -> Seat:
    return Seat(n + 1, f"gpu-{n}", 100 + n, f"10.0.0.{n}", 7000)


def table(*nodes: int, incarnation: int = 0) -> dict[Launcher, Placement]:
    return {
        LAUNCHERS[n]: Placement(rank, rank, len(nodes), len(nodes), "10.0.0.0", 29500, incarnation)
        for rank, n in enumerate(nodes)
    }


def councils(*nodes: int, leader: int = 0, term: int = 1) -> Councils:
    made = Councils(leader + 1, term, 29400)
    arrive(made, *nodes)
    return made


def arrive(made: Councils, *nodes: int) -> None:
    """They join, and their ports are reached."""
    for n in nodes:
        made.here(LAUNCHERS[n], seat(n))
    for spares_too in ((0, 1), range(12)):
        for launcher, _ in made.electors.to_reach(table(*spares_too)):
            made.electors.reached(launcher)


def settle(made: Councils, *nodes: int) -> list[bool]:
    assert made.newest is not None
    return [made.kept(LAUNCHERS[n], Kept(made.newest.term, made.newest.version)) for n in nodes]


def names(council: Council | None) -> tuple[set[str], set[str]]:
    assert council is not None
    return {one.node for one in council.seats}, {one.node for one in council.former}


def test_placements_wait_for_a_majority() -> None:
    made = councils(0, 1, 2)
    assert made.tick(table(0, 1, 2), 0.0) is not None
    assert not made.allows(0)
    assert settle(made, 2, 0, 1) == [False, True, False]
    assert made.allows(0)
    assert not made.allows(1)


def test_answers_to_an_older_council_count_for_nothing() -> None:
    made = councils(0, 1, 2)
    made.tick(table(0, 1, 2), 0.0)
    settle(made, 0, 1)
    made.tick(table(0, 1, 2, incarnation=1), 1.0)
    assert [made.kept(LAUNCHERS[n], Kept(1, 1)) for n in range(3)] == [False] * 3
    assert not made.allows(1)


def test_seats_change_in_two_steps() -> None:
    made = councils(0, 1, 2)
    made.tick(table(0, 1, 2), 0.0)
    settle(made, 0, 1, 2)
    made.electors.gone(LAUNCHERS[2], 1.0)
    assert made.tick(table(0, 1, 2), 2.0) is None  # it may come back
    arrive(made, 3)
    assert names(made.tick(table(0, 1, 3, incarnation=1), 7.0)) == (
        {"gpu-0", "gpu-1", "gpu-3"},
        {"gpu-0", "gpu-1", "gpu-2"},
    )
    assert settle(made, 3, 0) == [False, False]  # no majority of the former ones
    assert settle(made, 1) == [True]
    assert names(made.tick(table(0, 1, 3, incarnation=1), 8.0)) == ({"gpu-0", "gpu-1", "gpu-3"}, set())


def test_newcomers_that_die_at_once_block_nothing() -> None:
    made = councils(0, 1, 2)
    made.tick(table(0, 1, 2), 0.0)
    settle(made, 0, 1, 2)
    arrive(made, 3, 4, 5, 6)
    grown = table(0, 1, 2, 3, 4, 5, 6, incarnation=1)
    assert len(names(made.tick(grown, 1.0))[0]) == 7
    for n in (3, 4, 5, 6):
        made.electors.gone(LAUNCHERS[n], 2.0)
    assert names(made.tick(grown, 9.0)) == ({"gpu-0", "gpu-1", "gpu-2"}, {"gpu-0", "gpu-1", "gpu-2"})
    assert settle(made, 0, 1) == [False, True]


def test_what_another_leader_left_is_settled_first_as_it_is() -> None:
    first = councils(0, 1, 2)
    first.tick(table(0, 1, 2), 0.0)
    settle(first, 0, 1, 2)
    arrive(first, 3)
    first.electors.gone(LAUNCHERS[2], 1.0)
    left = first.tick(table(0, 1, 3, incarnation=1), 9.0)
    assert left is not None

    second = councils(1, 2, 3, leader=1, term=2)
    second.restore(left)
    again = second.tick(table(1, 2, 3, incarnation=2), 10.0)
    assert again == structs.replace(left, term=2, version=left.version + 1, leader=seat(1), port=29400)
    assert second.tick(table(1, 2, 3, incarnation=2), 10.1) is None
    assert settle(second, 1, 3, 2) == [False, False, True]
    assert second.allows(1)
    assert not second.allows(2)


def test_spares_have_a_say_in_small_jobs_but_never_half_of_it() -> None:
    def elect(*members: int) -> set[str]:
        return names(councils(*range(12)).tick(table(*members), 0.0))[0]

    assert elect(0) == {"gpu-0"}
    assert elect(0, 1) == {"gpu-0", "gpu-1", "gpu-2"}
    assert elect(0, 1, 2) == {f"gpu-{n}" for n in range(5)}
    assert elect(0, 1, 2, 3) == {f"gpu-{n}" for n in range(7)}
    assert elect(*range(6)) == {f"gpu-{n}" for n in range(7)}
    assert len(elect(*range(9)) - {f"gpu-{n}" for n in range(9)}) == 0


def test_a_spare_that_hosts_the_controller_counts_as_one() -> None:
    assert names(councils(0, 1, 2, 3, 4).tick(table(1, 2, 3), 0.0))[0] == {f"gpu-{n}" for n in range(5)}


def test_two_of_three_members_are_lost_at_once_and_spares_stand_in_for_them() -> None:
    made = councils(0, 1, 2, 3, 4)
    made.tick(table(0, 1, 2), 0.0)
    settle(made, 0, 1, 2)
    for n in (1, 2):
        made.electors.gone(LAUNCHERS[n], 1.0)
    placed = table(0, 3, 4, incarnation=1)
    assert names(made.tick(placed, 1.0)) == ({"gpu-0", "gpu-3", "gpu-4"}, {f"gpu-{n}" for n in range(5)})
    assert settle(made, 0, 3, 4) == [False, False, True]
    assert made.allows(1)


def test_another_spare_has_the_seat_of_one_that_is_away_at_once() -> None:
    made = councils(0, 1, 2, 3)
    made.tick(table(0, 1), 0.0)
    settle(made, 0, 1)
    made.electors.gone(LAUNCHERS[2], 1.0)
    assert names(made.tick(table(0, 1), 1.0))[0] == {"gpu-0", "gpu-1", "gpu-3"}


def test_who_is_away_keeps_its_seat_for_a_while_where_nobody_else_could_have_it() -> None:
    made = councils(0, 1, 2)
    made.tick(table(0, 1, 2), 0.0)
    settle(made, 0, 1)
    made.electors.gone(LAUNCHERS[2], 1.0)
    assert made.tick(table(0, 1, 2), 2.0) is None
    assert names(made.tick(table(0, 1, 2), 7.0))[0] == {"gpu-0", "gpu-1"}


def test_nobody_has_two_seats_when_the_leaders_own_launcher_is_away() -> None:
    made = councils(0, 1, 2)
    made.tick(table(0, 1, 2), 0.0)
    settle(made, 0, 1)
    made.electors.gone(LAUNCHERS[0], 1.0)
    made.electors.gone(LAUNCHERS[2], 1.0)
    council = made.tick(table(0, 1, 2, incarnation=1), 2.0)
    assert council is not None
    assert sorted(one.token for one in council.seats) == [1, 2, 3]


def test_who_leaves_loses_its_seat_at_once_and_votes_on_that() -> None:
    made = councils(0, 1, 2)
    made.tick(table(0, 1), 0.0)
    settle(made, 0, 1, 2)
    made.electors.leaves(LAUNCHERS[2])
    assert names(made.tick(table(0, 1), 1.0)) == ({"gpu-0", "gpu-1"}, {"gpu-0", "gpu-1", "gpu-2"})
    assert settle(made, 0, 2) == [False, True]
    made.electors.gone(LAUNCHERS[2], 1.0)
    assert names(made.tick(table(0, 1), 1.0)) == ({"gpu-0", "gpu-1"}, set())


def test_seats_are_spread_over_the_table_and_only_electors_have_it() -> None:
    made = councils(*range(12))
    council = made.tick(table(*range(12)), 0.0)
    chosen = sorted(int(name[4:]) for name in names(council)[0])
    assert (len(chosen), chosen[0], chosen[-1] > 8) == (7, 0, True)
    rows = [len(told.table) for one in LAUNCHERS if (told := made.told(one)) is not None]
    assert sorted(rows) == [0] * 5 + [12] * 7


def test_who_cannot_be_reached_has_no_seat_and_holds_up_nothing() -> None:
    made = councils(0, 1)
    made.here(LAUNCHERS[2], seat(2))
    three = table(0, 1, 2)
    assert made.electors.to_reach(three) == [(LAUNCHERS[2], seat(2))]
    assert made.electors.to_reach(three) == []  # it is being tried
    assert names(made.tick(three, 0.0)) == ({"gpu-0", "gpu-1"}, set())
    assert settle(made, 2, 0) == [False, True]
    made.electors.reached(LAUNCHERS[2])
    assert names(made.tick(three, 1.0)) == ({"gpu-0", "gpu-1", "gpu-2"}, {"gpu-0", "gpu-1"})
    made.electors.gone(LAUNCHERS[2], 2.0)
    made.here(LAUNCHERS[2], seat(2))
    assert made.electors.to_reach(three) == []  # it elects already


def test_of_thousands_a_few_are_reached_and_others_when_those_have_gone() -> None:
    many = [Launcher(f"gpu-{n}", n) for n in range(1, 3000)]
    made = councils(0)
    for n, one in enumerate(many):
        made.here(one, Seat(n + 2, one.node, one.pid, "10.0.0.9", 7000))
    grown = {
        one: Placement(n, n, 3000, 3000, "10.0.0.0", 29500, 0) for n, one in enumerate([LAUNCHERS[0], *many])
    }
    tried = [launcher for launcher, _ in made.electors.to_reach(grown)]
    assert len(tried) < 40
    assert made.electors.to_reach(grown) == []
    for launcher in tried[:5]:
        made.electors.gone(launcher, 1.0)
    assert len(made.electors.to_reach(grown)) == 5


def test_without_a_seat_beside_it_nothing_is_held_up() -> None:
    made = Councils(0, 0)
    assert made.tick(table(0, 1), 0.0) is None
    assert made.allows(0)


def test_what_the_job_ends_with_is_no_matter_of_another_term(tmp_path: Path) -> None:
    first, second = (RunFiles(tmp_path, tmp_path / f"council-{term}.json") for term in (1, 2))
    first.write_stop(Stop(1, "cut off"))
    assert first.stop() == Stop(1, "cut off")
    assert second.stop() is None
    assert RunFiles(tmp_path).stop() is None


def test_nothing_counts_before_the_leaders_own_launcher_has_it() -> None:
    made = councils(0, 1, 2)
    made.tick(table(0, 1, 2), 0.0)
    assert settle(made, 1, 2) == [False, False]  # its lease would count by other electors than theirs
    assert not made.allows(0)
    assert settle(made, 0) == [True]


def test_an_end_is_told_once_it_holds_under_any_leader() -> None:
    stop = Stop(79, "stopped by an operator", by_operator=True)
    made = councils(0, 1, 2)
    made.tick(table(0, 1, 2), 0.0)
    settle(made, 0, 1)
    made.end(stop)
    assert made.stop is None
    ended = made.tick(table(0, 1, 2), 1.0)
    assert ended is not None
    assert (ended.stop, made.stop) == (stop, None)
    assert settle(made, 0, 2) == [False, True]
    assert made.stop == stop

    second = councils(1, 2, leader=2, term=2)
    second.restore(ended)
    second.end(Stop(1, "node gpu-0 lost"))
    assert second.tick(table(0, 1, 2), 5.0) is not None
    assert second.stop is None
    settle(second, 1, 2)
    assert second.stop == stop


def test_without_elections_an_end_is_told_at_once() -> None:
    made = Councils(0, 1, 29400)
    made.end(Stop(1, "rank 3 died"))
    assert made.stop == Stop(1, "rank 3 died")
