"""When processes that a hang is blamed on are ended, and what is ordered."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import pytest

from keepstep.control.cluster import Cluster
from keepstep.control.incidents.case import Desk
from keepstep.control.incidents.hang_case import HangCase
from keepstep.control.incidents.hang_evidence import blamed_by, evidence, hang_outlook
from keepstep.control.incidents.hang_remedy import HangRemedy
from keepstep.core.finding import Finding
from keepstep.core.incident import Action, Confidence, Culprit, Incident, Link
from keepstep.core.summary import RankState
from keepstep.wire.messages import Kill, States

LIMIT_S = 4.0
ASLEEP = RankState(
    2, True, 7, 1, 90.0, 100, 61.0, 100.0, process_state="S", process=77
)  # 39 s without progress
LATER = replace(ASLEEP, now_s=100.5)
STOPPED = replace(ASLEEP, process_state="T", last_progress_s=95.0)


def computing(since_s: float) -> RankState:
    return replace(LATER, process_state="R", last_progress_s=LATER.now_s - since_s)


@pytest.mark.parametrize(
    ("first", "last", "limit_s", "why"),
    [
        (ASLEEP, LATER, LIMIT_S, "asleep, no progress for 40 s"),
        (ASLEEP, LATER, 60.0, ""),  # a pause as long as others that it has shown
        (ASLEEP, ASLEEP, LIMIT_S, ""),  # one look only
        (
            replace(ASLEEP, last_progress_s=75.0),
            replace(LATER, last_progress_s=75.0),
            LIMIT_S,
            "",
        ),  # a slow disk
        (ASLEEP, LATER, 0.0, ""),  # no pause is known to compare with
        (ASLEEP, replace(LATER, progress=101), LIMIT_S, ""),
        (ASLEEP, replace(LATER, process=78), LIMIT_S, ""),
        (ASLEEP, replace(LATER, process_state="D"), LIMIT_S, ""),
        (computing(200.0), computing(200.0), LIMIT_S, ""),  # perhaps for long
        (computing(301.0), computing(301.0), LIMIT_S, "no progress for 301 s"),
        (STOPPED, STOPPED, LIMIT_S, "stopped"),
        (STOPPED, STOPPED, 6.0, ""),
        (
            replace(ASLEEP, process_state="t"),
            replace(LATER, process_state="t"),
            LIMIT_S,
            "",
        ),  # a debugger holds it
        (ASLEEP, replace(LATER, alive=False, process_state=""), LIMIT_S, ""),
    ],
)
def test_evidence(first: RankState, last: RankState, limit_s: float, why: str) -> None:
    found = evidence(first, last, limit_s)
    assert (why in found) if why else found == ""


class Stand:
    """A desk, and the case of a hang of which these ranks are blamed."""

    def __init__(
        self, ranks: Collection[int] = (2,), world: int = 8, confidence: Confidence = "high"
    ) -> None:
        self.cluster = Cluster(1)
        self.cluster.world_size = world
        self.cluster.plays(self.cluster.node(0, "node-0"), tuple(range(world)))
        self.asked: list[Collection[int] | None] = []
        self.sent: list[Kill] = []
        self.reachable = True
        self.closed = False
        culprits = tuple(
            Culprit(rank=rank, node="node-0", cause="?", confidence=confidence) for rank in ranks
        )
        self.incident: Any = Incident(1, "hang", 7, 7, None, None, culprits, (), (), ())
        self.stuck = {rank: Finding("hang", rank, "node-0", 0.0, 7, limit_s=LIMIT_S) for rank in ranks}
        self.actions: list[Action] = []
        self.agents = self
        self.remedy = HangRemedy(cast("Desk", self), cast("HangCase", self), self.send)

    def ask_states(self, stacks: bool, now_s: float, nodes: Collection[int] | None = None) -> int:
        self.asked.append(nodes)
        return len(self.asked)

    def standing(self, rank: int) -> Finding | None:
        return self.stuck.get(rank)

    def acted(self, action: Action) -> None:
        self.actions.append(action)

    def send(self, kill: Kill) -> bool:
        self.sent += [kill] if self.reachable else []
        return self.reachable

    def look(self, now_s: float, *states: RankState) -> None:
        self.remedy.tick(now_s)
        if self.remedy.question is not None:
            self.remedy.states([States(self.remedy.question, 0, states)])


def test_two_looks_at_a_sleeper_and_its_process_is_ended() -> None:
    stand = Stand()
    stand.look(10.0, ASLEEP)
    assert not stand.sent
    stand.look(10.2, LATER)  # too early
    assert stand.asked == [{0}]
    stand.look(10.6, LATER)
    assert [(kill.rank, kill.process) for kill in stand.sent] == [(2, 77)]
    assert [action.name for action in stand.actions] == ["end the hung process"]


def test_an_order_that_was_lost_is_repeated() -> None:
    stand = Stand()
    stand.reachable = False
    for at_s in (0.0, 1.0, 2.0):
        stand.look(10.0 + at_s, STOPPED)
    assert not stand.actions
    stand.reachable = True
    stand.look(20.0, STOPPED)
    stand.look(30.0, STOPPED)
    assert len(stand.sent) == 2


@pytest.mark.parametrize(
    "stand",
    [
        Stand(confidence="low"),
        Stand(ranks=range(5), world=64),
        Stand(ranks=(0, 1, 2), world=4),
    ],
)
def test_nobody_is_ended_when_it_is_not_sure_who(stand: Stand) -> None:
    stand.look(10.0, *(replace(STOPPED, rank=rank) for rank in stand.stuck))
    assert not stand.asked
    assert not stand.sent


def test_who_went_on_or_has_no_finding_of_its_own_is_left_alone() -> None:
    stand = Stand()
    stand.stuck.clear()
    stand.look(10.0, STOPPED)
    assert not stand.asked


def test_of_two_both_or_none() -> None:
    stand = Stand(ranks=(2, 3))
    stand.look(10.0, STOPPED, replace(STOPPED, rank=3, process_state="R", process=78))
    assert not stand.sent
    stand.look(20.0, STOPPED, replace(STOPPED, rank=3, process=78))
    assert [kill.process for kill in stand.sent] == [77, 78]


def test_a_look_comes_when_the_patience_ends() -> None:
    stand = Stand()
    asked: list[int] = []
    for at_s in (10.0, 10.6, 11.7, 12.0, 12.15):  # without progress since -18.0
        stand.look(at_s, replace(ASLEEP, last_progress_s=72.0, now_s=90.0 + at_s))
        asked.append(len(stand.asked))
    assert asked == [1, 2, 3, 3, 4]  # not 5 s after the one before
    assert len(stand.sent) == 1


@pytest.mark.parametrize(
    ("state", "said", "in_s"),
    [
        (ASLEEP, "ends rank 2", 0.5),  # still for longer than anybody is waited for
        (replace(ASLEEP, last_progress_s=99.0), "ends rank 2", 29.5),
        (replace(ASLEEP, last_progress_s=99.0, process_state="R"), "ends rank 2", 299.5),
        (STOPPED, "ends rank 2", 0.5),
        (replace(STOPPED, last_progress_s=99.0), "ends rank 2", 3.5),
        (
            replace(ASLEEP, process_state="D"),
            "none: rank 2 waits in the kernel, where no signal ends it",
            None,
        ),
        (replace(ASLEEP, process_state="t"), "none: a debugger holds rank 2", None),
        (replace(ASLEEP, process=0), "none: it is not known where rank 2 is", None),
    ],
)
def test_what_will_be_done_is_said_before_it_is_done(state: RankState, said: str, in_s: float | None) -> None:
    assert hang_outlook({2: LIMIT_S}, {2: state}) == (said, in_s)


def test_of_several_the_last_one_counts() -> None:
    states = {2: ASLEEP, 3: replace(ASLEEP, rank=3, last_progress_s=99.0)}
    assert hang_outlook({2: LIMIT_S, 3: LIMIT_S}, states) == ("ends ranks 2-3", 29.5)
    assert hang_outlook({2: LIMIT_S, 4: LIMIT_S}, states)[1] is None


def _hang(*culprits: Culprit, kind: Any = "hang") -> Incident:
    return Incident(1, kind, 7, 7, None, None, culprits, (), (), ())


_LINK = Link((0, 1), ("node-0", "node-1"))


@pytest.mark.parametrize(
    ("incident", "why"),
    [
        (_hang(Culprit(2, confidence="high"), kind="desync"), "would again"),
        (_hang(), "not known who"),
        (_hang(Culprit(link=_LINK, confidence="high")), "a link is to blame"),
        (_hang(Culprit(2, confidence="low")), "not sure enough"),
        (_hang(Culprit(3, confidence="high")), "rank 3 has not been still for longer"),
        (_hang(*(Culprit(2, confidence="high"),) * 2, Culprit(1, confidence="high")), "rank 1 has not been"),
    ],
)
def test_why_nobody_is_ended_is_said(incident: Incident, why: str) -> None:
    standing = {2: Finding("hang", 2, "node-0", 0.0, 7, limit_s=LIMIT_S)}.get
    blamed, told = blamed_by(incident, standing, 8)
    assert not blamed
    assert why in told
