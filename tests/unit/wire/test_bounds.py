"""How many connections without proof a server keeps, so that it has descriptors for those with one."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.certificates import certificates
from tests.unit.wire.test_connection import KEY, Hub, client, in_loop, until

from keepstep import wire
from keepstep.core import descriptors
from keepstep.wire.server import room_for_unproven

SERVER = Path(__file__).with_name("server_without_room.py")


@pytest.mark.parametrize(
    ("limit", "proven", "room"),
    [
        (1 << 20, 0, 2048),  # as many as are ever kept
        (1024, 0, 978),
        (1024, 700, 278),  # what those with proof have is theirs
        (1024, 978, 8),  # some are always taken in, or nobody could prove anything
        (256, 0, 210),
    ],
)
def test_room_is_what_is_left_of_the_descriptors(limit: int, proven: int, room: int) -> None:
    assert room_for_unproven(2048, limit, others=30, kept=proven) == room


@in_loop
async def test_silent_connections_make_room_for_those_that_prove_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """46 descriptors, of which 10 are others' and 16 stay free: there are never more than 20 connections."""
    hub = Hub()
    server = await hub.serve(limits=wire.ServerLimits(descriptors=46))
    monkeypatch.setattr(descriptors, "open_now", lambda: 10 + server._alive)
    with ExitStack() as stack:

        async def silence(count: int) -> None:
            """One after the other, so that what is closed for the next one is gone by then."""
            for seen in range(server.counters.connections, server.counters.connections + count):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                await until(lambda seen=seen: server.counters.connections > seen)

        await silence(30)
        assert server.unproven == 20
        clients = [client(server.port) for _ in range(5)]
        await until(lambda: len(hub.peers) == 5)
        await silence(30)
        assert (server.unproven, len(hub.peers)) == (15, 5)
        assert server._alive <= 20 + 1
        clients.append(client(server.port))
        await until(lambda: len(hub.peers) == 6)
        assert server.counters.refused["crowded-out"] >= 60 - 15
        assert hub.gone == []
        for one in clients:
            await one.close()
    await server.close()


@in_loop
async def test_the_room_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is opened takes from it; the server's own connections do not count as files."""
    others = 10
    hub = Hub()
    server = await hub.serve()
    monkeypatch.setattr(descriptors, "soft_limit", lambda: 100)
    monkeypatch.setattr(descriptors, "open_now", lambda: others + server._alive)
    one = client(server.port)
    await until(lambda: hub.peers)
    server._counted_s -= 10
    assert server._room() == 100 - 16 - 10 - 1
    others = 30
    assert server._room() == 100 - 16 - 10 - 1  # it looks once a second
    server._counted_s -= 10
    assert server._room() == 100 - 16 - 30 - 1
    await one.close()
    await until(lambda: hub.gone)
    assert server._alive == 0
    await server.close()


@in_loop
async def test_who_is_silent_before_tls_is_counted_and_makes_room_too(tmp_path: Path) -> None:
    paths = certificates(tmp_path)
    hub = Hub()
    limits = wire.ServerLimits(unproven=2)
    server = await hub.serve(limits=limits, tls=wire.server_context(paths))
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(3)]
        await until(lambda: server.counters.refused["crowded-out"] == 1)
        assert server.unproven == 2
        silent[0].settimeout(20)
        assert await asyncio.to_thread(silent[0].recv, 100) == b""  # nothing is said without TLS
        one = client(server.port, tls=wire.client_context(paths))
        await until(lambda: hub.heard)
        await one.close()
        await until(lambda: hub.gone)
    await server.close()


@in_loop
async def test_who_speaks_no_tls_or_has_no_certificate_is_refused_and_told(tmp_path: Path) -> None:
    paths = certificates(tmp_path)
    hub = Hub()
    server = await hub.serve(tls=wire.server_context(paths))
    troubles: list[Exception] = []
    plain = client(server.port, trouble=lambda error, attempt: troubles.append(error))
    await until(lambda: server.counters.refused["unauthenticated"])
    await plain.close()
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    troubles.clear()
    before = server.counters.refused["unauthenticated"]
    stranger = client(server.port, tls=bare, trouble=lambda error, attempt: troubles.append(error))
    await until(lambda: troubles)
    await until(lambda: server.counters.refused["unauthenticated"] > before)
    assert "certificate required" in str(troubles[0])
    await stranger.close()
    assert hub.peers == []
    await server.close()


@in_loop
async def test_large_messages_cross_tls_and_its_end_is_answered(tmp_path: Path) -> None:
    paths = certificates(tmp_path)
    hub, heard = Hub(), list[wire.Message]()
    server = await hub.serve(tls=wire.server_context(paths))
    one = client(server.port, heard, tls=wire.client_context(paths))
    await until(lambda: hub.peers)
    large = wire.Refused("x" * (3 << 20))
    hub.peers[0].send(large)
    one.send(wire.Bye("y" * (2 << 20)))
    await until(lambda: heard and len(hub.heard) == 2)
    assert heard == [large]
    assert hub.heard[1] == wire.Bye("y" * (2 << 20))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await one.close()
    assert loop.time() - began_s < 0.9  # a client that is not answered waits for 1 s
    await until(lambda: hub.gone)
    await server.close()


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_server_without_descriptors_waits_and_goes_on(loop: str) -> None:
    """It neither ends nor spins, and takes connections again once there is room."""
    command = [sys.executable, str(SERVER), loop, "2"]
    with ExitStack() as stack:
        server = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
        stack.callback(server.kill)
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(60)]
        print(file=server.stdin, flush=True)
        share, unproven = json.loads(server.stdout.readline())
        assert share < 0.3
        assert 10 < unproven < 30
        for one in silent:
            one.close()
        assert wire.run(opened(port, server.stdout.readline)) == 1


async def opened(port: int, tells: Callable[[], str]) -> int:
    one = client(port, key=KEY)
    count = int(await asyncio.to_thread(tells))
    await one.close()
    return count
