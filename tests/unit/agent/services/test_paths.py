"""Probes between agents, over loopback addresses that stand for hosts; who has no secret gets no answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from keepstep import wire
from keepstep.agent.services import path_probes as paths
from keepstep.agent.services.path_probes import echo_server, is_elsewhere, probe_paths
from keepstep.core.summary import Endpoint
from keepstep.wire import blocking
from keepstep.wire.blocking import BlockingServer
from keepstep.wire.messages import MOST_LOAD_BYTES, ProbeRequest, ProbeTarget

KEY = wire.RunKey(b"s" * 32, "job-a")


@pytest.fixture(autouse=True)
def loopback_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "is_elsewhere", lambda address: address.startswith(("127.0.", "203.")))


@pytest.fixture(params=["asyncio", "wire"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """On asyncio's own loop and on the one that the agent runs on."""
    return asyncio.run if request.param == "asyncio" else wire.run


def with_echo(
    test: Callable[[BlockingServer], Coroutine[Any, Any, None]], run: Callable[..., Any] = wire.run
) -> None:
    async def main() -> None:
        echo = echo_server(KEY)
        try:
            echo.listen(["127.0.0.2"])
            await test(echo)
        finally:
            echo.close()

    run(main())


def request(*endpoints: Endpoint, load_bytes: int = 0) -> ProbeRequest:
    return ProbeRequest(1, (ProbeTarget("there", endpoints),), load_bytes)


async def outcome(*endpoints: Endpoint, key: wire.RunKey = KEY, timeout_s: float = 5.0) -> str:
    (probe,) = await probe_paths(request(*endpoints), "here", key, (), timeout_s)
    assert (probe.source, probe.target) == ("here", "there")
    assert probe.round_trip_s >= 0
    return probe.outcome


def test_an_empty_message_comes_back(run: Callable[..., Any]) -> None:
    async def test(echo: BlockingServer) -> None:
        assert [await outcome(*echo.endpoints) for _ in range(3)] == ["echo"] * 3

    with_echo(test, run)


def test_the_address_that_the_workers_use_is_probed() -> None:
    async def test(echo: BlockingServer) -> None:
        dead = Endpoint("127.0.0.9", echo.endpoints[0].port)
        assert await outcome(dead, *echo.endpoints) == "refused"
        (probe,) = await probe_paths(request(dead, *echo.endpoints), "here", KEY, {"127.0.0.2"})
        assert probe.outcome == "echo"

    with_echo(test)


@pytest.mark.parametrize("key", [wire.RunKey(b"x" * 32, "job-a"), wire.RunKey(KEY.secret, "job-b")])
def test_another_run_gets_no_echo(key: wire.RunKey) -> None:
    async def test(echo: BlockingServer) -> None:
        assert await outcome(*echo.endpoints, key=key) == "silent"
        assert await outcome(*echo.endpoints) == "echo"

    with_echo(test)


def test_a_load_takes_its_time() -> None:
    async def test(echo: BlockingServer) -> None:
        took_s: list[float] = []
        for load_bytes in (0, 1, 1 << 16, MOST_LOAD_BYTES):
            asked = request(*echo.endpoints, load_bytes=load_bytes)
            (probe,) = await probe_paths(asked, "here", KEY, ())
            assert probe.outcome == "echo"
            took_s.append(probe.load_s)
        assert took_s[0] == 0.0
        assert 0 < took_s[1] < took_s[-1]

    with_echo(test)


def test_a_load_that_does_not_come_in_time_took_at_least_so_long() -> None:
    async def test(echo: BlockingServer) -> None:
        with socket.create_server(("127.0.0.4", 0)) as server:  # that reads nothing
            asked = request(Endpoint("127.0.0.4", server.getsockname()[1]), load_bytes=MOST_LOAD_BYTES)
            (probe,) = await probe_paths(asked, "here", KEY, (), timeout_s=0.3)
            assert (probe.outcome, probe.load_s >= 0.2) == ("silent", True)

    with_echo(test)


def test_a_ping_is_no_echo() -> None:
    """What comes back must prove that the other end knows the secret, not that it repeats."""

    async def test(echo: BlockingServer) -> None:
        async def parrot(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.read(1000))
            writer.close()

        server = await asyncio.start_server(parrot, "127.0.0.3", 0)
        try:
            assert await outcome(Endpoint("127.0.0.3", server.sockets[0].getsockname()[1])) == "silent"
        finally:
            server.close()

    with_echo(test)


def test_guests_are_few_and_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "HANDSHAKE_S", 0.2)

    async def test(echo: BlockingServer) -> None:
        (endpoint,) = echo.endpoints
        idle = [await asyncio.open_connection(endpoint.address, endpoint.port) for _ in range(100)]
        for reader, writer in idle:
            with contextlib.suppress(ConnectionError):
                await reader.read()  # until the other end closes
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        assert await outcome(endpoint) == "echo"

    with_echo(test)


def test_a_prober_that_stood_still_blames_no_path(run: Callable[..., Any]) -> None:
    """As on a machine that stopped for a moment: the answer was there when its time had run out."""

    async def stand_still() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
            time.sleep(0.5)

    async def test(echo: BlockingServer) -> None:
        asked = probe_paths(request(*echo.endpoints), "here", KEY, (), timeout_s=0.4)
        (probe,), _ = await asyncio.gather(asked, stand_still())
        assert probe.outcome == "echo"
        assert probe.round_trip_s < 0.4

    with_echo(test, run)


def test_a_host_that_takes_connections_and_says_nothing_is_silent() -> None:
    async def test(echo: BlockingServer) -> None:
        with socket.create_server(("127.0.0.4", 0)) as server:
            endpoint = Endpoint("127.0.0.4", server.getsockname()[1])
            assert await outcome(endpoint, timeout_s=0.2) == "silent"

    with_echo(test)


def test_a_full_backlog_is_no_answer() -> None:
    async def test(echo: BlockingServer) -> None:
        with socket.create_server(("127.0.0.4", 0), backlog=0) as server:
            where = server.getsockname()
            clients = [socket.socket() for _ in range(4)]
            try:
                for client in clients:
                    client.setblocking(False)
                    client.connect_ex(where)
                assert await outcome(Endpoint(*where), timeout_s=0.3) == "timeout"
            finally:
                for client in clients:
                    client.close()

    with_echo(test)


@pytest.mark.parametrize("endpoint", [Endpoint("127.0.0.2", 0), Endpoint("127.0.0.2", 1 << 17),
                                      Endpoint("127.0.0.2", 80, "rdma"), Endpoint("example.org", 80)])  # fmt: skip
def test_what_cannot_be_probed_is_left_out(endpoint: Endpoint) -> None:
    assert asyncio.run(probe_paths(request(endpoint), "here", KEY, ())) == ()


def test_targets_beyond_the_bound_are_left_out() -> None:
    async def test(echo: BlockingServer) -> None:
        many = ProbeRequest(1, tuple(ProbeTarget(str(n), echo.endpoints) for n in range(50)))
        assert len(await probe_paths(many, "here", KEY, ())) == paths.MOST_TARGETS

    with_echo(test)


def test_an_address_of_no_interface_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "keepstep.wire")

    async def test(echo: BlockingServer) -> None:
        assert not echo.listen(["127.0.0.2", "203.0.113.1"])
        assert not echo.listen(["127.0.0.2", "203.0.113.1"])
        assert len(echo.endpoints) == 1
        assert len(caplog.records) == 1

    with_echo(test)


def test_loopback_and_names_are_not_elsewhere() -> None:
    addresses = ("127.0.0.1", "::1", "0.0.0.0", "ff02::1", "localhost", "", "10.0.0.1", "fe80::1%eth0")
    assert [is_elsewhere(address) for address in addresses] == [False] * 6 + [True] * 2
