"""The planner under any sequence of slowdowns: causes come and go, orders are refused or fail, remedies overlap.

The driver is a dumb job: each cause slows it, each remedy takes away what it is there for, and whoever applies a
remedy takes it back once its cause has been gone for a while (as `keepstep.control.remedies.mitigation` does).
Of what the planner says: nothing is named that is refused, in force or of no use; it switches no oftener than causes
change; when all causes are gone nothing is in force.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from tests.effort import many

from keepstep.mitigate import Planner, Remedy

SEEDS = many(8)
HEALTHY_S = 1.0
KINDS = ("S2", "S3", "S4")
HELD = {"S2": 0.7, "S3": 0.95, "S4": 1.0}  # of what its causes cost, at best
GONE_S = 20.0  # after which a remedy is taken back


@dataclass
class Job:
    """Causes in force by kind of remedy that is there for them, and remedies in force since their causes are gone."""

    dice: random.Random
    planner: Planner = field(default_factory=Planner)
    causes: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    applied: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    refused: set[str] = field(default_factory=set[str])
    now_s: float = 0.0
    began_s: float | None = None
    switches: int = 0
    changes: int = 0

    def iteration_s(self, applied: frozenset[str] | set[str]) -> float:
        found = HEALTHY_S
        for kind, costs in self.causes.items():
            found += sum(costs) * (1 - HELD[kind] if kind in applied else 1.0)
        return found * self.dice.gauss(1, 0.005)

    def change(self) -> None:
        """A cause comes or goes."""
        self.changes += 1
        kind = self.dice.choice(KINDS)
        if self.causes[kind] and self.dice.random() < 0.5:
            self.causes[kind].pop()
        else:
            self.causes[kind].append(self.dice.choice((0.02, 0.1, 0.5, 3.0)))

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self._take_back()
            if not any(self.causes.values()):
                if not self.applied:
                    self.planner.over(self.now_s)
                    self.refused.clear()
                    self.began_s = None
                continue
            self._look()

    def _look(self) -> None:
        self.began_s = self.now_s if self.began_s is None else self.began_s
        untreated_s = self.iteration_s(set())
        remedies = {
            kind: Remedy(kind, cost_s, self.iteration_s({kind, *self.applied}))
            for kind, cost_s in (("S2", 0.0), ("S3", 5.0), ("S4", 60.0))
            if self.causes[kind] or kind in self.applied
        }
        iteration_s = self.iteration_s(set(self.applied))
        chosen = self.planner.look(self.now_s, self.began_s, HEALTHY_S, iteration_s, untreated_s, remedies)
        if chosen is None:
            return
        assert chosen.name in remedies
        assert chosen.name not in self.refused
        assert chosen.name not in self.applied
        assert chosen.iteration_s < iteration_s
        fate = self.dice.random()
        if fate < 0.15:  # it cannot be, or breaks half-way
            self.planner.refused(chosen.name)
            self.refused.add(chosen.name)
        else:
            self.now_s += chosen.cost_s
            self.planner.applied(chosen.name, chosen.cost_s)
            self.applied[chosen.name] = None
            self.switches += 1

    def _take_back(self) -> None:
        for kind in list(self.applied):
            if self.causes[kind]:
                self.applied[kind] = None
                continue
            since_s = self.applied[kind]
            self.applied[kind] = self.now_s if since_s is None else since_s
            if since_s is not None and self.now_s - since_s >= GONE_S:
                del self.applied[kind]
                self.planner.undone(kind)
                self.switches += 1


@pytest.mark.parametrize("seed", range(SEEDS))
def test_it_switches_no_oftener_than_causes_change_and_ends_with_nothing_in_force(seed: int) -> None:
    dice = random.Random(seed)
    job = Job(dice)
    for _ in range(dice.randint(1, 25)):
        job.change()
        job.wait(dice.choice((0, 1, 5, 30, 200, 2000)))
    job.changes += sum(len(costs) for costs in job.causes.values())
    for costs in job.causes.values():
        costs.clear()
    job.wait(100)
    assert not job.applied
    assert job.switches <= 2 * job.changes, (job.switches, job.changes)
    before = job.switches
    job.wait(1000)
    assert job.switches == before


@pytest.mark.parametrize("seed", range(many(2)))
def test_what_is_steady_is_treated_at_most_once(seed: int) -> None:
    """Noise alone moves nothing."""
    job = Job(random.Random(seed))
    for kind in KINDS:
        job.causes[kind].append(0.3)
    job.wait(5000)
    assert job.switches <= len(KINDS)
    assert sorted({*job.applied, *job.refused}) == list(KINDS)
