"""Remedy S2 over the real controller's core, detection and solver: a virtual job whose replicas turn slow and recover.

What runs is `Controller`, `RankWatch` and the planner; the ranks, their clocks and the network are simulated. Whatever
the speeds do and whichever orders are lost: every step is divided wholly, remedies do not swing to and fro, and when
all causes are gone shares are equal and incidents closed.
"""

from __future__ import annotations

import random
from collections import deque

import pytest
from tests.effort import many

from keepstep.agent.ranks.watch import RankWatch
from keepstep.control.controller import Controller
from keepstep.control.effects import Effect, Send, WriteIncident
from keepstep.control.settings import Settings
from keepstep.core.incident import Incident
from keepstep.core.microbatch_shares import Split, equal_shares, fits
from keepstep.core.summary import GroupInfo, IterationSummary, StreamSummary
from keepstep.wire.messages import (
    Found,
    Groups,
    Heartbeat,
    Hello,
    Profile,
    ProfileRequest,
    RankBeat,
    Shares,
    Splits,
)

SEEDS = many(4)
MICROBATCH_S, OPTIMIZER_S, REDUCTION_S = 0.05, 0.01, 0.02
EACH = 8
ALL_REDUCE = 1


class Job:
    """``ranks`` data-parallel ranks, each on a node of its own."""

    def __init__(
        self,
        ranks: int,
        random: random.Random,
        *,
        mitigate: str = "auto",
        loss: float = 0.2,
        count: int = 0,
    ) -> None:
        self.random, self.loss = random, loss
        self.settings = Settings(nodes=ranks, mitigate=mitigate, validate=False)  # type: ignore[arg-type]
        self.slowness = [1.0] * ranks
        self.count = count or EACH * ranks
        self.shares = equal_shares(self.count, ranks)
        self.number = self.step = 0
        self.now_s = 100.0
        self.on_the_way: deque[tuple[int, Shares]] = deque()  # from which step on they may be in force
        self.rows: list[deque[IterationSummary]] = [deque(maxlen=200) for _ in range(ranks)]
        self.watches = [RankWatch(rank, f"n{rank}") for rank in range(ranks)]
        self.incidents: dict[int, Incident] = {}
        self.changes: list[tuple[int, list[int]]] = []
        self.times: list[float] = []
        self.begin_controller()

    def begin_controller(self) -> None:
        """One that knows the incidents, as they are kept, and hears everything else from the agents."""
        self.controller = Controller(self.settings)
        self.controller.restore(list(self.incidents.values()))
        self.on_the_way.clear()
        ranks = len(self.shares)
        world = GroupInfo("world", tuple(range(ranks)))
        for rank in range(ranks):
            self.controller.connected(rank, "agent")
            self.say(rank, Hello("agent", f"n{rank}", rank, 1))
            self.say(rank, Groups(rank, (world,)))
        self.tell_splits()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.iterate()

    def iterate(self) -> None:
        while self.on_the_way and self.on_the_way[0][0] <= self.step:
            _, order = self.on_the_way.popleft()
            if order.number > self.number:
                self.number, self.shares = order.number, list(order.shares)
                assert fits(self.shares, self.count, len(self.shares))
                self.changes.append((self.step, self.shares))
                self.tell_splits()
        own = [
            share * MICROBATCH_S * slow * self.random.gauss(1, 0.004) + OPTIMIZER_S
            for share, slow in zip(self.shares, self.slowness, strict=True)
        ]
        duration_s = max(own) + REDUCTION_S
        self.times.append(duration_s)
        for rank, self_s in enumerate(own):
            blocked_s = duration_s - self_s
            stream = StreamSummary(
                "world",
                ALL_REDUCE,
                -1,
                1,
                1000,
                self.step,
                self_s,
                duration_s,
                blocked_s,
                blocked_s,
                REDUCTION_S,
            )
            row = IterationSummary(
                *(rank, self.step, self.now_s, duration_s, self_s, blocked_s),
                optimizer_s=OPTIMIZER_S,
                streams=(stream,),
            )
            self.rows[rank].append(row)
        until_s = self.now_s + duration_s
        for tenth in range(int(self.now_s * 10) + 1, int(until_s * 10) + 1):
            self.now_s = tenth / 10
            if tenth % 10 == 0:
                self.beat()
            self.carry_out(self.controller.tick(self.now_s))
        self.now_s = until_s
        if self.step > 5:
            for rank, watch in enumerate(self.watches):
                finding = watch.iteration(self.step, duration_s, own[rank], self.now_s)
                if finding is not None:
                    self.say(rank, Found(finding))
        self.step += 1

    def pause(self, seconds: int) -> None:
        """An evaluation: no step ends."""
        for _ in range(seconds):
            self.now_s += 1
            self.beat()
            self.carry_out(self.controller.tick(self.now_s))

    def begin_again(self, slowness: list[float]) -> None:
        """Other processes go on, watched by other agents; meanwhile these ranks have become so slow."""
        self.slowness, self.shares = slowness, equal_shares(self.count, len(slowness))
        self.watches = [RankWatch(rank, f"n{rank}") for rank in range(len(slowness))]
        for rows in self.rows:
            rows.clear()
        self.controller.cases.mitigation.begin_again(self.now_s)
        self.tell_splits()

    def divide(self, count: int) -> None:
        """The script has another number of micro-batches from now on, which the last order does not fit."""
        self.count, self.number, self.shares = count, 0, equal_shares(count, len(self.shares))
        self.tell_splits()

    def beat(self) -> None:
        for rank, rows in enumerate(self.rows):
            row = rows[-1]
            beat = RankBeat(rank, row.step, 1, row.step * 10, row.duration_s, row.self_s, 0.0, True)
            self.say(rank, Heartbeat(rank, int(self.now_s), self.now_s, (beat,)))

    def tell_splits(self) -> None:
        for rank, share in enumerate(self.shares):
            split = Split(
                *(rank, 0, self.count, rank, len(self.shares)),
                number=self.number,
                step=self.step,
                share=share,
            )
            self.say(rank, Splits(rank, (split,)))

    def say(self, rank: int, message: object) -> None:
        self.carry_out(self.controller.message(rank, message, self.now_s))  # type: ignore[arg-type]

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, WriteIncident):
                self.incidents[effect.incident.number] = effect.incident
            if not isinstance(effect, Send):
                continue
            message = effect.message
            if isinstance(message, ProfileRequest):
                for rank in effect.peers:
                    rows = tuple(
                        row for row in self.rows[rank] if message.first_step <= row.step <= message.last_step
                    )
                    self.say(rank, Profile(message.request, rank, rows, ()))
            elif isinstance(message, Shares):
                assert effect.peers == (0,)
                assert fits(message.shares, self.count, len(self.shares))
                if self.random.random() >= self.loss:
                    self.on_the_way.append((self.step + self.random.randint(1, 3), message))

    @property
    def open(self) -> list[Incident]:
        return [one for one in self.incidents.values() if one.status == "open"]


@pytest.mark.parametrize("slow", [1.3, 2.0, 4.0])
def test_a_slow_replica_costs_little_more_than_its_part(slow: float) -> None:
    job = Job(4, random.Random(7), loss=0.0)
    job.run(60)
    job.slowness[1] = slow
    job.run(120)
    best_s = job.count / (3 + 1 / slow) * MICROBATCH_S + OPTIMIZER_S + REDUCTION_S
    assert sum(job.times[-40:]) / 40 <= 1.05 * (best_s + slow * MICROBATCH_S / 2)
    job.slowness[1] = 1.0
    job.run(150)
    assert job.shares == equal_shares(job.count, 4)
    assert not job.open
    (incident,) = [one for one in job.incidents.values() if one.saved_s]
    assert incident.saved_s > 0
    assert incident.lost_s is not None
    assert incident.relief_step is not None
    assert abs(incident.relief_step - 180) < 60


def test_another_that_turns_slow_waits_no_longer_than_the_first() -> None:
    job = Job(4, random.Random(7), loss=0.0)
    job.run(60)
    job.slowness[1] = 2.0
    job.run(80)
    job.slowness[2] = 2.0
    job.run(80)
    taken = [next(step - onset for step, _ in job.changes if step >= onset) for onset in (60, 140)]
    assert max(taken) <= 10, job.changes


def test_a_rank_that_turns_slow_behind_a_slower_one_is_named() -> None:
    job = Job(4, random.Random(7), loss=0.0)
    job.run(60)
    job.slowness[1] = 4.0
    job.run(8)
    job.slowness = [
        1.0,
        1.0,
        1.3,
        1.0,
    ]  # at once: replica 2 takes as long as replica 1 did with its small share
    job.run(60)
    named = {culprit.rank for one in job.incidents.values() for culprit in one.culprits}
    assert named == {1, 2}, job.incidents
    job.slowness = [1.0] * 4
    job.run(200)
    assert not job.open
    assert job.shares == [EACH] * 4


@pytest.mark.parametrize("slowness", [[1.0, 2.0, 1.0, 1.0], [2.0, 2.0, 1.0, 1.0]])
def test_who_turns_slow_while_the_job_begins_again_is_named(slowness: list[float]) -> None:
    job = Job(4, random.Random(7), loss=0.0)
    job.run(60)
    job.begin_again(slowness)
    job.run(40)
    (incident,) = job.open
    slow = {rank for rank, times in enumerate(slowness) if times > 1}
    assert {culprit.rank for culprit in incident.culprits} == slow, incident
    assert incident.iteration_before_s == pytest.approx(job.times[50], rel=0.03)
    assert incident.onset_step is not None
    assert 60 <= incident.onset_step <= 75
    assert all((job.shares[rank] < EACH) == (rank in slow) for rank in range(4))
    job.slowness = [1.0] * 4
    job.run(200)
    assert not job.open
    assert job.shares == [EACH] * 4


@pytest.mark.parametrize("seed", range(many(3)))
def test_a_job_that_begins_again_as_it_was_is_left_alone(seed: int) -> None:
    job = Job(4, random.Random(seed), loss=0.0)
    job.run(60)
    job.begin_again([1.0, 1.05, 1.0, 1.0])
    job.run(60)
    assert not job.incidents


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_comes_it_settles(seed: int) -> None:
    random_ = random.Random(seed)
    job = Job(random_.choice([2, 4, 6]), random_, loss=random_.choice([0.0, 0.2, 0.6]))
    ranks = len(job.slowness)
    job.run(60)
    events = 0
    for _ in range(random_.randint(1, 4)):
        job.slowness[random_.randrange(ranks)] = random_.choice([1.0, 1.15, 1.5, 2.5, 5.0])
        events += 1
        job.run(random_.randint(3, 150))
    job.slowness = [1.0] * ranks
    events += 1
    job.run(400)
    assert job.shares == equal_shares(job.count, ranks), (job.changes, job.controller.cases.incidents)
    assert len(job.changes) <= 2 * events
    before = len(job.changes)
    job.run(200)
    assert len(job.changes) == before


@pytest.mark.parametrize("count", [30, 33])
def test_shares_that_are_equal_but_for_one_are_equal(count: int) -> None:
    job = Job(4, random.Random(7), loss=0.0, count=count)
    job.run(60)
    job.slowness[1] = 3.0
    job.run(120)
    job.slowness[1] = 1.0
    job.run(150)
    assert job.shares == equal_shares(count, 4)
    assert len(job.changes) == 2
    assert not job.open


def test_an_order_that_nobody_takes_leaves_the_slowdown_to_its_pace() -> None:
    job = Job(4, random.Random(7), loss=1.0)
    job.run(60)
    job.slowness[1] = 3.0
    job.run(100)
    (incident,) = job.open
    assert [action.name for action in incident.actions] == ["S2, micro-batches", "S2 has failed"]
    job.slowness[1] = 1.0
    job.run(60)
    assert not job.changes
    assert not job.open


def test_another_number_of_micro_batches_is_divided_anew() -> None:
    job = Job(4, random.Random(7), loss=0.0)
    job.run(60)
    job.slowness[1] = 3.0
    job.run(100)
    job.divide(64)
    job.run(100)
    assert job.shares[1] < 8
    job.slowness[1] = 1.0
    job.run(150)
    assert job.shares == [16] * 4
    assert not job.open


def test_where_shares_are_coarse_equal_ones_do_not_prove_that_the_cause_is_gone() -> None:
    job = Job(4, random.Random(7), loss=0.0, count=8)
    job.run(60)
    job.slowness[1] = 2.2
    job.run(100)
    assert job.shares[1] == 1
    job.slowness[1] = 1.5  # 2 of its micro-batches take as long as 3 of another
    job.run(200)
    assert job.shares == [2] * 4
    (incident,) = job.open
    assert incident.actions[-1].detail == "equal shares are as good now"
    job.slowness[1] = 1.0
    job.run(100)
    assert not job.open


def test_nothing_is_saved_while_the_job_pauses() -> None:
    job = Job(4, random.Random(7), loss=0.0)
    job.run(60)
    job.slowness[1] = 3.0
    for _ in range(3):
        job.run(30)
        job.pause(600)
    job.slowness[1] = 1.0
    job.run(100)
    (incident,) = job.incidents.values()
    iterations = (incident.relief_step or 0) - 60
    slower_s = 2 * EACH * MICROBATCH_S
    assert 0.5 * iterations * slower_s < incident.saved_s < iterations * slower_s
    assert incident.lost_s == pytest.approx(
        sum(job.times[60:]) - len(job.times[60:]) * job.times[30], rel=0.2
    )


def test_what_a_treated_slowdown_has_cost_is_what_its_steps_have_taken() -> None:
    job = Job(4, random.Random(7), loss=0.0)
    job.run(60)
    healthy_s = sum(job.times[30:60]) / 30
    job.slowness[1] = 2.0
    job.run(120)
    job.slowness[1] = 1.0
    job.run(100)
    (incident,) = job.incidents.values()
    assert incident.lost_s == pytest.approx(sum(job.times[60:]) - 220 * healthy_s, rel=0.15)


def test_a_later_controller_keeps_an_incident_open_while_its_remedy_is_in_force() -> None:
    job = Job(4, random.Random(7), loss=0.0)
    job.run(60)
    job.slowness[1] = 3.0
    job.run(40)
    assert job.shares[1] < 5
    job.begin_controller()
    job.run(100)
    (incident,) = job.open
    job.slowness[1] = 1.0
    job.run(150)
    assert job.shares == [EACH] * 4
    assert not job.open
    assert job.incidents[incident.number].relief_step is not None


def test_ranks_that_divide_in_different_ways_are_left_alone() -> None:
    job = Job(4, random.Random(7), loss=0.0)
    job.run(60)
    job.slowness[1] = 3.0
    job.run(100)
    orders = len(job.changes)
    for garbage in (
        Split(3, 0, 64, 7, 8, number=job.number, share=5),
        Split(3, 0, 32, 1, 4, number=job.number, share=5),
        Split(3, 0, (1 << 62) - 1, 3, 4, number=job.number, share=1),
        Split(3, 0, 32, 3, 4, at_most=1, number=job.number, share=8),
        Split(3, 0, 32, 3, 4, number=job.number, share=9, movable=False),
    ):
        job.say(3, Splits(3, (garbage,)))
        job.run(40)
    assert len(job.changes) == orders
    job.tell_splits()
    job.slowness[1] = 1.0
    job.run(150)
    assert job.shares == [EACH] * 4
    assert not job.open


def test_an_incident_does_not_grow_with_what_is_done_about_it() -> None:
    job = Job(2, random.Random(7), loss=0.0)
    job.run(60)
    for time in range(24):
        job.slowness[1] = (2.0, 5.0)[time % 2]
        job.run(60)
    assert len(job.changes) > 20
    actions = job.incidents[1].actions
    assert 10 < len(actions) <= 17
    for action in actions[1:]:
        assert action.before_iteration_s is not None
        assert action.measured_iteration_s == pytest.approx(action.expected_iteration_s, rel=0.05)


@pytest.mark.parametrize("mode", ["advise", "off"])
def test_nothing_is_ordered_where_that_is_not_wanted(mode: str) -> None:
    job = Job(4, random.Random(3), mitigate=mode)
    job.run(60)
    job.slowness[2] = 3.0
    job.run(100)
    assert not job.changes
    (incident,) = job.incidents.values()
    assert [action.name for action in incident.actions] == (
        ["advised: S2, micro-batches"] if mode == "advise" else []
    )


def test_the_timeline_and_the_cost_of_a_slowdown_that_lasts_until_the_job_ends() -> None:
    job = Job(4, random.Random(7), loss=0.0)
    job.run(60)
    began_s = job.now_s
    job.slowness[1] = 2.0
    job.run(6)
    (incident,) = job.open
    (ordered,) = incident.actions
    job.run(100)
    (incident,) = job.open
    assert [event.what for event in incident.events] == ["noticed", "verdict"]
    assert incident.onset_unix_s is not None
    assert incident.onset_unix_s - job.controller.cases.desk.unix_s(0.0) == pytest.approx(began_s, abs=1.0)
    measured = incident.actions[0]
    assert measured != ordered
    assert (measured.step, measured.begun_unix_s) == (ordered.step, ordered.begun_unix_s)
    assert 60 < (ordered.step or 0) < 72
    assert incident.lost_s is not None
    job.run(20)
    job.controller.cases.end(job.now_s)
    job.carry_out(job.controller.tick(job.now_s))
    (ended,) = job.incidents.values()
    assert ended.status == "ended"
    assert ended.lost_s is not None
    assert incident.lost_s < ended.lost_s < 130 * MICROBATCH_S * EACH


def test_a_slowdown_about_which_nothing_is_done_says_each_minute_what_it_has_cost() -> None:
    job = Job(4, random.Random(7), mitigate="off")
    job.run(60)
    job.slowness[1] = 2.0
    told: set[float | None] = set()
    for _ in range(200):
        job.run(1)
        told |= {one.lost_s for one in job.open}
    (incident,) = job.open
    slower_s = (incident.iteration_after_s or 0.0) - (incident.iteration_before_s or 0.0)
    assert 2 <= len(told - {None}) <= 4
    assert max(one or 0.0 for one in told) == pytest.approx(150 * slower_s, rel=0.35)
