"""Which steps of a slowdown tell who is slow."""

from __future__ import annotations

from dataclasses import replace

from keepstep.control.incidents.slow_evidence import measured_culprits, untreated_until
from keepstep.core.incident import Action, Incident
from keepstep.core.validation import LinkFigure, RankFigures
from keepstep.validate.judge import judge

SLOW = Incident(1, "slow", 10, 13, None, 2.0, (), (), (), ())


def test_steps_from_the_first_remedy_on_tell_nothing() -> None:
    assert untreated_until(None) > 1 << 60
    probed = Action("none", None, "nothing pays", step=40)
    treated = [Action("S2, micro-batches", step=66), Action("S2, micro-batches", step=80)]
    assert untreated_until(replace(SLOW, actions=(probed,))) > 1 << 60
    assert untreated_until(replace(SLOW, actions=(probed, *treated))) == 67


def test_a_link_over_which_nothing_came_has_no_slowdown() -> None:
    speeds = {0: 9e9, 1: 0.0, 2: 9e9, 3: 9e9}
    figures = [
        RankFigures(rank, links=(LinkFigure((rank - 1) % 4, rank, "ring", 1 << 20, speed, "nccl"),))
        for rank, speed in speeds.items()
    ]
    (culprit,) = measured_culprits(judge(range(4), figures, {}), (), {})
    assert culprit.link is not None
    assert (culprit.link.ranks, culprit.slowdown, culprit.cause) == ((0, 1), 0.0, "network")
    assert culprit.detail == "nothing came, 9000 MB/s over the others"
