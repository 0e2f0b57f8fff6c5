"""A job whose waits are not recorded, as on NCCL: whoever the locators name is named with low confidence only."""

from __future__ import annotations

import pytest
from tests.scenarios.test_control_scenarios import Stage
from tests.unit.control import control_stand_ins as stand_ins

from keepstep.control.controller import Controller
from keepstep.control.effects import Send
from keepstep.control.settings import Settings
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Incident
from keepstep.wire.messages import Kill


class Blind(stand_ins.PlainLocators):
    """The plain locators, which see who differs but not who waits for whom."""

    def waits_recorded(self, evidence: Evidence) -> bool:
        return False

    def waits_seen(self, evidence: Evidence) -> bool:
        return False


@pytest.fixture
def stage() -> Stage:
    made = Stage()
    settings = Settings(nodes=2, restart_hangs=True, max_restarts=2, validate=False)
    made.fresh = lambda: Controller(settings, locators=Blind(), unix_s=lambda s: s)  # type: ignore[method-assign]
    return made


def told(stage: Stage, *lines: str) -> Incident:
    for line in lines:
        stage.run(line)
    (incident,) = stage.controller.cases.incidents
    return incident


def test_a_slow_rank_is_named_with_low_confidence(stage: Stage) -> None:
    incident = told(
        stage,
        "cluster nodes=2 ranks=2",
        "beat step=40",
        "found kind=slow rank=0-3 step=33 onset=31 before=0.5 after=1.0",
        "profiles rank=1 onset=31",
    )
    assert [(one.rank, one.confidence) for one in incident.culprits] == [(1, "low")]
    assert any("NCCL" in line for line in incident.missing)


def test_a_hung_rank_is_named_with_low_confidence_and_not_ended(stage: Stage) -> None:
    incident = told(
        stage,
        "cluster nodes=2 ranks=2",
        "beat step=39",
        "wait 40",
        "found kind=hang rank=0-3 step=39 stuck=40 limit=19",
        "states rank=1 idle=40",
    )
    assert [(one.rank, one.confidence) for one in incident.culprits] == [(1, "low")]
    assert stage.written[1].next_action == "none: it is not sure enough who holds the job up"
    effects = [effect for _ in range(600) for effect in stage.controller.tick(_tenth(stage))]
    assert not [one for one in effects if isinstance(one, Send) and isinstance(one.message, Kill)]


def _tenth(stage: Stage) -> float:
    stage.now_s = round(stage.now_s + 0.1, 3)
    return stage.now_s
