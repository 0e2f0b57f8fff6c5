"""What a slowdown is judged by: which iterations count as healthy."""

from __future__ import annotations

import pytest
from tests.scenarios.test_control_scenarios import Stage
from tests.unit.control import control_stand_ins as stand_ins

from keepstep.control.controller import Controller
from keepstep.control.settings import Settings
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Diagnosis
from keepstep.core.slow_steps import UNSTEADY


class Steps(stand_ins.PlainLocators):
    """Remembers which steps were given to it as healthy ones."""

    def __init__(self) -> None:
        super().__init__()
        self.healthy: list[set[int]] = []

    def slow(self, evidence: Evidence) -> Diagnosis:
        self.healthy.append({row.step for row in evidence.before})
        return super().slow(evidence)


@pytest.mark.parametrize(("onset", "healthy"), [(31, range(15, 29)), (9, range(9))], ids=["many", "few"])
def test_the_steps_right_before_an_onset_count_as_healthy_only_where_there_are_few(
    onset: int, healthy: range
) -> None:
    """Ranks tell the onset to within a step or two; a slow step among the healthy ones would be their noise."""
    locators = Steps()
    stage = Stage()
    stage.fresh = lambda: Controller(Settings(nodes=3), locators=locators)  # type: ignore[method-assign]
    for line in (
        "cluster nodes=3 ranks=1",
        f"beat step={onset + 8}",
        f"found kind=slow rank=0-2 step={onset + 2} onset={onset} before=0.5 after=1.0",
        f"profiles rank=0 onset={onset - 1}",
    ):
        stage.run(line)
    assert locators.healthy[0] == set(healthy)
    (incident,) = stage.controller.cases.incidents
    assert [one.rank for one in incident.culprits] == [0]


class Turns(stand_ins.PlainLocators):
    """Names a rank with the first evidence; later nobody, for this reason."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why, self.looks = why, 0

    def slow(self, evidence: Evidence) -> Diagnosis:
        self.looks += 1
        return super().slow(evidence) if self.looks == 1 else Diagnosis("slow", summary=self.why)


@pytest.mark.parametrize(("why", "named"), [(UNSTEADY, []), ("cause unknown", [0])], ids=["turns", "unknown"])
def test_a_second_look_takes_a_name_back_only_where_others_are_slow_in_turn(
    why: str, named: list[int]
) -> None:
    locators = Turns(why)
    stage = Stage()
    stage.fresh = lambda: Controller(Settings(nodes=3), locators=locators)  # type: ignore[method-assign]
    for line in (
        "cluster nodes=3 ranks=1",
        "beat step=39",
        "found kind=slow rank=0-2 step=33 onset=31 before=0.5 after=1.0",
        "profiles rank=0 onset=30",
        "beat step=44",
        "wait 2",
        "profiles rank=0 onset=30",
    ):
        stage.run(line)
    assert locators.looks == 2
    (incident,) = stage.controller.cases.incidents
    assert [one.rank for one in incident.culprits] == named
