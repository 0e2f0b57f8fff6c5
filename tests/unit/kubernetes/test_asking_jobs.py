"""How the operator finds a job's controller among its pods, and what it takes for a secret."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest

from keepstep import wire
from keepstep.kubernetes.asking import Asked, secret_in

SECRET = b"s" * 32
STANDS = wire.Overview("running", 3, 1, 7)


@asynccontextmanager
async def controller(
    answer: Callable[[], wire.Message | None], host: str, port: int = 0, run_id: str = "train"
):
    def message(connection: wire.Connection, said: wire.Message) -> None:
        told = answer() if isinstance(said, wire.Look) else None
        if told is not None:
            connection.send(told)

    callbacks = wire.ServerCallbacks(message=message, opened=lambda _: None, closed=lambda *_: None)
    server = await wire.serve(host, port, wire.RunKey(SECRET, run_id), callbacks)
    try:
        yield server
    finally:
        await server.close()


def test_it_answers() -> None:
    async def work() -> None:
        async with controller(lambda: STANDS, "127.0.0.1") as server:
            asked = Asked(server.port)
            assert await asked.ask(["127.0.0.1"], SECRET, "train") == STANDS
            assert await asked.ask(["127.0.0.1"], b"x" * 32, "train") is None
            assert "127.0.0.1" in asked.trouble
            assert await asked.ask(["127.0.0.1"], SECRET, "other") is None
            assert "train" in asked.trouble
            assert await asked.ask([], SECRET, "train") is None

    asyncio.run(work())


def test_it_is_found_after_it_has_moved() -> None:
    async def work() -> None:
        late = wire.Overview("created", 0, 0, -1)
        async with controller(lambda: STANDS, "127.0.0.3") as server:
            pods = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
            asked = Asked(server.port)
            assert await asked.ask(pods, SECRET, "train") == STANDS
            async with controller(lambda: late, "127.0.0.1", server.port):
                assert await Asked(server.port).ask(pods, SECRET, "train") == STANDS
            moved = wire.Moved(2, "127.0.0.3", server.port)
            async with controller(lambda: moved, "127.0.0.1", server.port):
                assert await Asked(server.port).ask(pods, SECRET, "train") == STANDS
                assert await Asked(server.port).ask(pods[:1], SECRET, "train") is None, (
                    "only to pods of the job"
                )

    asyncio.run(work())


def test_a_controller_that_waits_speaks_for_the_job_only_once_all_pods_were_asked() -> None:
    async def work() -> None:
        late = wire.Overview("created", 0, 0, -1)
        async with controller(lambda: late, "127.0.0.1") as server:
            asked, pods = Asked(server.port), [f"127.0.0.{index}" for index in range(1, 8)]
            told = [await asked.ask(pods, SECRET, "train") for _ in range(4)]
            assert (told[0], told[-1]) == (None, late)
            assert await asked.ask([*pods, "127.0.0.8", "127.0.0.9", "127.0.0.10"], SECRET, "train") is None
            assert "not all pods have been asked" in asked.trouble

    asyncio.run(work())


def test_a_controller_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.kubernetes.asking._ANSWER_S", 0.3)

    async def work() -> None:
        async with controller(lambda: None, "127.0.0.1") as server:
            asked = Asked(server.port)
            assert await asked.ask(["127.0.0.1"], SECRET, "train") is None
            assert asked.trouble.endswith("no answer in 0.3 s")

    asyncio.run(work())


@pytest.mark.parametrize(
    "data",
    [None, {}, {"secret": 7}, {"secret": "%%"}, {"secret": base64.b64encode(b"zz" * 32).decode()}, [1]],
)
def test_what_is_no_secret(data: object) -> None:
    assert secret_in(data) == b""


def test_a_secret() -> None:
    assert secret_in({"secret": base64.b64encode(b"ab" * 32 + b"\n").decode()}) == b"\xab" * 32
    assert secret_in({"secret": base64.b64encode(b"ab" * 31).decode()}) == b""
