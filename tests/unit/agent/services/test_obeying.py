"""An operator's orders on one node: traces through the pages of its ranks, and whether they are watched."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.agent.services import trace_orders
from keepstep.agent.services.obeying import Obeying
from keepstep.agent.services.orders import RankPages
from keepstep.core.finding import Finding
from keepstep.ring import orders
from keepstep.ring.orders import KNOCK, Word
from keepstep.wire import Found, RankTrace, RankTraces, Standing, TraceRanks

STATES = 8


class Agent:
    """What the orders concern of a node's agent."""

    def __init__(self, pages: RankPages) -> None:
        self.pages = pages
        self.forgotten = 0
        self.is_left_alone: Any = None
        self.found = Finding("slow", 1, "here", 0.0, 40, onset_step=30)

    def base(self, rank: int) -> tuple[int, int, int] | None:
        return (40, 82, 2) if rank != 2 else None

    def forget_standstills(self) -> None:
        self.forgotten += 1

    def standing(self) -> list[Any]:
        return [Found(self.found)]


class Node:
    def __init__(self, folder: Path) -> None:
        self.descriptors = [orders.create() for _ in range(3)]
        paths = {rank: f"/proc/{os.getpid()}/fd/{fd}" for rank, fd in enumerate(self.descriptors)}
        self.agent, self.sent = Agent(RankPages(paths)), list[Any]()
        self.folder = folder
        self.obeying = Obeying(self.agent, 0, folder, self.sent.append)  # type: ignore[arg-type]
        self.obeying.poll()

    def word(self, rank: int, word: Word) -> int:
        return self.agent.pages[rank].words[word]

    def report(self, rank: int, number: int, state: str, count: int = 0, **more: Any) -> None:
        body = {"state": state, "step": 41, "file": "", "nbytes": 0, "why": "", **more}
        self.agent.pages[rank].traced.put(number * STATES + count, body)

    def told(self) -> tuple[RankTrace, ...]:
        *_, last = self.sent
        assert isinstance(last, RankTraces)
        self.sent.clear()
        return last.ranks


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.agent.pages.close()
    for descriptor in made.descriptors:
        os.close(descriptor)


def test_a_trace_is_ordered_of_the_rank_and_of_no_other(node: Node) -> None:
    node.obeying.trace(TraceRanks(7, (1,), 3, 60.0))
    assert node.told() == (RankTrace(1),)
    assert [node.word(rank, Word.ORDER) for rank in range(3)] == [0, KNOCK, 0]
    number, body = node.agent.pages[1].trace.newest() or (0, {})
    until_ns = body.pop("until_ns")
    assert 0 < until_ns - time.monotonic_ns() <= 60e9
    assert number == 7
    assert body == {
        "steps": 3, "per_step": 2, "base_step": 40, "base_count": 82, "folder": str(node.folder / "traces")
    }  # fmt: skip
    assert node.agent.is_left_alone(1)
    assert not node.agent.is_left_alone(0)
    node.report(1, 7, "tracing")
    node.obeying.poll()
    assert node.told() == (RankTrace(1, "tracing", 41),)
    assert node.word(1, Word.ORDER) == 0
    node.obeying.poll()
    assert not node.sent
    node.report(1, 7, "written", 1, file="traces/x", nbytes=5)
    node.obeying.poll()
    assert node.told() == (RankTrace(1, "written", 41, "traces/x", 5),)
    assert not node.agent.is_left_alone(1)


def test_an_order_that_is_repeated_or_over(node: Node) -> None:
    order = TraceRanks(7, (0, 9), 3, 60.0)
    node.obeying.trace(order)
    node.report(0, 7, "tracing")
    node.obeying.poll()
    node.sent.clear()
    node.obeying.trace(order)
    assert node.told() == (RankTrace(0, "tracing", 41),)
    node.obeying.trace(TraceRanks(6))
    assert node.agent.is_left_alone(0)
    node.obeying.trace(TraceRanks(7))
    assert not node.agent.is_left_alone(0)


def test_a_rank_that_makes_no_step_and_one_whose_steps_are_unknown(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_orders, "_BEGIN_S", 0.0)
    node.obeying.trace(TraceRanks(7, (0, 2), 3, 0.0))
    time.sleep(0.001)
    node.obeying.poll()
    first, second = node.told()
    assert (first.state, first.why) == ("failed", "it came to no end of a step")
    assert (second.state, second.why) == ("failed", "its optimizer steps are not known yet")
    assert node.word(0, Word.ORDER) == 0


@pytest.mark.parametrize(
    "body", [{"state": "mad"}, {"step": "x"}, {"why": "y" * 600}, {"file": None}, {"nbytes": 1e300}]
)
def test_what_a_worker_writes_may_be_anything(body: dict[str, Any], node: Node) -> None:
    node.obeying.trace(TraceRanks(7, (1,), 3, 60.0))
    node.sent.clear()
    node.report(1, 7, **{"state": "written", **body})
    node.obeying.poll()
    assert not node.sent
    assert node.word(1, Word.ORDER) == KNOCK


def test_a_knock_of_an_agent_that_has_gone_is_taken_back(node: Node) -> None:
    node.obeying.trace(TraceRanks(7, (1,), 3, 60.0))
    assert node.word(1, Word.ORDER) == KNOCK
    later = Obeying(node.agent, 0, node.folder, node.sent.append)  # type: ignore[arg-type]
    later.poll()
    assert node.word(1, Word.ORDER) == 0


def test_a_hold_is_left_as_it_is(node: Node) -> None:
    page = node.agent.pages[1]
    page.order(5, 100, time.monotonic_ns() + int(5e9))
    node.obeying.trace(TraceRanks(7, (1,), 3, 60.0))
    node.obeying.poll()
    assert node.word(1, Word.ORDER) == 5
    page.release()
    node.obeying.poll()
    assert node.word(1, Word.ORDER) == KNOCK
    node.report(1, 7, "failed", why="no")
    node.obeying.poll()
    assert node.word(1, Word.ORDER) == 0


def test_while_watching_is_off_all_ranks_are_left_alone_and_then_what_stands_is_told_again(
    node: Node,
) -> None:
    node.obeying.stand(Standing(9, 1000.0, (("mitigate", "off"),)))
    assert all(map(node.agent.is_left_alone, range(3)))
    assert (node.agent.forgotten, node.sent) == (1, [])
    node.obeying.stand(Standing(8))  # an older one
    assert node.agent.is_left_alone(0)
    assert node.obeying.again() == [Standing(9, 1000.0, (("mitigate", "off"),))]
    node.obeying.stand(Standing(10, 1000.0))  # other thresholds
    assert node.agent.forgotten == 1
    node.obeying.stand(Standing(11))
    assert node.agent.forgotten == 2
    assert node.sent == [Found(node.agent.found)]
    assert not node.agent.is_left_alone(0)


def test_an_agent_that_knows_of_no_order_tells_none(node: Node) -> None:
    assert node.obeying.again() == []
