"""Remedies that move ranks, as the mitigation sees them: ordered, done or come to nothing, and said in the incident."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.control.remedies.test_relocation import NAMES, SLOW, TRAFFIC, Office

from keepstep.control.cluster import Cluster
from keepstep.control.remedies.mitigation import Mitigation
from keepstep.core.incident import Action, Culprit
from keepstep.core.microbatch_shares import Split
from keepstep.core.slow_steps import SlowSteps
from keepstep.core.summary import GroupInfo, IterationSummary, StreamSummary
from keepstep.wire.messages import Heartbeat, Profile, RankBeat, Shares, Splits

HEALTHY_S, SLOW_S = 0.2, 1.0
RUNNING: Any = SimpleNamespace(standstill=lambda: "", slow=[])


class Case:
    """A slowdown from step 50 on, and what was noted in it."""

    treated = is_cured = False
    healthy = None

    def __init__(self, culprit: Culprit) -> None:
        self.incident: Any = SimpleNamespace(
            culprits=(culprit,), iteration_before_s=HEALTHY_S, onset_step=50, detected_step=52, actions=()
        )
        self.actions: list[Action] = []

    def acted(self, action: Action, instead: Action | None = None, *, say: bool) -> None:
        self.actions = [one for one in self.actions if one != instead] + [action]
        self.incident.actions = tuple(self.actions)

    def treated_for(self, *_: Any) -> None:
        pass

    def cured(self, *_: Any) -> None:
        self.is_cured = True


class Desk(Office):
    """Nodes of one rank each, which do what is ordered only when the test says so."""

    order: Callable[[Shares, int], None]
    order_number: Callable[[int], int]

    def __init__(self, spares: int = 0) -> None:
        super().__init__()
        self.cluster = Cluster(4)
        self.cluster.world_size = 4
        for rank, name in enumerate(NAMES):
            self.cluster.plays(self.cluster.node(rank, name), (rank,))
        self.recorded = True
        self.locators = SimpleNamespace(
            stages=lambda *_: None,
            waits_recorded=lambda *_: self.recorded,
            own_times=lambda evidence, *_: evidence.after,
            slow_steps=self.slow_steps,
        )
        self.is_slow: Callable[[int], bool] = lambda step: True  # whether blamed ranks are the slow ones
        self.spares, self.looks = spares, 0

    def slow_steps(self, rows: Any, _: Any, blamed: Any, slow_s: float) -> dict[int, SlowSteps]:
        steps = sorted({row.step for row in rows})
        return {rank: SlowSteps({step: self.is_slow(step) for step in steps}) for rank in blamed}

    def ask_profiles(self, *_: Any) -> int:
        self.looks += 1
        return self.looks

    def irreplaceable(self, nodes: Any) -> str:
        return "" if len(nodes) <= self.spares else "no spare waits"

    def replace(self, nodes: Any, why: str, now_s: float) -> str:
        self.ordered.append((dict(nodes), why))
        return self.refusal


class Job:
    """A mitigation that is told of a slowdown, and of iterations of a length that the test sets."""

    def __init__(self, culprit: Culprit, *, spares: int = 0, mode: Any = "auto") -> None:
        self.desk, self.case = Desk(spares), Case(culprit)
        self.now_s, self.step, self.iteration_s = 100.0, 60, SLOW_S
        self.incarnation, self.closed, self.renewed_s = 0, False, 0.0
        self.mitigation = Mitigation(self.desk, lambda: mode, self, RUNNING)  # type: ignore[arg-type]

    def run(self, steps: int, until: Callable[[], bool] = lambda: False) -> None:
        for _ in range(steps):
            if until():
                return
            self.step, self.now_s = self.step + 1, self.now_s + self.iteration_s
            self._beat()
            self.mitigation.tick([] if self.closed else [self.case], self.now_s)  # type: ignore[list-item]
            if self.mitigation.question is not None:
                rows = tuple(
                    self.row(rank, step) for rank in range(4) for step in range(self.step - 12, self.step + 1)
                )
                self.mitigation.profiles([Profile(1, 0, rows, (), traffic=tuple(TRAFFIC))], self.now_s)

    def row(self, rank: int, step: int) -> IterationSummary:
        return IterationSummary(rank, step, self.now_s, self.iteration_s, self.own_s(rank), 0.1)

    def own_s(self, rank: int) -> float:
        """Of an iteration, by which a rank delays others."""
        return 0.1

    def _beat(self) -> None:
        node = self.desk.cluster.nodes[0]
        if self.now_s >= self.renewed_s:
            node.agent = 1 + self.incarnation
        beat = Heartbeat(0, self.step, self.now_s, (RankBeat(0, self.step, 0, 0),))
        self.desk.cluster.heard(node, beat, self.now_s)

    def begin_again(self, *, exchanged: bool = False, renewed_in_s: float = 0.0) -> None:
        """``renewed_in_s``: until then the agents of before tell of one more step."""
        self.incarnation += 1
        self.now_s += 1.0
        self.renewed_s = self.now_s + renewed_in_s
        self.mitigation.begin_again(self.now_s, exchanged=exchanged)

    @property
    def ordered(self) -> bool:
        return bool(self.desk.ordered)

    @property
    def said(self) -> list[str]:
        return [one.name for one in self.case.actions]


class Divided(Job):
    """Four replicas share 32 micro-batches. ``seconds``: what one takes, by node; else 0.02.

    ``link_s``: what an iteration takes besides.
    """

    def __init__(
        self, culprit: Culprit, seconds: dict[str, float], *, spares: int = 0, link_s: float = 0.0
    ) -> None:
        super().__init__(culprit, spares=spares)
        self.seconds, self.link_s = seconds, link_s
        self.orders: list[Shares] = []
        self.desk.order = self._take
        self.desk.order_number = lambda _: len(self.orders) + 1
        self.begin_equal()

    def begin_equal(self) -> None:
        self._tell(0, (8, 8, 8, 8))

    def turns(self, seconds: dict[str, float]) -> None:
        """What a micro-batch takes from now on."""
        self.seconds = seconds
        self.iteration_s = max(self.own_s(rank) for rank in range(4)) + self.link_s

    def own_s(self, rank: int) -> float:
        return self.shares[rank] * self.seconds.get(self.desk.cluster.nodes[rank].name, 0.02)

    def _take(self, order: Shares, _: int) -> None:
        self.orders.append(order)
        self._tell(order.number, order.shares)

    def _tell(self, number: int, shares: tuple[int, ...]) -> None:
        self.shares = shares
        self.turns(self.seconds)
        for rank, share in enumerate(shares):
            split = Split(*(rank, self.incarnation, 32, rank, 4), number=number, step=self.step, share=share)
            self.mitigation.shares.told(self.desk.cluster.nodes[rank], Splits(rank, (split,)))


class OnDevices(Divided):
    """The same on NCCL: what ranks wait for is in a communicator, and few iterations tell of transfers.

    The host's optimizer waits for the device, which is no time of the device's.
    """

    def begin_equal(self) -> None:
        super().begin_equal()
        self.desk.cluster.learn_groups([GroupInfo("0", (0, 1, 2, 3), "cuda:nccl")])
        self.desk.cluster.learn_groups([GroupInfo("nccl-1", (0, 1, 2, 3), "nccl")])

    def row(self, rank: int, step: int) -> IterationSummary:
        own_s = self.own_s(rank)
        waits_s = self.iteration_s - own_s
        reduced = StreamSummary("nccl-1", 1, -1, 1, 8, 0, 0.0, 0.0, waits_s + 0.05, waits_s + 0.05, 0.0)
        return IterationSummary(
            *(rank, step, self.now_s, self.iteration_s, own_s, waits_s),
            optimizer_s=0.9 * self.iteration_s,
            ahead_s=0.3,
            streams=(reduced,) if step % 4 == 0 else (),
        )


RANK = Culprit(rank=2, node="gpu-2", slowdown=5.0, confidence="high", cause="compute")


def moved(culprit: Culprit, **how: Any) -> Job:
    """A job that has been told to move."""
    job = Job(culprit, **how)
    job.run(60, lambda: job.ordered)
    assert job.ordered
    return job


@pytest.mark.parametrize(
    ("culprit", "name"), [(SLOW, "S3, exchange of nodes"), (RANK, "S4, replacement of nodes")]
)
def test_what_it_was_to_do_and_did_is_noted(culprit: Culprit, name: str) -> None:
    job = moved(culprit, spares=1)
    assert job.said == [name]
    (expected,) = job.case.actions
    assert expected.before_iteration_s == pytest.approx(SLOW_S)
    job.desk.cluster.nodes[2].name = "gpu-7" if culprit is RANK else "gpu-2"
    job.begin_again(exchanged=culprit is SLOW, renewed_in_s=0.6)
    job.iteration_s = 0.25
    job.run(60)
    assert job.said == [name]
    (noted,) = job.case.actions
    assert noted.measured_iteration_s == pytest.approx(0.25)
    assert "; a new step after 1.8 s" in noted.detail  # not 1.2 s: those were last words of the old agents
    assert len(job.desk.ordered) == 1


def test_a_rank_that_recovers_while_the_job_pauses_costs_one_pause_and_no_more() -> None:
    job = moved(RANK, spares=2)
    job.desk.cluster.nodes[2].name = "gpu-7"
    job.begin_again()
    job.iteration_s, job.closed = HEALTHY_S, True
    job.run(200)
    assert len(job.desk.ordered) == 1
    assert job.case.actions[0].measured_iteration_s == pytest.approx(HEALTHY_S)


@pytest.mark.parametrize("culprit", [SLOW, RANK])
def test_a_failure_meanwhile_leaves_the_places_as_they_were_and_it_is_said(culprit: Culprit) -> None:
    job = moved(culprit, spares=1)
    job.begin_again()  # with the spare lost, or a node: not as it was ordered
    job.run(60)
    short = "S3" if culprit is SLOW else "S4"
    assert job.said[1] == f"{short} has failed"
    assert job.case.actions[1].detail.endswith("the job had to begin again as it was")
    assert len(job.desk.ordered) == 1


@pytest.mark.parametrize("how", ["lapsed", "nothing happens"])
def test_an_order_that_comes_to_nothing_is_said_and_not_repeated(how: str) -> None:
    job = moved(SLOW)
    if how == "lapsed":
        job.mitigation.not_moved("a failure was faster", job.now_s)
    job.run(400)
    assert job.said[1] == "S3 has failed"
    why = "a failure was faster" if how == "lapsed" else "not all ranks sealed a step"
    assert job.case.actions[1].detail == f"the nodes keep their places: {why}"
    assert len(job.desk.ordered) == 1


def test_what_is_refused_is_said_once() -> None:
    job = Job(SLOW)
    job.desk.refusal = "it is suspended; say resume"
    job.run(100)
    assert [one.detail for one in job.case.actions] == ["S3, exchange of nodes: it is suspended; say resume"]
    assert len(job.desk.ordered) == 1


def test_a_replacement_that_did_not_help_is_not_tried_with_the_next_spare() -> None:
    job = moved(RANK, spares=3)
    job.desk.cluster.nodes[2].name = "gpu-7"
    job.begin_again()
    job.case.incident.culprits = (replace(RANK, rank=3, node="gpu-3"),)
    job.run(200)
    assert len(job.desk.ordered) == 1


def test_another_node_that_turns_slow_is_replaced_too() -> None:
    job = moved(RANK, spares=3)
    job.desk.cluster.nodes[2].name = "gpu-7"
    job.begin_again()
    job.iteration_s = HEALTHY_S
    job.run(60)
    job.iteration_s = SLOW_S
    job.case.incident.culprits = (replace(RANK, rank=3, node="gpu-3"),)
    job.run(100)
    assert [list(nodes) for nodes, _ in job.desk.ordered] == [[2], [3]]


def test_shares_that_fit_who_is_still_slow_are_ordered_right_after_a_move() -> None:
    job = Divided(RANK, {"gpu-2": 0.1, "gpu-3": 0.04}, spares=1)
    job.case.incident.culprits = (RANK, replace(RANK, rank=3, node="gpu-3", slowdown=2.0))
    job.run(300, lambda: job.ordered)
    assert [list(nodes) for nodes, _ in job.desk.ordered] == [[2]]
    before = len(job.orders)
    job.desk.cluster.nodes[2].name = "gpu-7"
    job.begin_again()
    job.begin_equal()
    job.run(1)  # nothing was measured since
    assert [one.shares for one in job.orders[before:]] == [(10, 9, 9, 4)]
    job.run(40)
    assert len(job.orders) == before + 1


def test_what_shares_after_an_exchange_are_expected_to_do_reckons_without_the_slow_link() -> None:
    job = Divided(SLOW, {"gpu-3": 0.04}, link_s=0.7)
    job.run(300, lambda: job.ordered)
    before = len(job.case.actions)
    exchange = job.case.actions[-1]
    assert exchange.before_iteration_s is not None
    assert exchange.expected_iteration_s is not None
    job.link_s = 0.0
    job.begin_again(exchanged=True)
    job.begin_equal()
    job.run(1)
    (shares,) = job.case.actions[before:]
    saved_s = exchange.before_iteration_s - exchange.expected_iteration_s
    assert saved_s > 0.3
    besides_s = 1.02 - 8 * 0.02  # of the middle replica, before
    assert shares.before_iteration_s == pytest.approx(8 * 0.04 + besides_s - saved_s)


def test_on_devices_who_is_slow_gets_fewer_micro_batches_until_it_is_fast() -> None:
    job = OnDevices(RANK, {"gpu-2": 0.04})
    job.run(60, lambda: bool(job.orders))
    assert [one.shares for one in job.orders] == [(10, 9, 4, 9)]
    job.run(10)
    job.turns({})
    job.run(60)
    assert [one.shares for one in job.orders[1:]] == [(8, 8, 8, 8)]
    assert job.said == ["S2, micro-batches", "S2 is taken back"]
    assert job.case.is_cured


def test_shares_stay_equal_after_a_move_that_leaves_nobody_slow() -> None:
    job = Divided(RANK, {"gpu-2": 0.1}, spares=1)
    job.run(300, lambda: job.ordered)
    before = len(job.orders)
    job.desk.cluster.nodes[2].name = "gpu-7"
    job.begin_again()
    job.begin_equal()
    job.run(40)
    assert len(job.orders) == before


@pytest.mark.parametrize("mode", ["advise", "off"])
def test_nothing_is_ordered_where_that_is_not_wanted(mode: str) -> None:
    job = Job(RANK, spares=1, mode=mode)
    job.run(100)
    assert not job.ordered
    assert job.said == (["advised: S4, replacement of nodes"] if mode == "advise" else [])


def test_without_a_spare_it_is_said_that_there_is_none() -> None:
    job = Job(RANK)
    job.run(100)
    (action,) = job.case.actions
    assert action.detail.endswith("S4, replacement of nodes: no spare waits")


@pytest.mark.parametrize("culprit", [SLOW, RANK])
def test_nothing_is_ordered_where_no_waits_are_recorded(culprit: Culprit) -> None:
    """NCCL's ranks: what of an iteration is their own cannot be told, whatever the verdict says."""
    job = Job(culprit, spares=1)
    job.desk.recorded = False
    job.run(80)
    assert not job.ordered
    assert job.said == ["none"]
    assert "NCCL" in job.case.actions[0].detail


def test_whoever_is_no_longer_the_slow_one_keeps_its_node_and_it_is_said_once() -> None:
    job = Job(RANK, spares=1)
    job.case.incident.number = 1
    job.desk.is_slow = lambda step: step % 3 == 0
    job.run(60)
    assert not job.ordered
    (action,) = job.case.actions
    why = "S4, replacement of nodes: gpu-2 stays: rank 2 is the slow one in "
    assert (action.name, action.detail.startswith(why)) == ("none", True)
