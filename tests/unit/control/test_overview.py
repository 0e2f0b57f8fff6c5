"""What a program outside the job is told of it, and that asking changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.control.staged_job import Stage

from keepstep.control.membership.transitions import JobState
from keepstep.control.overview import answer_to_look
from keepstep.core.incident import REPLACEMENT, Action, Culprit, Incident
from keepstep.wire import Hello, Look, Moved, Overview
from keepstep.wire.channel import encode

ELSEWHERE = Moved(2, "10.0.0.7", 41873)
SLOW = Incident(
    *(3, "slow", 40, 41, None, 1.8, (Culprit(rank=5, node="gpu-9", slowdown=2.0, confidence="high"),)),
    *((), (), ()),
    detected_unix_s=1700000000.5,
)
SLOW = replace(SLOW, actions=(Action(REPLACEMENT, before_iteration_s=0.3, measured_iteration_s=0.1),))


def overview(stage: Stage) -> Overview:
    answer = answer_to_look(stage.controller, 2.0)
    assert isinstance(answer, Overview)
    return answer


def test_it_tells_how_the_job_stands() -> None:
    stage = Stage(3)
    assert (overview(stage).state, overview(stage).nodes, overview(stage).spares) == ("warming up", 3, 0)
    assert overview(stage).verdict == ""


def test_it_tells_the_newest_incident_and_the_faults_that_are_proven() -> None:
    stage = Stage(3)
    register = stage.controller.cases.desk.register
    register.restore(SLOW)
    (fault,) = overview(stage).faults
    assert (fault.node, fault.kind, fault.incident, fault.unix_s) == ("gpu-9", "slow", 3, 1700000000.5)
    assert overview(stage).verdict.startswith("incident 0003: SLOW")
    still_plays = replace(SLOW, culprits=(replace(SLOW.culprits[0], node="gpu-1"),))
    register.restore(still_plays)
    assert overview(stage).faults == ()


def test_a_node_that_plays_ranks_while_the_job_runs_is_not_told_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(3)
    lost = replace(SLOW, kind="crash", culprits=(Culprit(rank=None, node="gpu-1", cause="node lost"),))
    stage.controller.cases.desk.register.restore(lost)
    assert [one.kind for one in overview(stage).faults] == ["lost"]
    monkeypatch.setattr(stage.controller, "state", lambda _: JobState.RUNNING)
    assert overview(stage).faults == ()


def test_only_the_last_incidents_are_kept() -> None:
    stage = Stage(3)
    register = stage.controller.cases.desk.register
    for number in range(500):
        register.restore(replace(SLOW, number=number))
    told = overview(stage)
    assert len(told.faults) == 64
    assert told.faults[-1].incident == 499
    assert len(encode(told)) < 1 << 16


def test_an_incident_is_told_as_a_whole_or_not_at_all() -> None:
    stage = Stage(3)
    register = stage.controller.cases.desk.register
    for number, count in enumerate([1, 70, 40, 30, 20]):
        culprits = tuple(replace(SLOW.culprits[0], node=f"gpu-{one + 9}") for one in range(count))
        register.restore(replace(SLOW, number=number, culprits=culprits))
    told = [one.incident for one in overview(stage).faults]
    assert {one: told.count(one) for one in told} == {0: 1, 3: 30, 4: 20}


def test_a_controller_that_the_job_has_left_says_where_it_is() -> None:
    stage = Stage(3, missing=1)
    assert overview(stage).state == "created"
    stage.controller.connected(30, "client")
    stage.say(30, Hello("client", "gpu-7", -1, 1), ELSEWHERE)
    assert answer_to_look(stage.controller, 2.0) == ELSEWHERE


def test_only_a_client_may_ask() -> None:
    stage = Stage(3)
    assert stage.say(0, Look()) == []
