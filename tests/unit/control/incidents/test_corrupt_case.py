"""What the controller does when a rank's state is wrong: by default it says so, on demand all ranks go back, once."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.control import control_stand_ins as stand_ins
from tests.unit.control.staged_job import Stage, sent

from keepstep.checkpoint.memory.slots import Key
from keepstep.control.controller import Controller
from keepstep.control.effects import Effect, Say, Send, WriteIncident
from keepstep.control.settings import Settings
from keepstep.core.incident import Incident
from keepstep.report.verdict import render
from keepstep.wire.messages import (
    Checksums,
    Doubt,
    Families,
    Halt,
    Heartbeat,
    Hello,
    NamedTensor,
    RankBeat,
    RankChecksums,
    WhichFamilies,
)

FAMILIES = tuple(
    (NamedTensor(f"model.{number}", "float32 (4,)"), NamedTensor(f"optimizer.{number}", "float32 (4,)"))
    for number in range(3)
)


class Watched(Stage):
    """Four nodes of one rank each, with agents that have told their families."""

    def __init__(self, *, restore: bool = True) -> None:
        self.restore = restore
        super().__init__(4)
        self.effects: list[Effect] = []
        for number in range(4):
            self.agent(number)

    def fresh(self) -> Controller:
        settings = Settings(nodes=self.nodes, restore_corrupt=self.restore, max_restarts=2)
        return Controller(settings, locators=stand_ins.PlainLocators())

    def agent(self, number: int) -> list[Effect]:
        self.controller.connected(10 + number, "agent")
        hello = Hello("agent", f"gpu-{number}", number, 300 + number, launcher=100 + number)
        beat = Heartbeat(number, 1, 1.0, (RankBeat(number, 0, 0, 0),))
        return self.say(10 + number, hello, beat)

    def save(self, step: int, wrong: tuple[int, ...] = (), incarnation: int = 0) -> list[Effect]:
        self.effects = []
        for number in range(4):
            sums = np.arange(6, dtype=np.uint64) + np.uint64(100 * step)
            sums[2] += np.uint64(7 * (number + 1) if number in wrong else 0)
            row = RankChecksums((number,), 1, sums.tobytes())
            said = self.say(10 + number, Checksums(number, Key(incarnation, step).pack(), (row,)))
            if asked := sent(said, WhichFamilies):
                assert asked == [((10 + number,), WhichFamilies(1))]
                said = self.say(10 + number, Families(1, FAMILIES))
            self.effects += said
        return self.effects

    @property
    def incident(self) -> Incident:
        return [one.incident for one in self.effects if isinstance(one, WriteIncident)][-1]


@pytest.fixture
def job() -> Watched:
    return Watched()


def test_all_ranks_go_back_once_for_a_rank(job: Watched) -> None:
    for step in range(1, 5):
        assert job.save(step) == []
    job.save(5, (2,))
    assert [one.what for one in job.effects if isinstance(one, Say)] == ["verdict"]
    assert sent(job.effects, Doubt) == [((10, 11, 12, 13), Doubt(Key(0, 5).pack()))]
    assert [one.name for one in job.incident.actions] == ["advised: validate the device", "all ranks go back"]
    assert [peers for peers, _ in sent(job.tick(), Halt)] == [(0, 1, 2, 3)]
    job.halt(0)
    for step in range(5, 9):
        job.save(step, incarnation=1)
        if step == 5:
            assert job.incident.status == "relieved"
    job.save(9, (2,), incarnation=1)
    assert job.incident.number == 2
    assert [one.name for one in job.incident.actions] == ["advised: validate the device"]
    assert sent(job.tick(), Halt) == []


def test_by_default_it_is_only_said() -> None:
    job = Watched(restore=False)
    for step in range(1, 5):
        job.save(step)
    job.save(5, (2,))
    told = render(job.incident)
    assert "CORRUPT   step 5  replicas differ" in told
    assert "rank 2  gpu-2  its state is wrong; model.1 since step 5" in told
    assert "keepstep validate --ranks 2" in told
    assert sent(job.tick(), Halt) == []
    (doubt,) = [one for _, one in sent(job.agent(1), Doubt)]  # an agent that was started again
    assert doubt == Doubt(Key(0, 5).pack())


def test_two_wrong_ones_at_once_are_no_proof(job: Watched) -> None:
    for step in range(1, 5):
        job.save(step)
    assert job.save(5, (1, 2)) == []
    assert job.save(6, (2,)) == []


def test_what_no_agent_of_this_software_says_is_passed_over(job: Watched) -> None:
    row = RankChecksums((0,), 1, bytes(47))
    said = job.say(10, Checksums(0, Key(0, 1).pack(), (row,)), Checksums(3, Key(0, 1).pack(), ()))
    assert [one for one in said if not isinstance(one, Send)] == []
    assert job.say(10, Families(2, FAMILIES)) == []  # nobody asked
    for step in range(2, 20):  # nodes that never tell the same saves
        job.say(10, Checksums(0, Key(0, step).pack(), ()))
    assert len(job.controller.cases._checksums._pending) <= 9


def test_a_controller_that_comes_after_closes_the_incident_with_the_job(job: Watched) -> None:
    for step in range(1, 5):
        job.save(step)
    job.save(5, (2,))
    later = Watched()
    later.controller.restore([job.incident])
    assert later.controller.end(9.0)[-1].incident.status == "ended"  # type: ignore[union-attr]
