"""The mirror of a cluster's objects: cut watches, versions that are too old, objects of another form."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from lightkube import ApiError
from lightkube.models.meta_v1 import Status

from keepstep.kubernetes import mirror as mirrors
from keepstep.kubernetes.cluster_api import PODS, code_of
from keepstep.kubernetes.mirror import Mirror
from keepstep.kubernetes.objects import Pod

Object = dict[str, Any]
SOURCES = Path(__file__).parents[3] / "src/keepstep"


def pod(name: str, **more: Any) -> Object:
    return {"metadata": {"namespace": "ml", "name": name}, **more}


def refusal(code: int) -> ApiError:
    return ApiError(status=Status(code=code, message="refused\n\x1b[31m"))


class Listing:
    """What the client library gives for a list."""

    resourceVersion = "7"

    def __init__(self, objects: list[Object] | Exception) -> None:
        self._objects = objects

    async def __aiter__(self) -> AsyncIterator[Object]:
        if isinstance(self._objects, Exception):
            raise self._objects
        for one in self._objects:
            yield one


class Client:
    """Each entry is what one list gives, and what is heard after it until it breaks."""

    def __init__(self, *turns: tuple[list[Object] | Exception, list[tuple[str, Object] | Exception]]) -> None:
        self.turns = list(turns)
        self.watched: list[str] = []
        self.lists = 0

    def list(self, resource: Any, **query: Any) -> Listing:
        self.lists += 1
        return Listing(self.turns[0][0])

    async def watch(
        self, resource: Any, *, resource_version: str, **query: Any
    ) -> AsyncIterator[tuple[str, Object]]:
        self.watched.append(resource_version)
        for one in self.turns.pop(0)[1]:
            if isinstance(one, Exception):
                raise one
            yield one
        await asyncio.sleep(60)


def followed(client: Client, done: Callable[[Mirror[Pod]], bool]) -> tuple[Mirror[Pod], list[str]]:
    said: list[str] = []

    async def work() -> Mirror[Pod]:
        made = Mirror(client, PODS, Pod, lambda: None, said.append, namespace="ml", hint="install it")
        task = asyncio.ensure_future(made.run())
        for _ in range(500):
            if done(made):
                break
            await asyncio.sleep(0.01)
        assert done(made), said
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return made

    return asyncio.run(work()), said


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "_FIRST_S", 0.01)


def names(mirror: Mirror[Pod]) -> list[str]:
    return sorted(name for _, name in mirror.found)


def test_changes_are_followed() -> None:
    changes: list[tuple[str, Object] | Exception] = [
        ("ADDED", pod("b")),
        ("MODIFIED", pod("a", status={"phase": "Running"})),
        ("DELETED", pod("b")),
        ("BOOKMARK", {"metadata": {"resourceVersion": "9"}}),
        ("ADDED", pod("c")),
    ]
    mirror, said = followed(Client(([pod("a")], changes)), lambda made: ("ml", "c") in made.found)
    assert names(mirror) == ["a", "c"]
    assert mirror.found["ml", "a"].status.phase == "Running"
    assert said == []


@pytest.mark.parametrize(
    "failure", [refusal(410), ConnectionResetError("reset"), OSError("cut"), asyncio.TimeoutError()]
)
def test_all_is_listed_anew_when_the_watch_breaks(failure: Exception) -> None:
    client = Client(([pod("a"), pod("b")], [failure]), ([pod("c")], []))
    mirror, said = followed(client, lambda made: made.is_complete and ("ml", "c") in made.found)
    assert names(mirror) == ["c"], "what was deleted meanwhile is not kept"
    assert client.watched == ["7", "7"]
    assert len(said) <= 1


def test_nothing_is_complete_while_the_api_server_is_away() -> None:
    away: list[tuple[str, Object] | Exception] = [OSError("away")]
    client = Client(([pod("a")], away), *[(OSError("away"), [])] * 9)
    mirror, _ = followed(client, lambda made: ("ml", "a") in made.found and not made.is_complete)
    assert names(mirror) == ["a"]


def test_a_kind_that_is_not_installed_is_told_in_one_line() -> None:
    failing = Client(*[(refusal(404), [])] * 9)
    mirror, said = followed(failing, lambda _: failing.lists > 2)
    assert not mirror.is_complete
    assert len(said) >= 2
    for line in said:
        assert line.endswith("; install it")
        assert "\n" not in line
        assert "\x1b" not in line


def test_an_object_of_another_form_is_left_alone() -> None:
    """As an older definition may let in: it is told, and others go on."""
    wrong = pod("x\x1b[31m", spec={"nodeName": 7})
    mirror, said = followed(Client(([wrong, pod("a")], [])), lambda made: made.is_complete)
    assert names(mirror) == ["a"]
    assert len(said) == 1
    assert "is left alone" in said[0]


def test_the_code_of_a_refusal() -> None:
    assert [code_of(refusal(code)) for code in (404, 409, 410)] == [404, 409, 410]
    assert code_of(OSError()) == 0


def test_nothing_else_of_keepstep_needs_the_client_library() -> None:
    found = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        for one in ast.walk(ast.parse(path.read_text()))
        if isinstance(one, ast.Import | ast.ImportFrom)
        for name in (
            [one.module or ""] if isinstance(one, ast.ImportFrom) else [each.name for each in one.names]
        )
        if name.partition(".")[0] in ("lightkube", "httpx2")
    }
    assert found == {
        "kubernetes/cluster_api.py",
        "kubernetes/mirror.py",
        "kubernetes/operator_program.py",
    } - {"kubernetes/mirror.py"}
