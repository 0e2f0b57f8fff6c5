"""When processes that a hang is blamed on are ended, and what is ordered."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import pytest

from keepstep.control.cluster import Cluster
from keepstep.control.incidents.case import Desk
from keepstep.control.incidents.hang_case import HangCase
from keepstep.control.incidents.hang_evidence import Patience, blamed_by, hang_outlook, proof, tempered
from keepstep.control.incidents.hang_remedy import HangRemedy
from keepstep.core.finding import Finding
from keepstep.core.incident import Action, Confidence, Culprit, Diagnosis, Incident, Link
from keepstep.core.summary import How, RankState, Stillness
from keepstep.wire.messages import Kill, States

LIMIT_S = 4.0
_LINK = Link((0, 1), ("node-0", "node-1"))
PATIENCE = Patience(hang_s=30.0, stopped_s=60.0)
ASLEEP = RankState(
    *(2, True, 7, 1, 90.0, 100, 61.0, 100.0),  # 39 s without progress
    process_state="S",
    process=77,
    stillness=Stillness("still", 62.0, "wait (train.py:14)", 100.0),
)


def doing(how: How, seconds: float, why: str = "") -> RankState:
    """The rank, which has done this for so long."""
    return replace(
        ASLEEP, last_progress_s=100.0 - seconds, stillness=Stillness(how, 100.0 - seconds, why, 100.0)
    )


_AWAITS = replace(
    doing("still", 5.0), stillness=Stillness("still", 95.0, "", 100.0, awaits_child=True)
)  # as an upload
_AWAITED_LONG = Stillness("still", 62.0, "", 100.0, awaits_child=True)


@pytest.mark.parametrize(
    ("state", "limit_s", "why"),
    [
        (ASLEEP, LIMIT_S, "nothing of it has moved for 38 s (wait (train.py:14))"),
        (doing("still", 29.0), LIMIT_S, ""),
        (replace(doing("still", 39.0), last_progress_s=75.0), LIMIT_S, ""),
        (ASLEEP, 0.0, ""),  # no pause is known to compare with
        (replace(ASLEEP, alive=False), LIMIT_S, ""),
        (replace(ASLEEP, stillness=None), LIMIT_S, ""),
        (
            replace(ASLEEP, now_s=9000.0, stillness=Stillness("still", 62.0, "", 90.0)),
            LIMIT_S,
            "",
        ),  # all stood still
        (doing("spins", 299.0, "it computes"), LIMIT_S, ""),  # perhaps for long
        (doing("spins", 301.0, "it computes"), LIMIT_S, "it has computed for 301 s without an operation"),
        (doing("stopped", 59.0), LIMIT_S, ""),
        (doing("stopped", 61.0), LIMIT_S, "its process has been stopped for 61 s"),
        (doing("moves", 9000.0, "its child processes compute"), LIMIT_S, ""),
        (doing("kernel", 9000.0), LIMIT_S, ""),
        (doing("traced", 9000.0), LIMIT_S, ""),
        (doing("unread", 9000.0), LIMIT_S, ""),
    ],
)
def test_proof(state: RankState, limit_s: float, why: str) -> None:
    found = proof(state, limit_s, PATIENCE)
    assert found.startswith(why) if why else found == ""


@pytest.mark.parametrize(
    ("timeout_s", "limit_s", "seconds"),
    [
        (0.0, 4.0, 600.0),  # nothing is known of its timeouts
        (1800.0, 4.0, 600.0),
        (1800.0, 900.0, 900.0),  # twice the longest pause of this phase
        (600.0, 4.0, 540.0),  # a minute before torch would end the job
        (60.0, 4.0, 60.0),  # torch ends the job, keepstep never does
    ],
)
def test_patience_by_timeouts_and_pauses(timeout_s: float, limit_s: float, seconds: float) -> None:
    state = replace(doing("still", 0.0), timeout_s=timeout_s)
    assert Patience().with_rank(state, limit_s) == seconds
    spins = replace(state, stillness=Stillness("spins", 100.0))
    assert Patience().with_rank(spins, limit_s) == 10 * seconds


def test_patience_is_twice_the_longest_pause_that_it_has_ended_by_itself() -> None:
    state = replace(doing("still", 0.0), pause_s=590.0)
    assert Patience().with_rank(state, 4.0) == 1180.0
    assert Patience().with_rank(replace(state, timeout_s=600.0), 4.0) == 540.0


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
        self.agents = self.register = self
        self.ended: dict[int, tuple[int, int | None]] = {}
        self.holds_up = True  # whether a look at all ranks shows that the blamed ones hold up the others
        self.looked_again = 0
        self.patience = PATIENCE
        self.remedy = HangRemedy(cast("Desk", self), cast("HangCase", self), self.send)

    def ask_states(self, stacks: bool, now_s: float, nodes: Collection[int] | None = None) -> int:
        self.asked.append(nodes)
        return len(self.asked)

    def standing(self, rank: int) -> Finding | None:
        return self.stuck.get(rank)

    def still_blames(self, ranks: Collection[int], now_s: float) -> bool:
        return self.holds_up

    def look_again(self, now_s: float) -> None:
        self.looked_again += 1

    def acted(self, action: Action) -> None:
        self.actions.append(action)

    def send(self, kill: Kill) -> bool:
        self.sent += [kill] if self.reachable else []
        return self.reachable

    def look(self, now_s: float, *states: RankState) -> None:
        self.remedy.tick(now_s)
        if self.remedy.question is not None:
            self.remedy.states([States(self.remedy.question, 0, states)], now_s)


def test_with_a_proof_its_process_is_ended() -> None:
    stand = Stand()
    stand.look(10.0, doing("still", 29.0))
    assert not stand.sent
    stand.look(10.5, ASLEEP)  # too early
    assert stand.asked == [{0}]
    stand.look(11.6, ASLEEP)
    assert [(kill.rank, kill.process) for kill in stand.sent] == [(2, 77)]
    assert [action.name for action in stand.actions] == ["end the hung process"]


def test_an_order_that_was_lost_is_repeated() -> None:
    stand = Stand()
    stand.reachable = False
    for at_s in (0.0, 1.0, 2.0):
        stand.look(10.0 + at_s, ASLEEP)
    assert not stand.actions
    stand.reachable = True
    stand.look(20.0, ASLEEP)
    stand.look(30.0, ASLEEP)
    assert len(stand.sent) == 2


@pytest.mark.parametrize(
    "stand",
    [
        Stand(confidence="low"),
        Stand(ranks=range(5), world=64),
        Stand(ranks=(0, 1, 2), world=4),
        Stand(ranks=(0,), world=1),
    ],
)
def test_nobody_is_ended_when_it_is_not_sure_who(stand: Stand) -> None:
    stand.look(10.0, *(replace(ASLEEP, rank=rank) for rank in stand.stuck))
    assert not stand.asked
    assert not stand.sent


def test_nobody_is_ended_whom_nobody_waits_for_any_more() -> None:
    stand = Stand()
    stand.holds_up = False
    stand.look(10.0, ASLEEP)
    assert (stand.sent, stand.looked_again) == ([], 1)
    stand.holds_up = True
    stand.look(11.1, ASLEEP)
    assert [(kill.rank, kill.seen_s) for kill in stand.sent] == [(2, 100.0)]


def test_nobody_is_ended_at_a_step_at_which_that_did_not_help() -> None:
    stand = Stand()
    stand.ended = {2: (0, 7)}
    stand.look(10.0, ASLEEP)
    assert not stand.asked
    stand.ended = {2: (0, 6)}
    stand.look(20.0, ASLEEP)
    assert stand.sent


def test_who_went_on_or_has_no_finding_of_its_own_is_left_alone() -> None:
    stand = Stand()
    stand.stuck.clear()
    stand.look(10.0, ASLEEP)
    assert not stand.asked


def test_of_two_both_or_none() -> None:
    stand = Stand(ranks=(2, 3))
    stand.look(10.0, ASLEEP, replace(doing("moves", 90.0), rank=3, process=78))
    assert not stand.sent
    stand.look(20.0, ASLEEP, replace(ASLEEP, rank=3, process=78))
    assert [kill.process for kill in stand.sent] == [77, 78]


def test_a_look_comes_when_the_patience_ends() -> None:
    stand = Stand()
    asked: list[int] = []
    for at_s in (10.0, 11.1, 12.2, 15.0, 15.6, 17.0, 18.2, 18.7):  # still since -12.0
        stand.look(at_s, doing("still", 22.0 + at_s - 10.0))
        asked.append(len(stand.asked))
    assert asked == [1, 2, 2, 3, 3, 3, 3, 4]  # not 5 s after the one before
    assert len(stand.sent) == 1


@pytest.mark.parametrize(
    ("state", "said", "in_s"),
    [
        (ASLEEP, "none yet, it may go on by itself: ends rank 2", 1.0),
        (doing("still", 1.0), "none yet, it may go on by itself: ends rank 2", 30.0),
        (doing("spins", 1.0), "none yet, it may go on by itself: ends rank 2", 300.0),
        (replace(ASLEEP, stillness=None), "none yet, it may go on by itself: ends rank 2", 31.0),
        (doing("stopped", 5.0), "none yet, it may go on by itself: ends rank 2", 56.0),
        (
            doing("kernel", 5.0),
            "none: rank 2, or a child of it, waits in the kernel for a device, a file server or a control group",
            None,
        ),
        (doing("traced", 5.0), "none: a debugger holds rank 2", None),
        (doing("moves", 5.0, "it computes"), "none: rank 2 works: it computes", None),
        (doing("unread", 5.0, "it has ended"), "none: of rank 2 there is no proof: it has ended", None),
        (replace(ASLEEP, process=0), "none: it is not known where rank 2 is", None),
    ],
)
def test_what_will_be_done_is_said_before_it_is_done(state: RankState, said: str, in_s: float | None) -> None:
    assert hang_outlook({2: LIMIT_S}, {2: state}, PATIENCE) == (said, in_s)


def test_of_several_the_last_one_counts() -> None:
    states = {2: ASLEEP, 3: replace(doing("still", 1.0), rank=3)}
    what, in_s = hang_outlook({2: LIMIT_S, 3: LIMIT_S}, states, PATIENCE)
    assert what.endswith("ends ranks 2-3")
    assert in_s == 30.0
    assert hang_outlook({2: LIMIT_S, 4: LIMIT_S}, states, PATIENCE)[1] is None


@pytest.mark.parametrize(
    ("state", "confidence", "words"),
    [
        (ASLEEP, "high", "rank 2: nothing of it has moved for 38 s (wait (train.py:14))"),
        (doing("still", 5.0), "medium", ""),
        (replace(ASLEEP, stillness=None), "medium", ""),
        (doing("moves", 5.0, "it computes"), "low", "rank 2 works: it computes; it may go on by itself"),
        (_AWAITS, "low", "rank 2 waits for a child process of its own; it may go on by itself"),
        (
            replace(_AWAITS, last_progress_s=61.0, stillness=_AWAITED_LONG),
            "high",
            "rank 2: nothing of it has moved",
        ),
        (replace(ASLEEP, alive=False, process_state=""), "high", ""),
    ],
)
def test_nobody_is_blamed_with_more_confidence_than_there_is_proof(
    state: RankState, confidence: Confidence, words: str
) -> None:
    told = Diagnosis("hang", (Culprit(2, confidence="high", cause="asleep in data"),), evidence=("seen",))
    finding = Finding("hang", 2, "node-0", 0.0, 7, limit_s=LIMIT_S)
    found = tempered(told, {2: state}, lambda _: finding, PATIENCE)
    assert [one.confidence for one in found.culprits] == [confidence]
    assert found.culprits[0].cause == ("at work in data" if confidence == "low" else "asleep in data")
    assert found.evidence[0] == "seen"
    assert len(found.evidence) == (2 if words else 1)
    assert found.evidence[-1].startswith(words or "seen")
    link = replace(told, culprits=(Culprit(link=_LINK, confidence="high"),))
    assert tempered(link, {2: state}, lambda _: finding, PATIENCE) == link


def _hang(*culprits: Culprit, kind: Any = "hang") -> Incident:
    return Incident(1, kind, 7, 7, None, None, culprits, (), (), ())


@pytest.mark.parametrize(
    ("incident", "why"),
    [
        (_hang(Culprit(2, confidence="high"), kind="desync"), "would again"),
        (_hang(), "not known who"),
        (_hang(Culprit(link=_LINK, confidence="high")), "a link is to blame"),
        (_hang(Culprit(2, confidence="low")), "not sure enough"),
        (_hang(Culprit(3, confidence="high")), "rank 3 has not been still for longer"),
        (_hang(*(Culprit(2, confidence="high"),) * 2, Culprit(1, confidence="high")), "rank 1 has not been"),
        (_hang(Culprit(4, confidence="high")), "rank 4 was ended at this step before"),
    ],
)
def test_why_nobody_is_ended_is_said(incident: Incident, why: str) -> None:
    standing = {rank: Finding("hang", rank, "node-0", 0.0, 7, limit_s=LIMIT_S) for rank in (2, 4)}.get
    blamed, told = blamed_by(incident, standing, 8, {4: (0, 7)})
    assert not blamed
    assert why in told
