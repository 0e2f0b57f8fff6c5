"""What the controller does with probes: of links that it blames for a slowdown, and answers that nobody asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from tests.scenarios.test_control_scenarios import Stage
from tests.unit.control import control_stand_ins as stand_ins

from keepstep.control.controller import Controller
from keepstep.control.effects import Effect, Say, Send
from keepstep.control.settings import Settings
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Culprit, Diagnosis, Link
from keepstep.core.summary import Endpoint, PathProbe
from keepstep.locate import with_probes
from keepstep.wire.messages import Probed, ProbeRequest, Reachable


class LinkLocators(stand_ins.PlainLocators):
    """Blames the link between the first two nodes."""

    def slow(self, evidence: Evidence) -> Diagnosis:
        link = Link((0, 1), ("gpu-0", "gpu-1"))
        return Diagnosis("slow", (Culprit(None, link, "", "transfer", 3.0, "medium", "network"),), (), (), ())

    def probed(self, diagnosis: Diagnosis, probes: Sequence[PathProbe]) -> Diagnosis:
        return with_probes(diagnosis, probes)


@pytest.fixture
def stage() -> Stage:
    made = Stage()
    made.nodes, made.ranks = 3, 1
    made.fresh = lambda: Controller(Settings(nodes=3), locators=LinkLocators(), unix_s=lambda s: s)  # type: ignore[method-assign]
    for line in ("cluster nodes=3 ranks=1", "reachable node=0-2", "beat step=39"):
        made.run(line)
    return made


def said(effects: Sequence[Effect]) -> list[Say]:
    return [effect for effect in effects if isinstance(effect, Say)]


def slow_link(stage: Stage) -> None:
    for line in (
        "found kind=slow rank=0-2 step=33 onset=30 before=0.5 after=1.0",
        "profiles rank=0 onset=30",
    ):
        stage.run(line)


def test_a_link_that_is_blamed_is_probed_both_ways_and_by_nobody_else(stage: Stage) -> None:
    slow_link(stage)
    targets = {
        stage.names[peer]: [target.node for target in request.targets]
        for peer, request in stage.to_probe.items()
    }
    assert targets == {"agent0": ["gpu-1"], "agent1": ["gpu-0"]}
    assert stage.do_probes("0", lost="gpu-0:gpu-1") == []
    (verdict,) = said(stage.do_probes("1", lost="gpu-0:gpu-1"))
    assert verdict.what == "sharper"
    assert verdict.incident.culprits[0].confidence == "high"
    assert "no answer" in verdict.incident.evidence[0]


def test_a_sound_link_stays_as_sure_as_it_was(stage: Stage) -> None:
    slow_link(stage)
    assert said(stage.do_probes("0,1")) == []
    (incident,) = stage.controller.cases.incidents
    assert incident.culprits[0].confidence == "medium"
    assert "came back" in incident.evidence[0]


def test_answers_that_nobody_asked_for_or_that_are_impossible_change_nothing(stage: Stage) -> None:
    slow_link(stage)
    agents = {node: stage.peer(f"agent{node}") for node in range(3)}
    number = stage.to_probe[agents[0]].request
    lost = PathProbe("gpu-0", "gpu-1", "timeout", 2.5)
    assert stage.say(agents[2], Probed(number, 2, (lost,))) == []  # was not asked
    assert stage.say(agents[0], Probed(number + 9, 0, (lost,))) == []
    impossible = tuple(PathProbe("gpu-0", "gpu-1", "timeout", value) for value in (-1.0, math.inf, math.nan))
    assert stage.say(agents[0], Probed(number, 0, impossible)) == []
    assert said(stage.say(agents[1], Probed(number, 1, ()))) == []
    (incident,) = stage.controller.cases.incidents
    assert incident.culprits[0].confidence == "medium"


def test_many_endpoints_of_one_node_are_cut_and_without_any_nobody_is_asked(stage: Stage) -> None:
    many = tuple(Endpoint(f"10.0.1.{number}", 4000) for number in range(100))
    stage.say(stage.peer("agent1"), Reachable(1, many))
    stage.say(stage.peer("agent0"), Reachable(0, ()))
    slow_link(stage)
    ((peer, request),) = stage.to_probe.items()
    assert stage.names[peer] == "agent0"
    assert isinstance(request, ProbeRequest)
    assert [len(target.endpoints) for target in request.targets] == [4]
    assert not any(isinstance(effect, Send) for effect in stage.do_probes("0"))
