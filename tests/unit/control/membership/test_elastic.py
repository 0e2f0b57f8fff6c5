"""A job of MIN:MAX nodes: when it goes on with fewer, when it takes nodes in, and when it refuses either."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from tests.unit.control.membership.test_reforming import SETTINGS, Job, kinds

from keepstep.control.effects import Effect, Send, Tell
from keepstep.control.membership.pauses import Growth, OperatorOrders, Pauses, RankMoves
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.reforming_orders import End, Lapsed, Order
from keepstep.control.membership.rendezvous import Rendezvous
from keepstep.control.membership.roll_call import Occasion
from keepstep.wire.messages import Halted, Join, Message, Operate, Operated, Seal

RIGID = "what rank 0 saves is not known to be the same on all ranks"


class Elastic(Job):
    """``least`` to ``nodes`` nodes of two ranks each."""

    def __init__(self, nodes: int = 3, *, least: int = 2, **how: float) -> None:
        self.least, self.why_withheld = least, ""
        super().__init__(nodes)
        settings = replace(SETTINGS, **how)  # type: ignore[arg-type]
        self.reforming = Reforming(self.rendezvous, settings, lambda rank, now_s: False, self.spending)
        self.effects: list[Effect] = []
        core = (self.rendezvous, self.reforming)
        self.pauses = Pauses(*core, lambda: self.why_withheld, self.effects)
        self.operating = OperatorOrders(*core, self.pauses, self.effects)
        self.moves, self.growing = RankMoves(*core, self.pauses), Growth(*core, self.pauses)

    def tick(self, peers: Collection[int], now_s: float) -> list[Order]:
        self.operating.tick()
        return self.pauses.tick(peers, now_s)

    @property
    def sent(self) -> list[tuple[tuple[int, ...], Message]]:
        sends = [one for one in self.effects if isinstance(one, Send)]
        return [(one.peers, one.message) for one in sends if not isinstance(one.message, Operated)]

    @property
    def answers(self) -> list[Operated]:
        sends = [one for one in self.effects if isinstance(one, Send)]
        return [one.message for one in sends if isinstance(one.message, Operated)]

    def come(self, number: int, incarnation: int = -1, *, ranks: int = 2, now_s: float = 0.0) -> list[Order]:
        join = Join(
            f"gpu-{number}", f"10.0.0.{number}", ranks, 29500, number if number < self.nodes else -1,
            self.least, self.nodes, self.max_restarts, incarnation,
        )  # fmt: skip
        self.rendezvous.join(self.launcher(number), join, number, now_s)
        return (
            self.reforming.here(self.launcher(number), incarnation, now_s) if hasattr(self, "effects") else []
        )

    def lose(self, number: int, now_s: float) -> list[Order]:
        self.go(number, now_s)
        return self.wait(now_s, now_s + 3.1)

    def places(self) -> dict[str, tuple[int, int, int, int]]:
        return {
            name: (one.node_rank, one.first_rank, one.world_size, one.node_count)
            for name, one in sorted(self.table().items())
        }


def told(orders: list[Order]) -> str:
    return "; ".join(one.text for one in orders if isinstance(one, Tell))


def test_without_a_spare_the_others_go_on_after_a_while_with_ranks_without_a_gap() -> None:
    job = Elastic()
    job.lose(1, 5.0)
    orders = job.halt(0, 2, now_s=9.0)
    assert told(orders) == "node gpu-1 lost; waits 30 s for a spare, then goes on with 2 of 3 nodes"
    assert job.wait(9.1, 38.9) == []
    orders = job.wait(39.0, 39.0)
    assert kinds(orders) == ["Renew", "Tell"]
    assert told(orders) == "node gpu-1 lost; fewer nodes, 2 after 3; all nodes begin again, restart 1 of 2"
    assert job.places() == {"gpu-0": (0, 0, 4, 2), "gpu-2": (1, 2, 4, 2)}
    assert {(one.incarnation, one.master_port) for one in job.table().values()} == {(1, 4000)}


def test_a_new_first_node_is_where_the_others_meet() -> None:
    job = Elastic(shrink_s=0.0)
    job.lose(0, 5.0)
    assert kinds(job.halt(1, 2, now_s=9.0)) == ["Renew", "Tell"]
    assert job.places() == {"gpu-1": (0, 0, 4, 2), "gpu-2": (1, 2, 4, 2)}
    assert {(one.master_addr, one.master_port) for one in job.table().values()} == {("10.0.0.1", 4001)}


def test_a_spare_that_comes_while_it_is_waited_for_takes_the_place() -> None:
    job = Elastic()
    job.lose(1, 5.0)
    job.halt(0, 2, now_s=9.0)
    assert kinds(job.come(7, now_s=20.0)) == ["HaltThese"]
    assert kinds(job.halt(7, now_s=21.0)) == ["Renew", "Tell"]
    assert job.places()["gpu-7"] == (1, 2, 6, 3)


def test_spares_take_what_places_they_can_and_the_others_are_left_out() -> None:
    job = Elastic(4, least=2, shrink_s=0.0)
    job.come(8)
    job.go(1, 5.0)
    job.lose(2, 5.0)
    job.wait(8.2, 15.1)  # many at once
    orders = job.halt(0, 3, 8, now_s=16.0)
    assert kinds(orders) == ["Renew", "Tell"]
    assert job.places() == {"gpu-0": (0, 0, 6, 3), "gpu-3": (2, 4, 6, 3), "gpu-8": (1, 2, 6, 3)}


def test_it_never_goes_below_the_minimum() -> None:
    job = Elastic(3, least=3)
    job.lose(1, 5.0)
    assert "waits for the other nodes" in told(job.halt(0, 2, now_s=9.0))
    assert job.wait(9.1, 608.9) == []
    job = Elastic(3, least=2)
    job.go(1, 5.0)
    job.lose(2, 5.0)
    job.wait(8.2, 15.1)
    said = told(job.halt(0, now_s=16.0))
    assert said.endswith("600 s at most; it does not go on with fewer nodes: --nnodes says 2 at least")
    assert job.wait(16.1, 615.9) == []
    (end,) = job.wait(616.0, 616.0)
    assert isinstance(end, End)


def test_ranks_whose_states_are_not_known_to_be_the_same_are_waited_for() -> None:
    job = Elastic()
    job.lose(1, 5.0)
    job.halt(0, now_s=9.0)
    said = told(job.reforming.halted(job.launcher(2), Halted(0, 4002, rigid=RIGID), 9.0))
    assert said.endswith(f"600 s at most; it does not go on with fewer nodes: {RIGID}")
    assert job.wait(9.1, 500.0) == []
    job.come(7, now_s=501.0)
    assert kinds(job.halt(7, now_s=502.0)) == ["Renew", "Tell"]
    assert job.places()["gpu-7"] == (1, 2, 6, 3)


def shrunk(*, backups: bool = True) -> Elastic:
    job = Elastic(shrink_s=0.0, backups=int(backups))
    job.lose(1, 5.0)
    job.halt(0, 2, now_s=9.0)
    assert len(job.places()) == 2
    return job


def test_who_comes_is_taken_in_at_a_step_that_all_have_sealed_and_it_is_no_restart() -> None:
    job = shrunk()
    assert job.come(7, now_s=20.0) == []
    for second in (20.0, 24.9):
        job.growing.tick(second)
        assert job.sent == []
    job.growing.tick(25.0)
    job.growing.tick(60.0)
    assert job.sent == [((0, 2), Seal(1, alike=True, warm=True))]
    assert job.pauses.sealed(job.launcher(0), 1, 41, "", 61.0) == []
    assert kinds(job.pauses.sealed(job.launcher(2), 1, 42, "", 62.0)) == ["HaltThese"]
    assert job.halt(0, 2, incarnation=1, now_s=63.0) == []  # the newcomer says first which port is free
    orders = job.halt(7, incarnation=1, now_s=64.0)
    assert told(orders) == "gpu-7 can be taken in; more nodes, 3 after 2; all nodes begin again"
    assert job.places() == {"gpu-0": (0, 0, 6, 3), "gpu-2": (1, 2, 6, 3), "gpu-7": (2, 4, 6, 3)}
    assert (job.reforming.incarnation, job.reforming.restarts) == (2, 1)


def test_those_that_come_one_after_the_other_are_taken_in_together() -> None:
    job = Elastic(4, least=1, shrink_s=0.0)
    job.go(1, 5.0)
    job.lose(2, 5.0)
    job.wait(8.2, 15.1)
    job.halt(0, 3, now_s=16.0)
    job.come(7, now_s=20.0)
    job.growing.tick(20.0)
    job.come(8, now_s=24.0)
    job.growing.tick(24.0)
    job.growing.tick(28.0)
    assert job.sent == []
    job.growing.tick(29.0)
    assert len(job.sent) == 1
    assert len(job.growing.newcomers) == 2


def test_a_job_that_seals_nothing_that_all_have_alike_goes_on_without_and_says_so_once() -> None:
    job = shrunk()
    job.come(7, now_s=20.0)
    job.growing.tick(20.0)
    job.growing.tick(25.0)
    said = told(job.pauses.sealed(job.launcher(2), 1, -1, RIGID, 26.0))
    assert said == f"gpu-7 can be taken in; the job goes on without: node gpu-2 {RIGID}"
    job.growing.tick(100.0)
    assert len(job.sent) == 1
    assert not job.reforming.under_way


def test_a_recovery_takes_in_who_has_come_meanwhile() -> None:
    job = shrunk()
    job.come(7, now_s=20.0)
    job.fail(0, incarnation=1, now_s=21.0)
    job.halt(7, 0, incarnation=1, now_s=22.0)
    assert kinds(job.halt(2, incarnation=1, now_s=23.0)) == ["Renew", "Tell"]
    assert job.places()["gpu-7"] == (2, 4, 6, 3)


def test_where_nobody_can_give_a_newcomer_the_state_it_stays_a_spare() -> None:
    job = shrunk(backups=False)
    job.come(7, now_s=20.0)
    job.fail(0, incarnation=1, now_s=21.0)
    job.halt(7, 0, incarnation=1, now_s=22.0)
    job.halt(2, incarnation=1, now_s=23.0)
    assert job.places() == {"gpu-0": (0, 0, 4, 2), "gpu-2": (1, 2, 4, 2)}


def test_a_job_that_does_not_begin_with_newcomers_goes_on_without_them() -> None:
    job = shrunk()
    job.come(7, now_s=20.0)
    job.reforming.pause(Occasion("gpu-7 can be taken in"), 21.0)
    assert kinds(job.halt(7, 0, 2, incarnation=1, now_s=22.0)) == ["Renew", "Tell"]
    assert job.reforming.is_untried
    job.fail(7, incarnation=2, now_s=30.0)
    said = told(job.halt(7, 0, 2, incarnation=2, now_s=31.0))
    assert "; the job did not begin with node gpu-7, left out for now; fewer nodes, 2 after 3" in said
    assert job.places() == {"gpu-0": (0, 0, 4, 2), "gpu-2": (1, 2, 4, 2)}
    job.wait(31.0, 32.0)
    assert [one.node for one in job.rendezvous.spares] == ["gpu-7"]
    assert job.rendezvous.newcomers == []
    job.wait(32.0, 640.0)
    assert [one.node for one in job.rendezvous.newcomers] == ["gpu-7"]


def test_who_holds_a_place_is_not_excluded() -> None:
    job = shrunk()
    job.come(7, now_s=20.0)
    job.reforming.pause(Occasion("an operator ordered it"), 21.0)
    job.halt(7, 0, 2, incarnation=1, now_s=22.0)
    job.come(8, now_s=25.0)
    job.fail(7, incarnation=2, now_s=30.0)
    job.halt(
        8, 7, incarnation=2, now_s=31.0
    )  # the spare takes the place of the newcomer, so there is none for gpu-0
    job.reforming.halted(job.launcher(0), Halted(2, 4000, unfit="disk full"), 31.0)
    orders = job.halt(2, incarnation=2, now_s=31.0)
    assert kinds(orders) == ["Renew", "Tell"]
    assert job.places().keys() == {"gpu-0", "gpu-2", "gpu-8"}


def test_who_has_just_come_does_not_say_that_the_job_may_have_another_size() -> None:
    job = Elastic(shrink_s=0.0)
    job.come(7, now_s=4.0)
    job.go(1, 5.0)
    job.reforming.halted(job.launcher(0), Halted(0, 4000, rigid=RIGID), 9.0)
    job.halt(2, 7, now_s=9.0)
    job.wait(9.0, 9.2)
    assert "gpu-7" in job.places()
    job.lose(0, 12.0)
    orders = job.halt(2, 7, incarnation=1, now_s=16.0)  # neither holds anything of this incarnation
    assert f"it does not go on with fewer nodes: {RIGID}" in told(orders)


def test_newcomers_that_have_trained_stay() -> None:
    job = shrunk()
    job.come(7, now_s=20.0)
    job.reforming.pause(Occasion("an operator ordered it"), 21.0)
    job.halt(7, 0, 2, incarnation=1, now_s=22.0)
    job.reforming.trains()
    job.fail(7, incarnation=2, now_s=30.0)
    job.halt(7, 0, 2, incarnation=2, now_s=31.0)
    assert len(job.places()) == 3


def test_an_operators_order_comes_before_newcomers() -> None:
    job = shrunk()
    job.come(7, now_s=20.0)
    job.growing.tick(20.0)
    job.growing.tick(25.0)
    assert kinds(job.operating.asked(99, Operate("restart", now=True), "", 26.0)) == ["HaltThese"]
    job.halt(7, 0, incarnation=1, now_s=27.0)
    assert kinds(job.halt(2, incarnation=1, now_s=28.0)) == ["Renew", "Tell"]
    assert len(job.places()) == 3  # and takes them in by the way


def test_two_nodes_exchange_their_ranks_and_nobody_else_moves() -> None:
    job = Elastic()
    before = job.places()
    orders = job.operating.asked(99, Operate("exchange", nodes=("gpu-0", "gpu-2")), "", 5.0)
    assert orders == []
    assert job.sent == [((0, 2), Seal(0, leave=True)), ((1,), Seal(0))]
    for number in range(3):
        orders = job.pauses.sealed(job.launcher(number), 0, 7, "", 6.0)
    assert kinds(orders) == ["HaltThese"]
    assert not orders[0].fresh, "the places change, processes may go on"  # type: ignore[union-attr]
    orders = job.halt(0, 1, 2, now_s=7.0)
    assert told(orders) == (
        "an operator ordered it; nodes gpu-[0,2] exchanged their ranks; all nodes begin again"
    )
    after = job.places()
    assert after == {"gpu-0": before["gpu-2"], "gpu-1": before["gpu-1"], "gpu-2": before["gpu-0"]}
    assert {one.master_addr for one in job.table().values()} == {"10.0.0.2"}
    job.tick({99}, 8.0)
    assert [answer.done for answer in job.answers] == ["begins again, incarnation 1"]


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (("gpu-0", "gpu-7"), "gpu-7 is no node of this job; it has gpu-[0-2]"),
        (("gpu-0", "gpu-0"), "give two nodes that are to exchange their ranks"),
        (("gpu-0", "0"), "give two nodes that are to exchange their ranks"),
        ((), "give two nodes that are to exchange their ranks"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_in_a_line(nodes: tuple[str, ...], why: str) -> None:
    job = Elastic()
    assert job.operating.asked(99, Operate("exchange", nodes=nodes), "", 5.0) == []
    assert [answer.refused for answer in job.answers] == [why]
    assert job.sent == []


def test_where_states_stay_on_their_nodes_none_is_exchanged() -> None:
    job = Elastic()
    job.why_withheld = "node 1 gives no states on an address that others reach"
    job.operating.asked(99, Operate("exchange", nodes=("gpu-0", "gpu-1")), "", 5.0)
    assert job.answers[0].refused.endswith(f"no state on their new node: {job.why_withheld}")
    assert job.moves.exchange({0: 1, 1: 0}, "a slow link", 6.0) == job.answers[0].refused


def test_a_node_without_room_for_its_old_ranks_states_beside_the_new_ones_is_not_exchanged() -> None:
    job = Elastic()
    job.operating.asked(99, Operate("exchange", nodes=("gpu-0", "gpu-2")), "", 5.0)
    job.pauses.sealed(job.launcher(1), 0, 7, "", 6.0)
    assert job.pauses.sealed(job.launcher(2), 0, -1, "lacks 1.50 GiB", 6.0) == []
    assert [answer.refused for answer in job.answers] == ["node gpu-2 lacks 1.50 GiB"]
    assert job.pauses.sealed(job.launcher(0), 0, 7, "", 6.0) == []
    assert job.operating.asked(99, Operate("suspend", now=True), "", 7.0) != []


def test_a_node_that_is_lost_in_an_exchange_ends_the_exchange_not_the_job() -> None:
    job = Elastic(shrink_s=0.0)
    job.operating.asked(99, Operate("exchange", now=True, nodes=("gpu-0", "gpu-2")), "", 5.0)
    job.halt(0, 1, now_s=6.0)
    orders = job.lose(2, 6.5)
    assert "fewer nodes, 2 after 3; nodes gpu-[0,2] could not exchange their ranks" in told(orders)
    assert job.places() == {"gpu-0": (0, 0, 4, 2), "gpu-1": (1, 2, 4, 2)}
    job.tick({99}, 11.0)
    assert job.answers[0].refused == "a node was lost meanwhile; the job begins again, incarnation 1"


def test_nobody_is_asked_about_an_exchange_that_the_controller_orders() -> None:
    job = Elastic()
    assert job.moves.exchange({0: 1, 1: 0}, "the link gpu-1 to gpu-2 is slow", 5.0) == ""
    assert job.moves.exchange({0: 1, 1: 0}, "again", 5.0) == "exchange is under way already"
    for number in range(3):
        job.pauses.sealed(job.launcher(number), 0, 7, "", 6.0)
    orders = job.halt(0, 1, 2, now_s=7.0)
    assert told(orders).startswith("the link gpu-1 to gpu-2 is slow; nodes gpu-[0-1] exchanged their ranks")


def test_nodes_can_change_places_in_a_round() -> None:
    job = Elastic()
    assert job.moves.exchange({0: 1, 1: 3, 3: 0}, "the link is fast again", 5.0) == "the job has 3 nodes now"
    assert job.moves.exchange({0: 1, 1: 2, 2: 0}, "the link is fast again", 5.0) == ""
    for number in range(3):
        job.pauses.sealed(job.launcher(number), 0, 7, "", 6.0)
    assert "nodes gpu-[0-2] exchanged their ranks" in told(job.halt(0, 1, 2, now_s=7.0))
    assert job.reforming.exchanged
    assert {node: place[0] for node, place in job.places().items()} == {"gpu-1": 0, "gpu-2": 1, "gpu-0": 2}


def test_an_exchange_that_the_controller_ordered_and_that_cannot_be_is_told_to_who_ordered_it() -> None:
    job = Elastic()

    def order(now_s: float) -> None:
        assert job.moves.exchange({0: 2, 2: 0}, "the link is slow", now_s) == ""

    order(5.0)
    lapsed, tell = job.pauses.sealed(job.launcher(2), 0, -1, "lacks 1.50 GiB", 6.0)
    assert isinstance(tell, Tell)
    assert tell.text == "the link is slow; the job goes on without: node gpu-2 lacks 1.50 GiB"
    orders = [lapsed]
    order(7.0)
    orders += job.tick((), 186.0)
    orders += job.tick((), 187.0)
    order(190.0)
    orders += job.operating.asked(99, Operate("restart"), "", 191.0)
    orders += job.tick((), 192.0)  # who asked has gone
    order(193.0)
    job.fail(1, now_s=194.0)
    orders += job.tick((), 194.1)
    assert [one.why for one in orders if isinstance(one, Lapsed)] == [
        "node gpu-2 lacks 1.50 GiB",
        "not all ranks sealed a step",
        "an operator's order came first",
        "a failure was faster",
    ]


def test_a_new_controller_knows_the_size_that_was_agreed_on() -> None:
    job = shrunk()
    anew = Elastic(shrink_s=0.0)
    anew.rendezvous = Rendezvous(3)
    anew.rendezvous.restore(dict(job.rendezvous.placements))
    for number in (0, 2):
        anew.come(number, 1)
    assert (anew.rendezvous.least, anew.rendezvous.most) == (2, 3)
