"""Remedy S2 over the real controller's core, detection and solver: a virtual job whose replicas turn slow and recover.

What runs is `Controller`, `RankWatch` and the planner; the ranks, their clocks and the network are simulated. Whatever
the speeds do and whichever orders are lost: every step is divided wholly, remedies do not swing to and fro, and when
all causes are gone shares are equal and incidents closed.
"""

from __future__ import annotations

import os
import random
from collections import deque

import pytest

from keepstep.agent.watch import RankWatch
from keepstep.control import Controller, Effect, Send, Settings, WriteIncident
from keepstep.core.incident import Incident
from keepstep.core.microbatches import Split, equal_shares, fits
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

SEEDS = int(os.environ.get("KEEPSTEP_MITIGATION_SEEDS", "12"))
MICROBATCH_S, OPTIMIZER_S, REDUCTION_S = 0.05, 0.01, 0.02
EACH = 8
ALL_REDUCE = 1


class Job:
    """``ranks`` data-parallel ranks, each on a node of its own."""

    def __init__(
        self, ranks: int, random: random.Random, *, mitigate: str = "auto", loss: float = 0.2
    ) -> None:
        self.random, self.loss = random, loss
        self.controller = Controller(Settings(nodes=ranks, mitigate=mitigate, validate=False))  # type: ignore[arg-type]
        self.slowness = [1.0] * ranks
        self.count = EACH * ranks
        self.shares = equal_shares(self.count, ranks)
        self.number = self.step = 0
        self.now_s = 100.0
        self.on_the_way: deque[tuple[int, Shares]] = deque()  # from which step on they may be in force
        self.rows: list[deque[IterationSummary]] = [deque(maxlen=200) for _ in range(ranks)]
        self.watches = [RankWatch(rank, f"n{rank}") for rank in range(ranks)]
        self.incidents: dict[int, Incident] = {}
        self.changes: list[tuple[int, list[int]]] = []
        self.times: list[float] = []
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
