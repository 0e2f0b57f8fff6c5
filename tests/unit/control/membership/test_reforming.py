"""The recovery's core and the rank tables that it makes, case by case."""

from __future__ import annotations

from msgspec import structs

from keepstep.control.effects import Tell
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.reforming_orders import End, Exclude, HaltThese, Lost, Order, Renew
from keepstep.control.membership.rendezvous import Launcher, Rendezvous
from keepstep.control.membership.restart_budget import Spending
from keepstep.control.settings import Settings
from keepstep.core.budgets import Limits
from keepstep.wire import encode
from keepstep.wire.messages import Failed, Halted, Join, Placement, Seat

SETTINGS = Settings(backups=1)


class Job:
    """Launchers of equal nodes and what their controller orders; ``gpu-0`` and on play, later ones are spares."""

    def __init__(self, nodes: int = 3, *, spares: int = 0, max_restarts: int = 2, host: int = -1) -> None:
        self.rendezvous = Rendezvous(nodes)
        self.max_restarts = max_restarts
        self.heard: set[int] = set()
        self.nodes, self.host = nodes, host
        self.spending = Spending(Limits(), lambda now_s: now_s)
        self.reforming = Reforming(
            self.rendezvous, SETTINGS, lambda rank, now_s: rank in self.heard, self.spending
        )
        for number in range(nodes + spares):
            self.come(number)

    def launcher(self, number: int) -> Launcher:
        return Launcher(f"gpu-{number}", 100 + number)

    def come(self, number: int, incarnation: int = -1, *, ranks: int = 2, now_s: float = 0.0) -> list[Order]:
        join = Join(
            f"gpu-{number}", f"10.0.0.{number}", ranks, 29500, -1, self.nodes, self.nodes, self.max_restarts,
            incarnation, hosts_controller=number == self.host,
        )  # fmt: skip
        self.rendezvous.join(self.launcher(number), join, number, now_s)
        if not self.rendezvous.placements:
            return []
        return self.reforming.here(self.launcher(number), incarnation, now_s)

    def go(self, number: int, now_s: float) -> None:
        assert self.rendezvous.leave(self.launcher(number), number)
        self.reforming.gone(self.launcher(number), now_s)

    def fail(self, number: int, incarnation: int = 0, now_s: float = 1.0) -> list[Order]:
        return self.reforming.failed(self.launcher(number), incarnation, 137, "rank died", now_s)

    def halt(self, *numbers: int, incarnation: int = 0, now_s: float = 2.0) -> list[Order]:
        orders: list[Order] = []
        for number in numbers:
            orders += self.reforming.halted(self.launcher(number), Halted(incarnation, 4000 + number), now_s)
        return orders

    def wait(self, since_s: float, until_s: float) -> list[Order]:
        orders: list[Order] = []
        for tenth in range(int(since_s * 10), int(until_s * 10) + 1):
            orders += self.reforming.tick(tenth / 10)
        return orders

    def table(self) -> dict[str, Placement]:
        return {launcher.node: placement for launcher, placement in self.rendezvous.placements.items()}


def kinds(orders: list[Order]) -> list[str]:
    return [type(order).__name__ for order in orders]


def halted(orders: list[Order]) -> set[str]:
    (order,) = [one for one in orders if isinstance(one, HaltThese)]
    return {launcher.node for launcher in order.launchers}


def test_all_nodes_keep_their_ranks_after_a_ranks_death() -> None:
    job = Job(3, spares=1)
    before = job.table()
    assert halted(job.fail(1)) == {"gpu-0", "gpu-1", "gpu-2", "gpu-3"}
    assert job.halt(0, 1, 3) == []
    assert kinds(job.halt(2)) == ["Renew", "Tell"]
    after = job.table()
    assert {name: one.node_rank for name, one in after.items()} == {
        name: one.node_rank for name, one in before.items()
    }
    assert {(one.incarnation, one.master_addr, one.master_port) for one in after.values()} == {
        (1, "10.0.0.0", 4000)
    }


def test_two_failures_of_one_incarnation_are_one_recovery() -> None:
    job = Job(3)
    assert kinds(job.fail(1)) == ["HaltThese"]
    assert job.fail(2) == []
    assert kinds(job.halt(0, 1, 2)) == ["Renew", "Tell"]
    assert job.fail(2) == []  # said again to nobody's surprise: it is of the one before
    assert job.halt(0, 1, 2) == []
    assert job.reforming.incarnation == 1


def test_a_failure_before_all_have_read_their_places_begins_the_next() -> None:
    job = Job(3)
    job.fail(1)
    job.halt(0, 1, 2)
    orders = job.fail(0, incarnation=1)
    assert orders == [HaltThese(tuple(job.rendezvous.placements), 1)]
    assert kinds(job.halt(0, 1, 2, incarnation=1)) == ["Renew", "Tell"]
    assert job.reforming.incarnation == 2


def test_the_number_of_one_that_was_ended_before_it_was_placed_is_spent() -> None:
    job = Job(2, max_restarts=1)
    assert kinds(job.halt(0, incarnation=1)) == [
        "HaltThese"
    ]  # by a controller that is gone: nobody starts 1 any more
    assert kinds(job.halt(1)) == ["Renew", "Tell"]
    assert {(one.incarnation, one.pauses) for one in job.table().values()} == {(2, 1)}
    assert job.reforming.restarts == 1


def fail_same(
    job: Job, incarnation: int, unix_s: float, text: str = "rank 3: ValueError: boom"
) -> list[Order]:
    """Rank 3 of node 1 fails at step 41, and the others with it."""
    job.spending.failed("gpu-1", Failed(incarnation, 1, text, 3, 41, unix_s), unix_s)
    job.spending.failed(
        "gpu-0", Failed(incarnation, 1, "rank 0: Connection closed by peer", 0, 41, unix_s - 0.1), 1.0
    )
    job.fail(1, incarnation)
    return job.halt(0, 1, incarnation=incarnation)


def test_the_same_error_at_the_same_step_twice_ends_the_job_with_the_reason() -> None:
    job = Job(2, max_restarts=9)
    assert kinds(fail_same(job, 0, 10.0)) == ["Renew", "Tell"]
    (end,) = fail_same(job, 1, 20.0)
    assert isinstance(end, End)
    assert end.exit_code == 137
    assert (
        "rank 3 on node gpu-1 has failed twice at step 41 with the same error (ValueError: boom)"
        in end.reason
    )


def test_whom_keepstep_ends_at_the_same_step_again_and_again_ends_no_job() -> None:
    job = Job(2, max_restarts=9)
    for incarnation in range(4):
        ended = Failed(incarnation, 137, "rank 3: it hung: asleep", 3, 41, 10.0 * incarnation, True)
        job.spending.failed("gpu-1", ended, 0.0)
        assert kinds(fail_same(job, incarnation, 10.0 * incarnation - 0.1)) == ["Renew", "Tell"]


def test_a_node_that_a_budget_refuses_is_replaced_though_no_spare_is_left_for_an_unfit_one() -> None:
    job = Job(3, spares=1, max_restarts=9)
    job.spending._limits = Limits(node=1)
    for incarnation in range(2):
        unix_s = 10.0 * incarnation
        job.spending.failed(
            "gpu-1", Failed(incarnation, 1, "rank 3: OSError", 3, incarnation, unix_s), unix_s
        )
        job.fail(1, incarnation)
        job.halt(1, 3, incarnation=incarnation)
        unfit = "disk full" if incarnation else ""
        job.reforming.halted(job.launcher(0), Halted(incarnation, 4000, unfit=unfit), 2.0)
        job.halt(2, incarnation=incarnation)
    assert sorted(job.table()) == ["gpu-0", "gpu-2", "gpu-3"]


def refused_as_unfit(number: int, host: int = -1) -> tuple[Job, list[Order]]:
    """A job of three nodes after a rank of a broken one has failed twice with one error, and what is ordered then."""
    job, orders = Job(3, max_restarts=9, host=host), list[Order]()
    for incarnation in range(2):
        failed = Failed(incarnation, 1, "rank 3: RuntimeError: CUDA error: ECC", 3, 41, 10.0 * incarnation)
        job.spending.failed(f"gpu-{number}", failed, 0.0)
        job.fail(number, incarnation)
        unfit = Halted(incarnation, 4000, unfit="Xid 48")
        job.reforming.halted(job.launcher(number), unfit, 2.0)
        orders = job.halt(*{0, 1, 2} - {number}, incarnation=incarnation)
    return job, orders


def test_another_node_is_waited_for_where_a_broken_one_fails_again() -> None:
    job, (told,) = refused_as_unfit(1)
    assert isinstance(told, Tell)
    assert "waits for the other nodes" in told.text
    assert "Renew" not in kinds(job.wait(3, 60) + job.come(3, now_s=60.0))
    orders = job.halt(3, incarnation=1)
    (excluded,) = [one for one in orders if isinstance(one, Exclude)]
    assert excluded.launcher == job.launcher(1)
    assert excluded.reason == "node gpu-1 is excluded: Xid 48"
    assert sorted(job.table()) == ["gpu-0", "gpu-2", "gpu-3"]


def test_a_broken_node_that_leaves_meanwhile_is_replaced_like_a_lost_one() -> None:
    job, _ = refused_as_unfit(1)
    job.go(1, 3.0)
    assert "End" not in kinds(job.wait(3, 60) + job.come(3, now_s=60.0) + job.halt(3, incarnation=1))
    assert sorted(job.table()) == ["gpu-0", "gpu-2", "gpu-3"]


def test_for_want_of_another_node_than_a_broken_one_the_job_is_to_begin_elsewhere() -> None:
    job, _ = refused_as_unfit(1)
    (end,) = job.wait(3, SETTINGS.join_s + 3)
    assert isinstance(end, End)
    assert (end.exit_code, end.kind) == (75, "hardware")
    assert "no spare came within 600 s for node gpu-1" in end.reason


def test_a_broken_node_with_the_controller_ends_the_job_for_its_hardware() -> None:
    _, (end,) = refused_as_unfit(0, host=0)
    assert isinstance(end, End)
    assert (end.exit_code, end.kind) == (75, "hardware")


def test_a_new_controller_counts_on_with_what_launchers_say_again() -> None:
    job = Job(2, max_restarts=9)
    job.spending.failed("gpu-1", Failed(0, 1, "rank 3: ValueError: boom", 3, 41, 10.0), 15.0)
    job.rendezvous.restore(
        {
            one: structs.replace(placement, incarnation=1)
            for one, placement in job.rendezvous.placements.items()
        }
    )
    (end,) = fail_same(job, 1, 20.0)
    assert isinstance(end, End)


def test_restarts_are_used_up_and_the_first_failures_code_is_the_jobs() -> None:
    job = Job(2, max_restarts=1)
    job.fail(1)
    job.halt(0, 1)
    job.fail(1, incarnation=1)
    (end,) = job.halt(0, 1, incarnation=1)
    assert isinstance(end, End)
    assert end.exit_code == 137
    assert "--max-restarts 1 are used up" in end.reason
    assert job.fail(0, incarnation=1) == []
    assert job.wait(3, 700) == []


def test_restarts_are_counted_on_by_a_new_controller() -> None:
    job = Job(2, max_restarts=1)
    job.fail(1)
    job.halt(0, 1)
    anew = Job(2, max_restarts=1)
    anew.rendezvous = Rendezvous(2)
    anew.rendezvous.restore(dict(job.rendezvous.placements))
    anew.reforming = Reforming(anew.rendezvous, SETTINGS, lambda rank, now_s: False, anew.spending)
    anew.reforming.restored()
    for number in range(2):
        assert anew.come(number, 1) == []
    anew.fail(0, incarnation=1)
    assert kinds(anew.halt(0, 1, incarnation=1)) == ["End"]


def test_a_lost_node_is_replaced_by_a_spare_with_as_many_ranks() -> None:
    job = Job(3)
    job.come(3, ranks=2)
    job.go(1, 5.0)
    assert job.wait(5.0, 7.9) == []
    assert kinds(job.wait(8.0, 8.1)) == ["Lost", "HaltThese"]
    assert kinds(job.halt(0, 2, 3, now_s=9.0)) == ["Renew", "Tell"]
    assert job.table()["gpu-3"].node_rank == 1
    assert "gpu-1" not in job.table()


def test_a_new_node_0_brings_address_and_port() -> None:
    job = Job(3, spares=1)
    job.go(0, 5.0)
    job.wait(5.0, 8.1)
    job.halt(1, 2, 3, now_s=9.0)
    assert {(one.master_addr, one.master_port) for one in job.table().values()} == {("10.0.0.3", 4003)}


def test_without_a_spare_one_is_waited_for_said_once_and_not_for_ever() -> None:
    job = Job(3)
    job.go(1, 5.0)
    job.wait(5.0, 8.1)
    job.fail(0)
    (told,) = job.halt(0, 2, now_s=9.0)
    assert "waits for the other nodes" in getattr(told, "text", "")
    assert job.wait(9.1, 100) == []
    assert kinds(job.come(7, now_s=101)) == ["HaltThese"]  # it says which port is free, and takes the place
    assert kinds(job.halt(7, now_s=102)) == ["Renew", "Tell"]
    job.go(2, 110)
    job.wait(110, 113.1)
    job.halt(0, 7, incarnation=1, now_s=114)
    (end,) = job.wait(113.2, 720)
    assert isinstance(end, End)
    assert (end.exit_code, end.kind) == (75, "node-lost")
    assert "used up" not in end.reason


def test_a_node_that_returns_before_its_place_is_given_away_keeps_it() -> None:
    job = Job(3)
    job.go(1, 5.0)
    job.wait(5.0, 8.1)
    job.halt(0, 2, now_s=9.0)
    assert halted(job.come(1, 0, now_s=10.0)) == {"gpu-1"}
    assert kinds(job.halt(1, now_s=11.0)) == ["Renew", "Tell"]
    assert job.table()["gpu-1"].incarnation == 1


def test_a_node_that_returns_too_late_ends_what_it_runs_and_is_a_spare() -> None:
    job = Job(3, spares=1)
    job.go(1, 5.0)
    job.wait(5.0, 8.1)
    job.halt(0, 2, 3, now_s=9.0)
    assert halted(job.come(1, 0, now_s=20.0)) == {"gpu-1"}
    assert [launcher.node for launcher in job.rendezvous.spares] == ["gpu-1"]


def test_an_agents_farewell_because_its_launcher_was_killed_is_the_loss_of_the_node() -> None:
    job = Job(3, spares=1)
    job.heard = {0, 1, 2}
    job.reforming.orphaned(job.launcher(1))
    assert job.wait(4.9, 5.0) == []  # its connection stands yet
    job.go(1, 5.0)
    assert kinds(job.wait(5.1, 5.2)) == ["Lost", "HaltThese"]


def test_a_node_whose_agent_speaks_is_not_lost() -> None:
    job = Job(3)
    job.heard = {1}
    job.go(1, 5.0)
    assert job.wait(5.0, 60.0) == []


def test_many_that_go_at_once_are_given_longer() -> None:
    job = Job(3)
    for number in range(3):
        job.go(number, 5.0)
    assert job.wait(5.0, 14.9) == []
    assert kinds(job.wait(15.0, 15.1))[:1] == ["Lost"]


def test_a_controller_that_slept_blames_nobody() -> None:
    job = Job(3)
    job.wait(0, 5)
    job.go(1, 5.0)
    assert job.reforming.tick(60.0) == []
    assert job.come(1, 0, now_s=60.5) == []
    assert job.wait(60.1, 90) == []


def test_a_new_controller_waits_longer_for_those_it_never_heard() -> None:
    job = Job(2)
    table = dict(job.rendezvous.placements)
    job.rendezvous = Rendezvous(2)
    job.rendezvous.restore(table)
    job.reforming = Reforming(job.rendezvous, SETTINGS, lambda rank, now_s: False, job.spending)
    job.reforming.restored()
    job.come(0, 0, now_s=100.0)
    assert job.wait(100, 109.9) == []
    (lost, _) = job.wait(110, 110.1)
    assert lost == Lost((job.launcher(1),))


def test_a_new_controller_goes_on_with_a_recovery_that_another_began() -> None:
    job = Job(2)
    assert kinds(job.halt(1)) == ["HaltThese"]
    assert kinds(job.halt(1, 0)) == ["Renew", "Tell"]


def test_a_node_that_does_not_end_its_workers_is_lost() -> None:
    job = Job(3, spares=1)
    job.wait(0, 1)
    job.fail(0)
    job.halt(0, 1, 3)
    assert job.wait(1.1, 60.9) == []
    assert kinds(job.wait(61, 61.2)) == ["Lost", "Renew", "Tell"]
    assert set(job.table()) == {"gpu-0", "gpu-1", "gpu-3"}


def test_nodes_whose_workers_have_finished_may_go() -> None:
    job = Job(2)
    job.reforming.ended(job.launcher(1))
    job.go(1, 5.0)
    assert job.wait(5.0, 60.0) == []


def test_a_placement_is_as_large_in_a_job_of_thousands_of_nodes() -> None:
    sizes: set[int] = set()
    for nodes in (2, 2000):
        job = Job(nodes)
        job.fail(1)
        (renew, _) = job.halt(*range(nodes))
        assert isinstance(renew, Renew)
        sizes.add(len(encode(renew.placed.answers[0][1])))
    assert max(sizes) - min(sizes) <= 8  # the digits of the world's size


def test_the_last_word_of_a_broken_connection_does_not_hide_the_newer_one() -> None:
    job = Job(2)
    join = Join("gpu-1", "10.0.0.1", 2, 29500, -1, 2, 2, 2, 0)
    job.rendezvous.join(job.launcher(1), join, 8, 1.0)
    job.rendezvous.join(job.launcher(1), join, 5, 1.0)
    assert not job.rendezvous.leave(job.launcher(1), 5)
    assert job.rendezvous.peer(job.launcher(1)) == 8


def test_a_spare_with_another_number_of_ranks_is_refused() -> None:
    job = Job(2)
    join = Join("gpu-9", "10.0.0.9", 8, 29500, -1, 2, 2, 2)
    ((peer, reason),) = job.rendezvous.join(job.launcher(9), join, 9, 1.0).refusals
    assert peer == 9
    assert "--nproc-per-node 2" in reason


def test_nodes_have_to_agree_how_often_the_job_begins_again() -> None:
    job = Job(2)
    join = Join("gpu-9", "10.0.0.9", 2, 29500, -1, 2, 2, 5)
    ((_, reason),) = job.rendezvous.join(job.launcher(9), join, 9, 1.0).refusals
    assert reason == "node gpu-9 was started with --max-restarts 5, gpu-0 with 2; give all nodes the same"


def test_nodes_have_to_agree_whether_the_controller_can_move() -> None:
    job = Job(2)
    seat = Seat(9, "gpu-9", 109, "10.0.0.9", 7000)
    join = Join("gpu-9", "10.0.0.9", 2, 29500, -1, 2, 2, 2, seat=seat)
    ((_, reason),) = job.rendezvous.join(job.launcher(9), join, 9, 1.0).refusals
    assert reason == "node gpu-9 was started without --no-elect, gpu-0 with it; give all nodes the same"
