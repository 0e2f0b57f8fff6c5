import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.launch.controller_orders import Orders
from keepstep.launch.course import Course, EndedEarly, Outcome
from keepstep.wire import Imports, Kill, Stop


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


@dataclass
class Member:
    """What a link has heard."""

    kills: list[Kill] = field(default_factory=list[Kill])
    seal: None = None
    stop: Stop | None = None
    must_halt: bool = False
    is_spare: bool = False
    imports: Imports | None = None
    begins_again: bool = True


@dataclass
class Node:
    """A launcher's parts around `Orders`."""

    restarts: int = 0
    member: Member = field(default_factory=Member)
    said: list[str] = field(default_factory=list[str])
    killed: list[int] = field(default_factory=list[int])
    controller_may_end: bool = False
    expected: list[object] = field(default_factory=list[object])

    def __post_init__(self) -> None:
        self.course = Course()
        link: Any = SimpleNamespace(member=self.member)
        place: Any = SimpleNamespace(restarts=self.restarts, incarnation=self.restarts)
        self.course.link, self.course.place = link, place

        def kill(rank: int, process: int, reason: str) -> bool:
            self.killed.append(rank)
            return True

        def may_end() -> None:
            self.controller_may_end = True

        def expect_first() -> None:
            self.expected.append("agent")

        job: Any = SimpleNamespace(node="a", max_restarts=1)
        parts: Any = SimpleNamespace(
            course=self.course,
            run=SimpleNamespace(job=job, say=self.said.append, warn=self.said.append),
            crew=SimpleNamespace(
                workers=None if self.member.is_spare else SimpleNamespace(kill=kill),
                warm_for_spare=self.expected.append,
            ),
            watching=SimpleNamespace(expect_first=expect_first),
            controller=SimpleNamespace(may_end=may_end),
        )
        self.orders = Orders(parts)


def stop(exit_code: int, by_operator: bool = False) -> Stop:
    return Stop(exit_code=exit_code, reason="rank 3 died", by_operator=by_operator)


@in_a_loop
async def test_all_nodes_begin_again() -> None:
    node = Node(member=Member(must_halt=True))
    node.orders.follow()
    assert node.course.outcome.result().kind == "halted"


@in_a_loop
async def test_the_jobs_end_is_the_nodes() -> None:
    node = Node(member=Member(stop=stop(7, by_operator=True)))
    node.orders.follow()
    assert node.course.outcome.result() == Outcome("stopped", 7, "rank 3 died")
    assert (node.course.job_over.is_set(), node.course.stopped_by_hand) == (True, True)
    assert node.controller_may_end


@in_a_loop
async def test_a_spare_has_not_failed_with_the_job() -> None:
    node = Node(member=Member(is_spare=True))
    node.orders.follow()
    node.orders.follow()
    assert node.said == ["a is a spare: the job has its nodes, and gets this one when one is lost"]
    node.member.stop = stop(7)
    node.orders.follow()
    assert node.course.outcome.result().code == 0


@in_a_loop
async def test_on_a_spare_standbys_and_an_agent_wait_once_it_is_told_what_workers_import() -> None:
    node = Node(member=Member(is_spare=True))
    node.orders.follow()
    assert node.expected == []
    node.member.imports = Imports(("json", "torch"), (("OMP_NUM_THREADS", "1"),))
    node.orders.follow()
    node.orders.follow()
    assert node.expected == [(("json", "torch"), {"OMP_NUM_THREADS": "1"}), "agent"]


@in_a_loop
async def test_a_spare_of_a_job_that_is_to_be_started_again_is_so_too() -> None:
    node = Node(member=Member(is_spare=True))
    node.orders.follow()
    node.member.stop = stop(75)
    node.orders.follow()
    assert node.course.outcome.result().code == 75


@pytest.mark.parametrize("restarts", [0, 1])
@in_a_loop
async def test_a_rank_that_hangs_is_ended_while_a_restart_is_left(restarts: int) -> None:
    node = Node(restarts=restarts)
    for _ in range(2):
        node.member.kills.append(Kill(rank=2, process=1, reason="hangs", seen_s=time.monotonic()))
        node.orders.follow()
    if restarts:
        assert (node.killed, node.said) == ([], ["rank 2: hangs; no restart is left, so it is not ended"])
    else:
        assert (node.killed, node.said) == ([2, 2], [])


@in_a_loop
async def test_an_order_that_has_lain_in_a_socket_ends_nobody() -> None:
    node = Node()
    node.member.kills.append(Kill(rank=2, process=1, reason="hangs", seen_s=time.monotonic() - 60))
    node.orders.follow()
    assert (node.killed, node.said) == ([], [])


@in_a_loop
async def test_what_is_waited_for_ends_with_the_incarnation() -> None:
    course = Course()
    asyncio.get_running_loop().call_soon(course.settle, Outcome("signal", 130, "signal SIGINT"))
    with pytest.raises(EndedEarly, match="SIGINT"):
        await course.until(asyncio.sleep(3600))
    course.renew()
    assert await course.until(asyncio.sleep(0, "came")) == "came"
