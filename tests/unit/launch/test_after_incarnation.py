"""What follows an incarnation, on one node and where the controller says it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.launch.command.test_job import job
from tests.unit.launch.local_runs import ToldRun

from keepstep.core.budgets import LEFT_EARLY, Cause, Refusal
from keepstep.launch.after_incarnation import after, after_all_nodes, tell_found, wait_for_storage
from keepstep.launch.command.persisting import Persisting
from keepstep.launch.command.placement import Place
from keepstep.launch.course import Course, Outcome
from keepstep.launch.workers.root_cause import Failure

PLACE = Place(0, 0, 2, 1, "127.0.0.1", 4711)
FAILED = Outcome("failed", 137, "rank 1: boom")
FAILURE = Failure(1, 1, 77, 5, 0.0, "boom", "boom", None)
LEFT = Failure(0, 0, 76, 0, 0.0, LEFT_EARLY, LEFT_EARLY, None)


class Node:
    """A node of two ranks, of which rank 1 has failed, and that may begin again once."""

    def __init__(self, folder: Path, refusal: Refusal | None = None) -> None:
        self.run = ToldRun(folder, job("--max-restarts", "1", "train.py"), children=False)
        self.course = Course()
        self.causes: list[Cause] = []

        def refused(cause: Cause) -> Refusal | None:
            self.causes.append(cause)
            return refusal

        def cause(failure: Failure, steps: int) -> Cause:
            return Cause(failure.unix_s, "a", failure.rank, steps, failure.text)

        async def about(error: str) -> None:
            pass

        restarts = SimpleNamespace(
            refused=refused, pause_s=0.0, cause=cause, step_of=lambda rank, steps: steps
        )
        self.parts: Any = SimpleNamespace(
            run=self.run,
            course=self.course,
            crew=SimpleNamespace(
                restarts=restarts,
                failures=[FAILURE],
                workers=SimpleNamespace(failures=[FAILURE], left=[], blamed=FAILURE, exit_code=5),
            ),
            watching=SimpleNamespace(rings=SimpleNamespace(steps=lambda rank: 3)),
            checks=SimpleNamespace(unfit=lambda: "", about=about, is_broken=False, kernel_told=()),
        )

    async def after(self, outcome: Outcome, place: Place = PLACE) -> Place | Outcome:
        self.course.place = place
        self.course.settle(outcome)
        return await after(self.parts, lambda: None, outcome, place)


def test_a_failure_on_one_node_is_followed_by_a_restart_with_another_port(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path)
        following = await node.after(FAILED)
        assert isinstance(following, Place)
        assert (following.incarnation, following.world_size) == (1, 2)
        assert following.master_port != PLACE.master_port
        assert not node.course.outcome.done(), "the next incarnation has no outcome yet"
        assert node.run.said == ["rank 1: boom; restart 1 of 1"]
        (cause,) = node.causes
        assert (cause.rank, cause.step) == (1, 3)

    asyncio.run(main())


def test_who_left_early_is_told_as_the_cause_of_what_others_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        node = Node(tmp_path)
        workers = node.parts.crew.workers
        workers.left, workers.blamed = [LEFT], LEFT
        assert isinstance(await node.after(FAILED), Place)
        assert node.run.said == [f"rank 0: {LEFT_EARLY}; restart 1 of 1"]
        assert (node.causes[0].rank, node.causes[0].error) == (0, LEFT_EARLY)
        ended = await node.after(FAILED, replace(PLACE, incarnation=1))
        assert ended == Outcome("failed", 5, f"rank 0: {LEFT_EARLY}; then rank 1: boom")

    asyncio.run(main())
    assert "Root Cause (first observed failure):" in capsys.readouterr().err


class Link:
    """A link to a controller that gives the node a place at once, and keeps what the node says."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.member = SimpleNamespace(
            failed=lambda code, text, rank, *_: [(code, text, rank)],
            halted=lambda *_: ["halted"],
            kernel_told=lambda lines: [],
        )

    def send(self, messages: list[Any]) -> None:
        self.said += messages

    async def next_place(self) -> Place:
        return PLACE


class SlowLink(Link):
    """A link to a controller that gives the node a place a moment later."""

    async def next_place(self) -> Place:
        await asyncio.sleep(0.05)
        return PLACE


def test_an_order_to_halt_that_comes_while_hardware_is_asked_for_does_not_end_the_launcher(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        node, link = Node(tmp_path), SlowLink()
        node.course.link = link  # type: ignore[assignment]
        node.course.settle(FAILED)

        async def about(error: str) -> None:
            node.course.settle(Outcome("halted", 0, "all nodes begin again"))

        node.parts.checks.about = about
        node.parts.caching = SimpleNamespace(rigid=lambda place: "")
        assert await after_all_nodes(node.parts, lambda: None, FAILED, PLACE) == PLACE
        assert link.said[-1] == "halted"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "first_left", "told"),
    [
        ("failed", None, [(5, "rank 1: boom", 1)]),
        ("halted", LEFT, [(0, f"rank 0: {LEFT_EARLY}", 0)]),
        ("halted", None, []),
    ],
)
def test_a_node_tells_the_controller_for_what_it_is_to_blame(
    tmp_path: Path, kind: Any, first_left: Failure | None, told: list[Any]
) -> None:
    """Where another node's ranks have lost one that had left here, no other node knows why."""

    async def main() -> None:
        node, link = Node(tmp_path), Link()
        node.course.link = link  # type: ignore[assignment]
        node.parts.crew.workers.first_left = first_left
        node.parts.caching = SimpleNamespace(rigid=lambda _: "")
        outcome = Outcome(kind, 5, "over")
        assert await after_all_nodes(node.parts, lambda: None, outcome, PLACE) == PLACE
        assert link.said == [*told, "halted"]

    asyncio.run(main())


def test_a_failure_before_there_is_a_controller_is_told_once_there_is_one(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path)
        node.course.place = PLACE
        tell_found(node.parts, FAILURE)
        assert [(one.kind, one.rank) for one in node.course.untold] == [("crash", 1)]
        link = Link()
        link.member.found = lambda finding: [finding]
        node.course.link = link  # type: ignore[assignment]
        tell_found(node.parts, LEFT)
        assert [(one.kind, one.rank) for one in link.said] == [("exit", 0)]
        assert len(node.course.untold) == 1

    asyncio.run(main())


@pytest.mark.parametrize("ending", ["no restart left", "signal", "job over", "budget"])
def test_a_failure_ends_the_job_where_no_restart_may_follow(
    tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        node = Node(tmp_path, Refusal("rank 1 fails too often") if ending == "budget" else None)
        if ending == "signal":
            node.course.signalled = signal.SIGTERM
        if ending == "job over":
            node.course.job_over.set()
        last = Place(0, 0, 2, 1, "127.0.0.1", 4711, incarnation=1)
        ended = await node.after(FAILED, last if ending == "no restart left" else PLACE)
        reason = "rank 1 fails too often" if ending == "budget" else "rank 1: boom"
        assert ended == Outcome("failed", 5, reason)
        assert node.run.said == ([reason] if ending == "budget" else [])

    asyncio.run(main())
    assert "Root Cause (first observed failure):" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["no restart left", "budget"])
def test_a_failure_on_broken_hardware_ends_the_job_so_that_it_begins_elsewhere(
    tmp_path: Path, ending: str
) -> None:
    async def main() -> None:
        node = Node(tmp_path, Refusal("rank 1 fails too often") if ending == "budget" else None)
        node.parts.checks.is_broken = True
        last = Place(0, 0, 2, 1, "127.0.0.1", 4711, incarnation=int(ending == "no restart left"))
        ended = await node.after(FAILED, last)
        assert isinstance(ended, Outcome)
        assert (ended.kind, ended.code) == ("failed", 75)
        assert node.course.kind_of(ended) == "hardware"
        assert node.course.category_of(ended, ended.code) == "infrastructure"

    asyncio.run(main())


@pytest.mark.parametrize("stranger", ["", "another run has begun"])
@pytest.mark.parametrize("kind", ["failed", "halted"])
def test_a_launcher_that_hears_of_no_next_place_ends_so_that_it_begins_elsewhere(
    tmp_path: Path, kind: Any, stranger: str
) -> None:
    """It was cut off, or the first one has begun another run: no failure of the training's."""

    class Silent(Link):
        """A link to a controller that stays away."""

        async def next_place(self) -> None:  # type: ignore[override]
            return None

    async def main() -> None:
        node, link = Node(tmp_path), Silent()
        link.stranger, link.member.missing = stranger, "nothing is heard"  # type: ignore[attr-defined]
        node.course.link = link  # type: ignore[assignment]
        node.parts.crew.workers.first_left = None
        node.parts.caching = SimpleNamespace(rigid=lambda _: "")
        node.parts.controller = SimpleNamespace(at="10.0.0.1:29400")
        ended = await after_all_nodes(node.parts, lambda: None, Outcome(kind, 5, "over"), PLACE)
        assert isinstance(ended, Outcome)
        assert (ended.kind, ended.code) == ("failed", 75)
        why = stranger or "nothing is heard (10.0.0.1:29400)"
        assert ended.reason == f"{why}; {'rank 1: boom' if kind == 'failed' else 'over'}"
        assert node.run.said == [f"{why}: this node ends"]
        assert node.course.category_of(ended, ended.code) == "infrastructure"

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["finished", "signal", "stopped", "alone"])
def test_what_is_no_failure_ends_one_node_as_it_is(tmp_path: Path, kind: Any) -> None:
    async def main() -> None:
        outcome = Outcome(kind, 0, "over")
        assert await Node(tmp_path).after(outcome) is outcome

    asyncio.run(main())


def test_a_signal_while_workers_are_halted_for_the_next_incarnation_ends_the_job() -> None:
    """A scheduler that cancels a job signals workers and launcher at once: it must not end with 0."""

    async def main() -> None:
        course = Course()
        course.link = SimpleNamespace()  # type: ignore[assignment]
        course.signalled = signal.SIGTERM
        parts: Any = SimpleNamespace(course=course, crew=None)
        halted = Outcome("halted", 0, "all nodes begin again")
        ended = await after_all_nodes(parts, lambda: None, halted, PLACE)
        assert isinstance(ended, Outcome)
        assert (ended.kind, ended.code) == ("signal", 143)

    asyncio.run(main())


def test_nobody_waits_for_storage_in_a_run_that_another_has_succeeded(tmp_path: Path) -> None:
    """The node that would make the step whole is gone, and the new run waits for this one."""

    async def main() -> None:
        node, waits_in_vain = Node(tmp_path), list[bool]()

        async def stored(wait_s: float, in_vain: Callable[[], bool], *, last: bool) -> str:
            waits_in_vain.append(in_vain())
            return ""

        stored_at = Persisting(str(tmp_path), None, 2, 600.0, 1.0)
        node.parts.run.job = replace(node.run.job, persisting=stored_at)
        node.parts.caching = SimpleNamespace(stored=stored)
        node.parts.watching.is_steady = True
        node.course.place = PLACE
        for stranger in ("", "another run has begun"):
            node.course.link = SimpleNamespace(stranger=stranger)  # type: ignore[assignment]
            await wait_for_storage(node.parts, FAILED)
        assert waits_in_vain == [False, True]

    asyncio.run(main())
