"""The operator as a program, for pods of other makers: the order of what it asks of the API server, and its Events."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.unit.kubernetes.virtual_cluster import EPOCH_S, node
from tests.unit.kubernetes.virtual_pods import pod, read

pytest.importorskip("lightkube")

from lightkube import ApiError
from lightkube.models.meta_v1 import Status

from keepstep.kubernetes import operator_program
from keepstep.kubernetes.objects import FAULTS, Node
from keepstep.wire.messages import FaultyNode, Overview

BAD = Overview("running", 3, 1, 7, faults=(FaultyNode("n1", "hardware", 1, EPOCH_S + 1005.0, "it is bad"),))


class Client:
    """Notes what is changed and made; refuses changes with a code."""

    namespace = "keepstep"

    def __init__(self) -> None:
        self.code = 0
        self.changes: list[tuple[str, Any]] = []
        self.events: list[tuple[str, str, str]] = []

    async def patch(self, kind: Any, name: str, change: Any, *, patch_type: Any) -> None:
        if self.code:
            raise ApiError(status=Status(code=self.code, message="no"))
        self.changes.append((kind.__name__, copy.deepcopy(change)))

    async def create(self, what: Any, **where: Any) -> None:
        about = what["involvedObject"]
        self.events.append((about["kind"], about["name"], what["reason"]))


class Watching:
    """An operator that leads and sees four pods of a job, on nodes that change only as a test says."""

    def __init__(self) -> None:
        self.client, self.now_s = Client(), 100.0
        self.operator = operator = operator_program.Operator(
            self.client,  # type: ignore[arg-type]
            ["ml", "broken"],
            me="a",
            most="auto",
            dry_run=False,
            speaker=operator_program.Speaker(),
            clock=lambda: self.now_s,
        )
        self.nodes = {f"n{at}": node(f"n{at}") for at in range(4)}
        own = operator._others[0]
        own.found = {("ml", f"train-{at}"): one for at, one in enumerate(read(*PODS))}
        for mirror in (operator._nodes, operator._jobs[0], operator._pods[0], operator._services[0], own):
            mirror.is_complete = True

    async def look(self) -> Client:
        """One look, after which everything was asked that follows; then a second passes."""
        operator = self.operator
        operator._election.wrote({"metadata": {"resourceVersion": "1"}}, self.now_s)
        found = {name: msgspec.convert(one, Node) for name, one in copy.deepcopy(self.nodes).items()}
        operator._nodes.found = {("", name): one for name, one in found.items()}
        operator._look()
        await asyncio.gather(*operator._tasks)
        self.now_s += 1.0
        return self.client

    @property
    def known(self) -> operator_program._Known:
        return self.operator._known_watched["ml", "train"]


PODS = [pod(f"train-{at}", f"n{at}") for at in range(4)]


def run(work: Callable[[Watching], Any]) -> None:
    async def all_of_it() -> None:
        await work(Watching())

    asyncio.run(all_of_it())


def test_first_the_note_and_the_rest_once_that_is_seen() -> None:
    async def work(watching: Watching) -> None:
        await watching.look()
        assert watching.client.changes == []
        watching.known.interview.told = BAD
        ((kind, change),) = (await watching.look()).changes
        assert (kind, list(change["metadata"]["annotations"])) == ("Node", [FAULTS])
        assert change["metadata"]["resourceVersion"] == "1"
        for _ in range(3):
            assert len((await watching.look()).changes) == 1, "it is not seen yet"
        watching.nodes["n1"]["metadata"] |= {
            "resourceVersion": "2",
            "annotations": change["metadata"]["annotations"],
        }
        kinds = [kind for kind, _ in (await watching.look()).changes]
        assert kinds == ["Node", "NodeStatus"]
        assert ("Node", "n1", "Hardware") in watching.client.events

    run(work)


def test_a_note_that_was_refused_is_tried_again() -> None:
    async def work(watching: Watching) -> None:
        await watching.look()
        watching.known.interview.told = BAD
        watching.client.code = 409
        assert (await watching.look()).changes == []
        watching.client.code = 0
        assert len((await watching.look()).changes) == 1

    run(work)


def test_an_event_says_that_it_is_heard_at_once_and_that_it_is_not_half_a_minute_later() -> None:
    async def work(watching: Watching) -> None:
        await watching.look()
        watching.known.interview.trouble = ("NoAnswer", "x")
        for _ in range(29):
            assert (await watching.look()).events == []
        watching.known.interview.told = Overview("running", 3, 1, 7)
        assert (await watching.look()).events == [("Pod", "train-0", "Watched")]
        watching.known.interview.told = None
        for _ in range(100):
            await watching.look()
        assert [reason for _, _, reason in watching.client.events] == ["Watched", "NoAnswer"]

    run(work)


def test_a_job_whose_pods_are_gone_is_forgotten_once_all_namespaces_are_seen() -> None:
    async def work(watching: Watching) -> None:
        await watching.look()
        watching.operator._others[0].found = {}
        await watching.look()
        assert watching.operator._known_watched, "another namespace is not seen"
        watching.operator._others[1].is_complete = True
        await watching.look()
        assert not watching.operator._known_watched

    run(work)


def test_only_jobs_that_are_due_are_asked() -> None:
    async def work(watching: Watching) -> None:
        await watching.look()
        assert watching.operator._questions_to_watched([]) == {}
        key = ("ml", "train")
        ask = watching.operator._questions_to_watched([key])[key]
        assert ask.args[1:3] == ("ml", "keepstep")  # type: ignore[attr-defined]

    run(work)
