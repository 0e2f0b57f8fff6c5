"""Remedy S4: whose ranks spares take, when it is ordered, and that the job begins anew with all steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest
from tests.unit.control.membership.test_elastic import Elastic, told
from tests.unit.control.membership.test_reforming import kinds

from keepstep.control.membership.pauses import Drained
from keepstep.control.remedies.moves import Look
from keepstep.control.remedies.replacement import Replacement
from keepstep.core.incident import Culprit, Link
from keepstep.wire.messages import Operate, Seal

NAMES = ("gpu-0", "gpu-1", "gpu-2", "gpu-3")


class Office:
    """The part of a desk that is needed here: ``spares`` wait, and gpu-0 has to stay."""

    def __init__(self, spares: int) -> None:
        nodes = {rank: SimpleNamespace(name=name) for rank, name in enumerate(NAMES)}
        self.cluster = SimpleNamespace(nodes=nodes)
        self.spares = spares
        self.ordered: list[tuple[dict[int, str], str]] = []

    @property
    def rank_moves(self) -> Office:
        return self

    def irreplaceable(self, nodes: Any) -> str:
        return "" if 0 not in nodes and len(nodes) <= self.spares else "no spare waits"

    def replace(self, nodes: Any, why: str, now_s: float) -> str:
        self.ordered.append((dict(nodes), why))
        return ""


def case(*culprits: Culprit) -> Any:
    return SimpleNamespace(incident=SimpleNamespace(culprits=culprits))


def slow(rank: int, slowdown: float, confidence: Any = "high") -> Culprit:
    return Culprit(
        rank=rank, node=f"gpu-{rank // 2}", slowdown=slowdown, confidence=confidence, cause="compute"
    )


def remedy_s(spares: int, *culprits: Culprit) -> tuple[float | None, str]:
    """What an iteration of 1 s would take that took 0.2 s, and what would be done."""
    office = Office(spares)
    made = Replacement(office)  # type: ignore[arg-type]
    found = made.remedy(Look([case(*culprits)], (), None, 0.2, 1.0))
    return (found.iteration_s, made.told()) if found else (None, "")


LINK = Culprit(link=Link((2, 4), ("gpu-1", "gpu-2")))


@pytest.mark.parametrize(
    ("spares", "culprits", "expected"),
    [
        (1, (slow(3, 5.0),), (0.2, "gpu-1 is replaced by spares")),
        (2, (slow(3, 2.0), slow(5, 4.0)), (0.2, "gpu-[1-2] are replaced by spares")),
        (1, (slow(3, 2.0), slow(5, 4.0)), (0.4, "gpu-2 is replaced by spares")),  # the slowest first
        (1, (slow(1, 5.0), slow(3, 2.0)), (1.0, "gpu-1 is replaced by spares")),  # the slowest has to stay
        (1, (slow(2, 5.0), slow(3, 5.0)), (0.2, "gpu-1 is replaced by spares")),  # both on one node
        (0, (slow(3, 5.0),), (None, "")),
        (1, (slow(1, 5.0),), (None, "")),
        (1, (slow(3, 5.0, "low"),), (None, "")),
        (1, (slow(3, 5.0), LINK), (None, "")),  # what the link costs is not known
        (1, (LINK,), (None, "")),
        (1, (), (None, "")),
        (1, (Culprit(rank=9, node="gpu-9", confidence="high"),), (None, "")),
    ],
)
def test_who_is_replaced_and_what_it_gives(
    spares: int, culprits: tuple[Culprit, ...], expected: tuple[float | None, str]
) -> None:
    assert remedy_s(spares, *culprits) == expected


def test_it_is_done_when_their_names_are_gone() -> None:
    office = Office(1)
    made = Replacement(office)  # type: ignore[arg-type]
    assert made.may_help([case(slow(3, 5.0))])
    assert made.remedy(Look([case(slow(3, 5.0))], (), None, 0.2, 1.0))
    assert made.order(5.0) == ""
    assert office.ordered == [({1: "rank 3 takes 5 times as long (compute)"}, "gpu-1 is slow")]
    assert made.is_ordered
    assert made.begun_again()
    assert not made.is_done(False)
    office.cluster.nodes[1].name = "gpu-7"
    assert made.is_done(False)


def test_a_node_for_which_there_is_no_spare_is_said() -> None:
    made = Replacement(Office(0))  # type: ignore[arg-type]
    assert made.refused([case(slow(3, 5.0))]) == "no spare waits"
    assert made.refused([case(LINK)]) == ""
    assert Replacement(Office(1)).refused([case(slow(3, 5.0))]) == ""  # type: ignore[arg-type]


def with_spare() -> Elastic:
    job = Elastic(3, least=3)
    job.come(7)
    return job


def test_a_spare_takes_the_ranks_of_a_slow_node_when_all_have_sealed() -> None:
    job = with_spare()
    before = job.places()
    assert job.moves.replace({1: "rank 2 is slow"}, "gpu-1 is slow", 5.0) == ""
    assert job.sent == [((0, 1, 2), Seal(0, warm=True))]  # nobody waits: let standbys be warm
    for number in range(3):
        orders = job.pauses.sealed(job.launcher(number), 0, 7, "", 6.0)
    assert kinds(orders) == ["HaltThese"]
    assert job.halt(0, 1, 2, now_s=7.0) == []  # the spare has not said yet where it can be reached
    orders = job.halt(7, now_s=7.1)
    assert kinds(orders) == ["Renew", "Exclude", "Tell"]
    assert told(orders) == "gpu-1 is slow; node gpu-1 replaced; all nodes begin again"
    assert job.places() == {"gpu-0": before["gpu-0"], "gpu-2": before["gpu-2"], "gpu-7": before["gpu-1"]}


def test_a_spare_that_goes_meanwhile_leaves_the_slow_node_where_it_is() -> None:
    job = with_spare()
    job.operating.asked(99, Operate("replace", nodes=("gpu-1",)), "", 5.0)
    for number in range(3):
        job.pauses.sealed(job.launcher(number), 0, 7, "", 6.0)
    job.rendezvous.leave(job.launcher(7), 7)
    orders = job.halt(0, 1, 2, now_s=7.0)
    assert kinds(orders) == ["Renew", "Tell"]
    job.tick({99}, 8.0)
    why = "gpu-1 stays, no spare was left for it; the job begins again, incarnation 1"
    assert [answer.refused for answer in job.answers] == [why]


def test_an_operator_has_a_node_replaced() -> None:
    job = with_spare()
    job.operating.asked(99, Operate("replace", nodes=("1",)), "", 5.0)
    for number in range(3):
        job.pauses.sealed(job.launcher(number), 0, 7, "", 6.0)
    orders = job.halt(0, 1, 2, 7, now_s=7.0)
    assert "node gpu-1 replaced" in told(orders)
    job.tick({99}, 8.0)
    assert [answer.done for answer in job.answers] == ["begins again, incarnation 1"]


def test_a_node_is_drained_once_its_spare_has_taken_its_place() -> None:
    job = with_spare()
    job.operating.asked(99, Operate("drain", nodes=("1",), why="fan is loud"), "", 5.0)
    for number in range(3):
        job.pauses.sealed(job.launcher(number), 0, 7, "", 6.0)
    assert job.operating.drained == []
    job.halt(0, 1, 2, 7, now_s=7.0)
    job.tick({99}, 8.0)
    (answer,) = job.answers
    assert answer.done == "gpu-1 has left the job, which begins again, incarnation 1"
    assert job.operating.drained == [Drained("gpu-1", "fan is loud", 1)]


def test_a_node_that_stays_is_not_drained() -> None:
    job = with_spare()
    job.operating.asked(99, Operate("drain", nodes=("gpu-1",)), "", 5.0)
    for number in range(3):
        job.pauses.sealed(job.launcher(number), 0, 7, "", 6.0)
    job.rendezvous.leave(job.launcher(7), 7)
    job.halt(0, 1, 2, now_s=7.0)
    job.tick({99}, 8.0)
    assert "gpu-1 stays" in job.answers[0].refused
    assert job.operating.drained == []


@pytest.mark.parametrize(
    ("verb", "nodes", "would"),
    [
        ("drain", ("1",), "gpu-7 would take the ranks of gpu-1, which would leave the job"),
        ("replace", ("gpu-2",), "gpu-7 would take the ranks of gpu-2, which would leave the job"),
        ("exchange", ("gpu-2", "1"), "gpu-2 and gpu-1 would exchange their ranks"),
    ],
)
def test_what_would_be_done_is_said_and_not_done(
    verb: Literal["exchange", "replace", "drain"], nodes: tuple[str, ...], would: str
) -> None:
    job = with_spare()
    assert job.moves.replace({1: "rank 2 is slow"}, "gpu-1 is slow", 5.0) == ""
    before = len(job.effects)
    assert job.operating.asked(99, Operate(verb, nodes=nodes, only_say=True), "", 5.0) == []
    after = "all would begin again once the next step is sealed; nothing was done"
    assert [answer.done for answer in job.answers] == [f"{would}; {after}"]
    assert len(job.effects) == before + 1
    assert job.pauses.wanted is not None, "what the controller wants itself is not given up"


@pytest.mark.parametrize("only_say", [False, True])
@pytest.mark.parametrize("verb", ["replace", "drain"])
@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (("gpu-9",), "gpu-9 is no node of this job; it has gpu-[0-2]"),
        ((), "give the node that is to be replaced"),
        (("gpu-0", "gpu-1"), "no spare waits to take the place of gpu-1; start one with the same command"),
    ],
)
def test_what_cannot_be_replaced_is_refused_in_a_line(
    verb: Literal["replace", "drain"], only_say: bool, nodes: tuple[str, ...], why: str
) -> None:
    job = with_spare()
    assert job.operating.asked(99, Operate(verb, nodes=nodes, only_say=only_say), "", 5.0) == []
    (answer,) = job.answers
    assert why in answer.refused


def test_without_a_spare_nothing_is_ordered() -> None:
    job = Elastic()
    why = "no spare waits to take the place of gpu-1; start one with the same command"
    assert job.moves.irreplaceable([1]) == why
    assert job.moves.replace({1: "slow"}, "gpu-1 is slow", 5.0) == why
    assert job.moves.irreplaceable([9]) == "it was not placed"
    assert not job.sent
