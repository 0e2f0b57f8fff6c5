"""Launchers that come to the address where the job began are sent to the controller that the job has by now."""

from __future__ import annotations

import pytest
from tests.unit.control.staged_job import Stage, sent

from keepstep.wire import Hello, Moved

ELSEWHERE = Moved(2, "10.0.0.7", 41873)
HOST = 30


@pytest.mark.parametrize(("missing", "told"), [(1, [((0, 1), ELSEWHERE)]), (0, [])])
def test_they_are_sent_on_unless_they_have_places_here(missing: int, told: list[object]) -> None:
    stage = Stage(3, missing=missing)
    stage.controller.connected(HOST, "client")
    effects = stage.say(HOST, Hello("client", "gpu-7", -1, 1), ELSEWHERE)
    assert sent(effects, Moved) == told


def test_a_launcher_sends_nobody_away() -> None:
    stage = Stage(3, missing=1)
    assert sent(stage.say(0, ELSEWHERE), Moved) == []
