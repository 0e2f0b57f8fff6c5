"""Which steps of a slowdown tell who is slow."""

from __future__ import annotations

from dataclasses import replace

from keepstep.control.incidents.slow_evidence import untreated_until
from keepstep.core.incident import Action, Incident

SLOW = Incident(1, "slow", 10, 13, None, 2.0, (), (), (), ())


def test_steps_from_the_first_remedy_on_tell_nothing() -> None:
    assert untreated_until(None) > 1 << 60
    probed = Action("none", None, "nothing pays", step=40)
    treated = [Action("S2, micro-batches", step=66), Action("S2, micro-batches", step=80)]
    assert untreated_until(replace(SLOW, actions=(probed,))) > 1 << 60
    assert untreated_until(replace(SLOW, actions=(probed, *treated))) == 67
