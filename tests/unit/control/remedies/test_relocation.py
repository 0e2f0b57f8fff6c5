"""Remedy S3 in the controller: what is read from the traffic, and when an exchange is ordered."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.control.remedies.exchange import Relocation, paths_of
from keepstep.control.remedies.moves import Look
from keepstep.core.incident import Culprit, Link
from keepstep.core.microbatch_shares import Split
from keepstep.core.summary import PathProbe, PeerTraffic
from keepstep.core.validation import LinkFigure, RankFigures, Validation
from keepstep.mitigate import Replicas

NAMES = ("gpu-0", "gpu-1", "gpu-2", "gpu-3")
RANKS = {name: rank for rank, name in enumerate(NAMES)}


def sent(
    one: int, other: int, megabytes: float, seconds_per_byte: float, over_s: float = 10.0
) -> PeerTraffic:
    """In ``over_s`` since the onset; before it nothing is known."""
    count = int(megabytes * 1e6)
    busy_s = count * seconds_per_byte
    return PeerTraffic(NAMES[one], f"10.0.0.{one}", f"10.0.0.{other}", 0.0, 0, 0.0, over_s, count, busy_s)


def both(one: int, other: int, megabytes: float, seconds_per_byte: float) -> list[PeerTraffic]:
    return [sent(one, other, megabytes, seconds_per_byte), sent(other, one, megabytes, seconds_per_byte)]


# DP pairs (0, 2) and (1, 3) carry much, pipelines (0, 1) and (2, 3) little, in short messages.
TRAFFIC = [*both(0, 2, 40, 2e-7), *both(1, 3, 40, 1e-9), *both(0, 1, 0.4, 2e-6), *both(2, 3, 0.4, 2e-6)]


@dataclass
class Office:
    """The part of a desk that is needed here."""

    refusal: str = ""
    cluster: Any = field(
        default_factory=lambda: SimpleNamespace(
            nodes={
                rank: SimpleNamespace(name=name, ranks=(2 * rank, 2 * rank + 1))
                for rank, name in enumerate(NAMES)
            }
        )
    )
    ordered: list[Any] = field(default_factory=list[Any])
    asked: list[tuple[list[tuple[str, str]], int]] = field(default_factory=list)
    tests: list[tuple[list[tuple[int, int]], Any]] = field(default_factory=list)
    is_busy: bool = False  # no validation can begin

    @property
    def agents(self) -> Office:
        return self

    @property
    def rank_moves(self) -> Office:
        return self

    def ask_probes(self, pairs: Any, now_s: float, load_bytes: int = 0) -> int:
        self.asked.append((list(pairs), load_bytes))
        return len(self.asked)

    @property
    def validations(self) -> Office:
        return self

    def begin(self, groups: Any, tell: Any, is_closed: Any, now_s: float) -> bool:
        self.tests.append((list(groups), tell))
        return not self.is_busy

    def exchange(self, takers: Any, why: str, now_s: float) -> str:
        self.ordered.append((takers, why))
        return self.refusal


def case(*culprits: Culprit) -> Any:
    return SimpleNamespace(incident=SimpleNamespace(culprits=culprits))


SLOW = Culprit(link=Link((0, 2), ("gpu-0", "gpu-2")))


def look(*cases: Any, traffic: list[PeerTraffic] = TRAFFIC) -> Look:
    return Look(cases, traffic, None, 0.2, 1.0)


def relocation(refusal: str = "") -> tuple[Relocation, Office]:
    office = Office(refusal)
    return Relocation(office), office  # type: ignore[arg-type]


def test_the_busier_way_of_each_pair_is_what_it_carries() -> None:
    paths = paths_of([sent(0, 1, 10, 1e-9), sent(1, 0, 2, 5e-9), sent(0, 2, 0.001, 1e-3)], RANKS)
    assert paths.rates[(0, 1)] == pytest.approx(1e6)
    assert paths.costs[(0, 1)] == pytest.approx(5e-9)
    assert (0, 2) not in paths.costs  # a kilobyte tells no speed


def test_no_exchange_makes_the_job_faster_than_it_was() -> None:
    made, _ = relocation()
    eight_at_once = [*both(0, 2, 320, 2e-7), *both(1, 3, 320, 1e-9)]  # a node's ranks send together
    remedy = made.remedy(look(case(SLOW), traffic=eight_at_once))
    assert remedy is not None
    assert remedy.iteration_s == 0.2


def test_a_healthy_link_is_one_that_carries_about_as_much() -> None:
    assert paths_of(TRAFFIC, RANKS).healthy((0, 2)) == pytest.approx(1e-9)
    assert paths_of(both(0, 2, 40, 2e-7), RANKS).healthy((0, 2)) == 0.0


def test_heavy_traffic_is_to_leave_the_slow_link() -> None:
    made, office = relocation()
    remedy = made.remedy(look(case(SLOW)))
    assert remedy is not None
    assert remedy.iteration_s == pytest.approx(1.0 - 4e6 * 2e-7 + 4e4 * 2e-7, rel=0.02)
    assert made.order(5.0) == ""
    ((takers, why),) = office.ordered
    assert why == "the link gpu-0 ↔ gpu-2 is slow"
    assert len(takers) == 2
    assert len({0, 2} & set(takers)) == 1
    assert "gpu-" in made.told()
    assert made.is_ordered
    assert made.tick(60.0) == ""
    assert made.begun_again()
    assert not made.is_ordered


def test_an_order_that_comes_to_nothing_is_given_up() -> None:
    made, _ = relocation()
    assert made.remedy(look(case(SLOW)))
    made.order(5.0)
    assert made.tick(244.0) == ""
    assert made.tick(246.0) == "not all ranks sealed a step"
    assert not made.begun_again()


def test_what_is_refused_is_not_waited_for() -> None:
    made, _ = relocation("it is suspended; say resume")
    assert made.remedy(look(case(SLOW)))
    assert made.order(5.0) == "it is suspended; say resume"
    assert not made.is_ordered


@pytest.mark.parametrize(
    ("culprits", "traffic"),
    [
        ((), TRAFFIC),
        ((Culprit(rank=2),), TRAFFIC),
        ((Culprit(link=Link((0, 9), ("gpu-0", "gpu-9"))),), TRAFFIC),
        ((Culprit(link=Link((0, 1), ("gpu-0", "gpu-0"))),), TRAFFIC),
        ((SLOW,), []),
        ((SLOW,), [*both(0, 2, 40, 1.2e-9), *both(1, 3, 40, 1e-9)]),
        ((SLOW,), [one for pair in ((0, 1), (0, 3), (1, 2), (1, 3), (2, 3)) for one in both(*pair, 40, 1e-9)]
         + both(0, 2, 40, 2e-7)),
    ],
    ids=["nobody", "a rank", "another job's node", "inside a node", "no traffic", "not slow", "all carry as much"],
)  # fmt: skip
def test_where_no_exchange_helps_none_is_offered(
    culprits: tuple[Culprit, ...], traffic: list[PeerTraffic]
) -> None:
    made, _ = relocation()
    assert made.remedy(look(case(*culprits), traffic=traffic)) is None


def exchanged(traffic: list[PeerTraffic] = TRAFFIC) -> tuple[Relocation, Office]:
    """The exchange was done at 10 s."""
    made, office = relocation()
    assert made.remedy(look(case(SLOW), traffic=traffic))
    made.order(5.0)
    assert made.begun_again()
    made.settled(10.0)
    return made, office


def loads(made: Relocation, office: Office, now_s: float, others_s: float, link_s: float) -> Any:
    """One round of them, and what is done then. ``link_s``: of all tries."""
    assert made.take_back(now_s) is None
    while made.is_asking:
        (pairs, _) = office.asked[-1]
        took_s = link_s if pairs == [("gpu-0", "gpu-2")] else others_s
        made.probed(len(office.asked), [PathProbe(*pair, "echo", 1e-4, took_s) for pair in pairs], now_s)
    return made.take_back(now_s)


def test_nodes_go_back_when_the_link_is_fast_again() -> None:
    made, office = exchanged()
    ((takers, _),) = office.ordered
    assert loads(made, office, 11.0, 0.001, 0.1) is None
    assert office.asked[0] == ([("gpu-1", "gpu-3")], round(0.1 / 2e-7))
    assert loads(made, office, 21.5, 0.001, 0.0012) is None
    told, refused = loads(made, office, 37.0, 0.001, 0.0012)
    assert "take their ranks back: the link gpu-0 ↔ gpu-2 is fast again" in told
    assert refused == ""
    assert office.ordered[1] == (takers, "the link gpu-0 ↔ gpu-2 is fast again")
    assert made.back
    assert made.begun_again()
    made.settled(40.0)
    assert made.take_back(1000.0) is None
    assert len(office.asked) == 6


def over_rdma() -> tuple[Relocation, Office]:
    """The exchange was done at 10 s; the kernel does not see the traffic."""
    made, office = relocation()
    seen = {(0, 2): 4e6, (1, 3): 4e6, (0, 1): 4e4, (2, 3): 4e4}
    culprit = replace(SLOW, slowdown=8.0)
    assert made.remedy(replace(look(case(culprit), traffic=[]), volumes=seen))
    made.order(5.0)
    assert made.begun_again()
    made.settled(10.0)
    return made, office


def measured_links(link: float, others: float, *, over: Any = "nccl") -> Validation:
    """Speeds of the link 0 ↔ 2 and of 1 ↔ 3, by the first ranks of these nodes."""
    speeds = {(0, 4): link, (4, 0): link, (2, 6): others, (6, 2): others}
    links = tuple(LinkFigure(*pair, "ring", 1, speed, over) for pair, speed in speeds.items() if speed)
    return Validation((0, 2, 4, 6), (RankFigures(0, links=links),))


def test_where_tcp_does_not_see_the_traffic_devices_tell_whether_the_link_is_fast() -> None:
    made, office = over_rdma()
    now_s = 10.0
    at: list[float] = []
    for link in (1e9, 1e9, 7.9e9, 9e9, 1e9, 9e9, 9.5e9):
        looks = len(office.tests)
        while len(office.tests) == looks:
            now_s += 1.0
            assert made.take_back(now_s) is None
        groups, tell = office.tests[-1]
        assert groups == [(0, 4), (2, 6)]
        at.append(now_s)
        tell(measured_links(link, 1e10), "", now_s)
    told, refused = made.take_back(now_s) or ("", "nothing")
    assert "the link gpu-0 ↔ gpu-2 is fast again" in told
    assert refused == ""
    assert not office.asked
    waited_s = [round(later - earlier) for earlier, later in pairwise([10.0, *at])]
    assert waited_s == [60, 60, 120, 240, 10, 10, 10]


@pytest.mark.parametrize(
    "outcome",
    [None, measured_links(0.0, 1e10), measured_links(1e10, 0.0), measured_links(1e10, 1e10, over="tcp")],
)
def test_a_link_that_devices_have_not_shown_to_be_fast_is_not_gone_back_to(outcome: Any) -> None:
    made, office = over_rdma()
    for now_s in range(11, 40_000):
        looks = len(office.tests)
        assert made.take_back(float(now_s)) is None
        if len(office.tests) > looks:
            office.tests[-1][1](outcome, "" if outcome else "a rank cannot be held", float(now_s))
    assert 12 < len(office.tests) < 24


def test_whether_a_validation_can_begin_is_asked_until_it_can() -> None:
    made, office = over_rdma()
    office.is_busy = True
    for now_s in (70.0, 70.1, 70.2):
        assert made.take_back(now_s) is None
    assert len(office.tests) == 3


def test_whether_the_link_is_fast_is_known_by_the_time_nothing_is_slow() -> None:
    made, office = exchanged()
    for now_s in (11.0, 21.5):  # a slow node is treated meanwhile
        made.probe(now_s)
        made.probe(now_s)
        assert len(office.ordered) == 1
        for took_s in (0.001, 0.0012):
            pair = office.asked[-1][0][0]
            made.probed(len(office.asked), [PathProbe(*pair, "echo", 1e-4, took_s)], now_s)
    assert len(office.asked) == 4
    told, _ = made.take_back(37.0) or ("", "")
    assert "the link gpu-0 ↔ gpu-2 is fast again" in told


# Only (0, 1) carry little.
MESH = [*both(0, 2, 40, 2e-7), *both(0, 1, 0.4, 2e-6)] + [
    one for pair in ((0, 3), (1, 2), (1, 3), (2, 3)) for one in both(*pair, 40, 1e-9)
]


def twice_exchanged(traffic: list[PeerTraffic] = MESH) -> tuple[Relocation, Office]:
    """For a link at 10 s, and because of slow nodes at 20 s."""
    made, office = exchanged(traffic)
    assert made.remedy(pipelines(0, 3))
    made.order(15.0)
    assert made.begun_again()
    made.settled(20.0)
    return made, office


def link_turns_fast(made: Relocation, office: Office) -> None:
    """Two looks at it, at 21 s and 31.5 s."""
    for now_s in (21.0, 31.5):
        made.probe(now_s)
        for took_s in (0.001, 0.0012):
            pair = office.asked[-1][0][0]
            made.probed(len(office.asked), [PathProbe(*pair, "echo", 1e-4, took_s)], now_s)
        assert not made.is_asking


def test_exchanges_whose_causes_are_gone_are_taken_back_together() -> None:
    made, office = twice_exchanged()
    places = list(range(4))  # who plays there
    for takers, _ in office.ordered:
        places = [places[takers.get(place, place)] for place in range(4)]
    assert sum(node != place for place, node in enumerate(places)) == 3  # a node has moved twice
    link_turns_fast(made, office)
    told, refused = made.take_back(32.0) or ("", "nothing")
    assert refused == ""
    assert "take their ranks back: no node is slow any more; the link gpu-0 ↔ gpu-2 is fast again" in told
    takers, _ = office.ordered[-1]
    assert [places[takers.get(place, place)] for place in range(4)] == [0, 1, 2, 3]
    made.begun_again()
    made.settled(35.0)
    assert made.take_back(1000.0) is None
    assert made.back == 0


def test_the_last_exchange_is_taken_back_alone_while_the_link_of_one_before_it_is_slow() -> None:
    made, office = twice_exchanged()
    told, _ = made.take_back(32.0) or ("", "")
    assert told.endswith("take their ranks back: no node is slow any more")
    assert office.ordered[2][0] == office.ordered[1][0]
    made.begun_again()
    made.settled(35.0)
    assert made.take_back(36.0) is None
    assert made.is_asking


def test_exchanges_that_undo_each_other_need_no_pause() -> None:
    made, office = twice_exchanged(TRAFFIC)
    assert office.ordered[0][0] == office.ordered[1][0]  # the nodes are where they were
    link_turns_fast(made, office)
    assert made.take_back(32.0) is None
    assert len(office.ordered) == 2
    assert made.take_back(100.0) is None
    assert not made.is_asking


def test_a_load_that_a_busy_host_was_slow_with_is_tried_again() -> None:
    made, office = exchanged()
    for now_s in (11.0, 37.0):
        assert made.take_back(now_s) is None
        for took_s in (0.001, 0.02, 0.015, 0.0012):
            pair = office.asked[-1][0][0]
            made.probed(len(office.asked), [PathProbe(*pair, "echo", 1e-4, took_s)], now_s)
        assert not made.is_asking
    assert made.take_back(37.0) is not None


def test_one_fast_load_is_not_enough() -> None:
    made, office = exchanged()
    now_s = 11.0
    for link_s in (0.001, 0.1, 0.001, 0.1, 0.001, 0.1):
        assert loads(made, office, now_s, 0.001, link_s) is None
        now_s += 61.0
    assert len(office.ordered) == 1


@pytest.mark.parametrize(("others_s", "outcome"), [(0.0, "echo"), (0.001, "timeout"), (0.001, "silent")])
def test_what_loads_do_not_tell_is_not_believed(others_s: float, outcome: str) -> None:
    made, office = exchanged()
    for now_s in range(11, 1000, 70):
        assert made.take_back(now_s) is None
        made.probed(len(office.asked), [PathProbe("gpu-1", "gpu-3", outcome, 0.0, others_s)], now_s)
    assert len(office.ordered) == 1
    assert all(pairs == [("gpu-1", "gpu-3")] for pairs, _ in office.asked)


def test_a_link_that_turns_slow_again_and_again_is_left_for_longer_and_longer() -> None:
    made, office = relocation()
    now_s, waited_s = 10.0, list[float]()
    for _ in range(10):
        assert made.remedy(look(case(SLOW)))
        made.order(now_s)
        made.begun_again()
        made.settled(now_s)
        since_s = now_s
        while not made.back:
            now_s += 1.0
            if made.take_back(now_s) is None and made.is_asking:
                for _ in range(2):
                    pair = office.asked[-1][0][0]
                    made.probed(len(office.asked), [PathProbe(*pair, "echo", 1e-4, 0.001)], now_s)
        waited_s.append(now_s - since_s)
        made.begun_again()
        made.settled(now_s)
    assert waited_s[-1] >= 1280.0
    assert all(one <= other for one, other in pairwise(waited_s))


def test_when_an_end_of_the_link_is_gone_nobody_goes_back() -> None:
    made, office = exchanged()
    office.cluster.nodes[2].name = "gpu-9"
    assert made.take_back(11.0) is None
    assert made.take_back(100.0) is None
    assert not office.asked


def test_when_the_job_has_fewer_nodes_than_places_were_exchanged_nobody_goes_back() -> None:
    made, office = exchanged()
    (takers, _) = office.ordered[0]
    assert 3 in takers
    del office.cluster.nodes[3]
    for now_s in (11.0, 100.0):
        assert made.take_back(now_s) is None
    assert len(office.ordered) == 1
    assert not office.asked


def pipelines(*slow: int) -> Look:
    """Four replicas of two stages, the first on gpu-0 and gpu-1; these nodes take twice as long."""
    splits = {rank: Split(rank, 0, 32, rank % 4, 4, share=8) for rank in range(8)}
    seconds = {rank: 0.02 if rank // 2 in slow else 0.01 for rank in range(8)}
    culprits = [Culprit(rank=2 * node, node=NAMES[node], slowdown=2.0, confidence="high") for node in slow]
    replicas = Replicas(
        (8,) * 4, tuple(max(seconds[one], seconds[one + 4]) for one in range(4)), (0.0,) * 4, 0.0
    )
    stages = {rank: rank // 4 for rank in range(8)}
    return Look([case(*culprits)], (), replicas, 0.1, 0.2, splits, seconds, stages)


def test_slow_nodes_come_into_few_replicas() -> None:
    made, office = relocation()
    slow = pipelines(0, 3)  # a half of each replica
    remedy = made.remedy(slow)
    assert remedy is not None
    assert made.may_help(slow.cases)
    assert made.order(5.0) == ""
    ((takers, why),) = office.ordered
    assert why == "slow nodes are in several replicas or stages"
    assert set(takers) == set(takers.values())
    assert set(takers) in ({0, 1}, {2, 3})  # then both are halves of the same replicas
    assert remedy.iteration_s < 0.9 * 0.2
    made.begun_again()
    made.settled(10.0)
    assert made.take_back(15.0) is None
    told, refused = made.take_back(21.0) or ("", "nothing")
    assert (told.endswith("take their ranks back: no node is slow any more"), refused) == (True, "")


@pytest.mark.parametrize("slow", [(), (0,), (0, 2), (0, 1, 2, 3)])
def test_where_slow_nodes_are_in_few_replicas_already_nobody_moves(slow: tuple[int, ...]) -> None:
    assert relocation()[0].remedy(pipelines(*slow)) is None


def test_without_shares_or_stages_slow_nodes_stay() -> None:
    look = pipelines(0, 3)
    assert relocation()[0].remedy(replace(look, stages=None)) is None
    assert relocation()[0].remedy(replace(look, replicas=None)) is None
    assert relocation()[0].remedy(replace(look, seconds={})) is None
    assert relocation()[0].remedy(replace(look, stages={rank: rank % 3 for rank in range(8)})) is None


def test_without_counters_it_goes_by_what_ranks_have_called_for() -> None:
    made, office = relocation()
    link = Culprit(link=Link((0, 2), ("gpu-0", "gpu-2")), slowdown=5.0)
    carried = {(0, 2): 40e6, (1, 3): 40e6, (0, 1): 1e5, (2, 3): 1e5}
    remedy = made.remedy(replace(look(case(link), traffic=[]), volumes=carried))
    assert remedy is not None
    assert remedy.iteration_s == pytest.approx(0.2, rel=0.1)  # of 1 s: it is the link that costs the rest
    assert made.order(5.0) == ""
    made.begun_again()
    made.settled(10.0)
    assert made.take_back(1e6) is None  # no load that we can send goes that way
    assert not office.asked
    weak = replace(link, slowdown=1.2)
    assert made.remedy(replace(look(case(weak), traffic=[]), volumes=carried)) is None
