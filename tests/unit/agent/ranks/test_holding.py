"""The node's part in a hold over real pages: orders down, states and figures up, and no hang while it lasts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tests.unit.agent import agent_generator as g

from keepstep.agent.ranks.iterations import IterationCutter
from keepstep.agent.ranks.track import RankTrack
from keepstep.agent.services.orders import Holding, RankPages
from keepstep.core.events import Phase
from keepstep.core.validation import RankTests
from keepstep.ring import orders
from keepstep.ring.orders import OrdersPage, State, Word
from keepstep.wire import Held, Hold, Measured, Message, Release, RunTests

ENDPOINT = {"host": "10.0.0.1", "port": 5000, "token": "00ff"}
FIGURES = {"rank": 1, "devices": [{"rank": 1, "test": "fp32", "value": 2.0, "unit": "TFLOP/s"}], "links": [],
           "missing": []}  # fmt: skip


class Node:
    """Ranks 0 and 1 of a node whose iterations have two optimizer steps each."""

    def __init__(self) -> None:
        self.descriptors = [orders.create(), orders.create()]
        self.workers = [OrdersPage(number) for number in self.descriptors]
        self.known = True
        paths = {rank: f"/proc/{os.getpid()}/fd/{number}" for rank, number in enumerate(self.descriptors)}
        self.pages = RankPages(paths)
        self.holding = Holding(self.pages, 3, lambda rank, step: 2 * (step + 1) if self.known else None)

    def say(self, *messages: Message) -> list[Message]:
        return [answer for message in messages for answer in self.holding.receive(message)]

    def held(self, rank: int, number: int) -> None:
        self.workers[rank].report.put(number, ENDPOINT)
        self.workers[rank].say(number, State.HELD, 20)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.holding.release()
    made.pages.close()
    for page in made.workers:
        page.close()
    for number in made.descriptors:
        os.close(number)


def states(messages: list[Message]) -> list[list[tuple[int, int]]]:
    return [[(one.rank, one.state) for one in m.ranks] for m in messages if isinstance(m, Held)]


def test_a_step_becomes_the_ranks_own_count_and_states_are_told_when_they_change(node: Node) -> None:
    assert node.holding.poll() == []
    assert states(node.say(Hold(7, 9, 2.0))) == [[(0, State.UNSEEN), (1, State.UNSEEN)]]
    assert [page.words[Word.BOUNDARY] for page in node.workers] == [20, 20]
    assert node.holding.poll() == []
    node.held(1, 7)
    (told,) = node.holding.poll()
    assert isinstance(told, Held)
    assert (told.number, told.node_rank) == (7, 3)
    assert [(one.state, one.endpoint and one.endpoint.port) for one in told.ranks] == [(0, None), (2, 5000)]
    assert node.holding.poll() == []
    assert states(node.say(Hold(7, 9, 2.0))) == [
        [(0, State.UNSEEN), (1, State.HELD)]
    ]  # asked again, told again


def test_only_the_controller_renews_the_lease(node: Node) -> None:
    node.say(Hold(7, 9, 1.0))
    lease_ns = node.workers[0].words[Word.LEASE_NS]
    node.holding.poll()
    assert node.workers[0].words[Word.LEASE_NS] == lease_ns
    assert node.holding.held(0, lease_ns - 1)
    assert not node.holding.held(0, lease_ns)
    node.say(Hold(7, 9, 1e9))
    longest_ns = time.monotonic_ns() + int(orders.MOST_LEASE_S * 1e9)
    assert lease_ns < node.workers[0].words[Word.LEASE_NS] <= longest_ns


def test_release_is_for_the_hold_it_names(node: Node) -> None:
    node.say(Hold(7, 9, 5.0), Release(6))
    assert node.workers[0].words[Word.ORDER] == 7
    node.say(Release(7))
    assert node.workers[0].words[Word.ORDER] == 0
    assert node.say(Hold(7, 9, 5.0)) == []  # overtaken by its own end
    assert node.workers[0].words[Word.ORDER] == 0


def test_a_rank_whose_steps_are_not_known_or_whose_page_is_gone_is_unable(node: Node) -> None:
    node.known = False
    (told,) = node.say(Hold(7, 9, 2.0))
    assert isinstance(told, Held)
    assert {one.state for one in told.ranks} == {State.UNABLE}
    assert told.ranks[0].why == "its optimizer steps are not known yet"
    broken = Holding(RankPages({5: "/nowhere"}), 0, lambda rank, step: 4)
    (told,) = broken.receive(Hold(8, 1, 2.0))
    assert isinstance(told, Held)
    assert told.ranks[0].state == State.UNABLE
    assert "/nowhere" in told.ranks[0].why
    assert not broken.held(5, 0)
    assert not broken.held(6, 0)


def test_tests_are_put_once_and_figures_told_as_often_as_asked(node: Node) -> None:
    tests = RunTests(7, 8, (RankTests(1, (), {}), RankTests(77, (), {})))
    assert node.say(tests) == []  # of no hold that was ordered
    node.say(Hold(7, 9, 5.0))
    assert not [m for m in node.say(tests) if isinstance(m, Measured)]
    assert (node.workers[1].tests.newest() or (0,))[0] == 8
    assert node.workers[0].tests.newest() is None
    node.workers[1].report.put(8, FIGURES)
    (told,) = node.holding.poll()
    assert isinstance(told, Measured)
    assert (told.number, told.tests, told.figures.rank, told.figures.devices[0].value) == (7, 8, 1, 2.0)
    assert node.holding.poll() == []
    assert [type(message) for message in node.say(tests)] == [Measured]


@pytest.mark.parametrize(
    "report",
    [
        {},
        {**FIGURES, "rank": 0},
        {**FIGURES, "devices": [{"rank": "x"}]},
        {**FIGURES, "missing": ["x"] * 2000},
    ],
)
def test_figures_that_are_none_are_not_passed_on(node: Node, report: dict[str, object]) -> None:
    node.say(Hold(7, 9, 5.0), RunTests(7, 8, (RankTests(1, (), {}),)))
    node.workers[1].report.put(8, report)
    assert [message for message in node.holding.poll() if isinstance(message, Measured)] == []


def test_a_hold_is_no_hang_and_afterwards_the_clock_begins_anew() -> None:
    rank = g.Job(2).play(g.ddp(40)).ranks[0]
    track = RankTrack(0, "here", {0, 1})
    now = 0
    for started, finished, now in g.polls(rank.table()):
        track.take(started, finished, 0, now, list)
        assert track.look(now, lambda: rank.table()[:0]) is None
    seconds = 1_000 * g.MS
    for _ in range(1200):  # two minutes, in which it counts as progress
        now += seconds // 10
        assert track.look(now, lambda: rank.table()[:0], held=True) is None
    assert track.look(now + seconds // 2, lambda: rank.table()[:0]) is None
    assert track.look(now + 600 * seconds, lambda: rank.table()[:0]) is not None


def test_held_time_is_no_iteration_time() -> None:
    rank = g.Job(1).ranks[0]
    for step in range(12):
        if step == 8:
            rank.phase(int(Phase.HOLD), 3000)
        rank.phase(g.BACKWARD, 20)
        rank.phase(g.OPTIMIZER, 5)
    cutter = IterationCutter()
    cuts = [cut for batch in g.polls(rank.table()) for cut in cutter.feed(batch[0], batch[1], 0, batch[2])]
    assert cuts[8].step == 8
    assert cuts[8].pauses.total_ns / 1e9 == pytest.approx(3.0, abs=0.001)
    times = np.array([cut.duration_ns for cut in cuts[1:]]) / 1e9
    assert times == pytest.approx(0.025, rel=0.01)
    assert cutter.steps_at_end_of(8) == 9
