"""Real sockets on loopback: reconnecting, bounds, and peers that misbehave."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import certificates

from keepstep import wire
from keepstep.core.errors import UsageError
from keepstep.core.finding import Finding

KEY = wire.RunKey(b"s" * 32, "job-a")
QUICK = wire.ClientLimits(first_wait_s=0.01, longest_wait_s=0.02)


class Hub:
    """A server that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[wire.Message] = []
        self.peers: list[wire.Connection] = []
        self.gone: list[str] = []

    @property
    def callbacks(self) -> wire.ServerCallbacks:
        return wire.ServerCallbacks(
            message=lambda connection, message: self.heard.append(message),
            opened=self.peers.append,
            closed=lambda connection, reason: self.gone.append(reason),
        )

    async def serve(self, port: int = 0, **options: Any) -> wire.Server:
        return await wire.serve("127.0.0.1", port, KEY, self.callbacks, **options)


def client(port: int, heard: list[wire.Message] | None = None, **options: Any) -> wire.Client:
    key = options.pop("key", KEY)
    return wire.Client(
        ("127.0.0.1", port),
        key,
        role="agent",
        greet=lambda: [wire.Hello("agent", "n", 0, 1)],
        message=(heard if heard is not None else []).append,
        limits=options.pop("limits", QUICK),
        **options,
    )


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(wait(), timeout_s)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine test on the shipped loop."""
    import functools

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        wire.run(test(*arguments, **named))

    return run


@in_loop
async def test_greeting_comes_first_and_what_was_queued_after_it() -> None:
    hub = Hub()
    server = await hub.serve()
    one = client(server.port)
    one.send(wire.Bye("queued before the connection"))
    await until(lambda: len(hub.heard) == 2)
    assert [type(message) for message in hub.heard] == [wire.Hello, wire.Bye]
    await one.close()
    await until(lambda: hub.gone)
    await server.close()


@in_loop
async def test_client_comes_back_and_greets_again() -> None:
    hub = Hub()
    server = await hub.serve()
    port = server.port
    trouble: list[int] = []
    one = client(port, trouble=lambda error, attempt: trouble.append(attempt))
    await until(lambda: hub.heard)
    await server.close()
    await until(lambda: len(trouble) >= 2)
    again = Hub()
    server = await again.serve(port)
    await until(lambda: again.heard)
    assert again.heard == [wire.Hello("agent", "n", 0, 1)]
    assert trouble[0] == 1
    await one.close()
    await server.close()


@in_loop
async def test_who_is_refused_at_once_each_time_comes_back_later_and_later() -> None:
    callbacks = wire.ServerCallbacks(
        message=lambda connection, message: connection.close("not you"),
        opened=lambda connection: None,
        closed=lambda connection, reason: None,
    )
    server = await wire.serve("127.0.0.1", 0, KEY, callbacks)
    trouble: list[int] = []
    one = client(server.port, trouble=lambda error, attempt: trouble.append(attempt))
    await until(lambda: len(trouble) >= 4)
    assert trouble[:4] == [1, 2, 3, 4]
    await one.close()
    await server.close()


@in_loop
async def test_queue_keeps_newest_heartbeats_and_findings_up_to_a_bound() -> None:
    limits = wire.ClientLimits(heartbeats=2, messages=3, first_wait_s=0.01, longest_wait_s=0.02)
    unused = await Hub().serve()
    port = unused.port
    await unused.close()
    one = client(port, limits=limits)
    for number in range(5):
        one.send(wire.Heartbeat(0, number, 0.0, ()))
        one.send(wire.Found(Finding("slow", number, "n", 0.0, 1)))
        one.send(wire.Profile(1, 0, ()))
    assert one.queued == 5
    assert one.counters.dropped == 3 + 2 + 5
    hub = Hub()
    server = await hub.serve(port)
    await until(lambda: len(hub.heard) == 6)
    findings = [message.finding.rank for message in hub.heard if isinstance(message, wire.Found)]
    beats = [message.sequence for message in hub.heard if isinstance(message, wire.Heartbeat)]
    assert (findings, beats) == ([2, 3, 4], [3, 4])
    await one.close()
    await server.close()


@in_loop
async def test_wrong_secret_is_counted_and_the_others_go_on() -> None:
    hub = Hub()
    server = await hub.serve()
    good = client(server.port)
    told: list[Exception] = []
    bad = client(
        server.port, key=wire.RunKey(b"x" * 32, "job-a"), trouble=lambda error, attempt: told.append(error)
    )
    await until(lambda: len(told) >= 2)
    await until(lambda: server.counters.refused["unauthenticated"] >= 2)
    assert isinstance(told[0], wire.Unproven)
    assert good.connected
    assert not bad.connected
    await bad.close()
    await good.close()
    await server.close()


@in_loop
async def test_garbage_oversized_and_silence_are_refused_and_counted() -> None:
    hub = Hub()
    server = await hub.serve(limits=wire.ServerLimits(handshake_s=0.05))
    for sent in (b"\0\0\0\x05hello", b"\xff\xff\xff\xff", b"\0\0"):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        await reader.read()
        writer.close()
        await writer.wait_closed()
    counted = {reason: count for reason, count in server.counters.refused.items() if count}
    assert counted == {"malformed": 1, "oversized": 1, "handshake-timeout": 1}
    assert server.unproven == 0
    await server.close()


@in_loop
async def test_oldest_unproven_connection_makes_room() -> None:
    hub = Hub()
    server = await hub.serve(limits=wire.ServerLimits(unproven=2))
    idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
    await until(lambda: server.counters.refused["crowded-out"] == 1)
    assert server.unproven == 2
    one = client(server.port)
    await until(lambda: one.connected)
    for _, writer in idle:
        writer.close()
    await one.close()
    await server.close()


@in_loop
async def test_peer_that_does_not_read_is_dropped() -> None:
    hub = Hub()
    server = await hub.serve(limits=wire.ServerLimits(unsent_bytes=1 << 20))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    here, there = writer.get_extra_info("sockname"), writer.get_extra_info("peername")
    ends = wire.Ends(f"{here[0]}:{here[1]}", f"{there[0]}:{there[1]}")
    channel = wire.ClientChannel(KEY, "agent", ends)
    writer.write(channel.open())
    _, proof = channel.receive(await reader.read(1024))
    writer.write(proof)
    await until(lambda: hub.peers)
    big = wire.Refused("x" * (1 << 20))
    for _ in range(64):
        hub.peers[0].send(big)
    assert server.counters.refused["slow-reader"] == 1
    writer.close()
    await until(lambda: hub.gone)
    assert hub.gone == ["slow-reader"]
    await server.close()


@in_loop
async def test_one_bad_connection_among_many_does_no_harm() -> None:
    hub = Hub()
    server = await hub.serve()
    clients = [client(server.port) for _ in range(20)]
    await until(lambda: len(hub.heard) == 20)
    seeded = random.Random(1)
    for _ in range(50):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(seeded.randbytes(seeded.randrange(1, 4000)))
        writer.close()
    for one in clients:
        one.send(wire.Bye("still here"))
    await until(lambda: sum(isinstance(message, wire.Bye) for message in hub.heard) == 20)
    await until(lambda: server.unproven == 0)
    for one in clients:
        await one.close()
    await server.close()


@in_loop
async def test_mutual_tls(tmp_path: Path) -> None:
    paths = certificates(tmp_path)
    hub = Hub()
    server = await hub.serve(tls=wire.server_context(paths))
    one = client(server.port, tls=wire.client_context(paths))
    await until(lambda: hub.heard)
    assert hub.heard == [wire.Hello("agent", "n", 0, 1)]
    await one.close()
    await server.close()


def test_tls_wants_all_three_paths(tmp_path: Path) -> None:
    assert wire.TlsPaths.of(None, None, None) is None
    with pytest.raises(UsageError, match="all of"):
        wire.TlsPaths.of("a", None, None)
    with pytest.raises(UsageError, match="PEM"):
        wire.server_context(wire.TlsPaths(*[str(tmp_path / name) for name in "abc"]))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("10.0.0.1:80", ("10.0.0.1", 80)), ("[::1]:80", ("::1", 80)), ("head:0", ("head", 0))],
)
def test_addresses(text: str, parsed: tuple[str, int]) -> None:
    assert wire.parse_address(text) == parsed


@pytest.mark.parametrize("text", ["", "head", ":80", "head:x", "head:70000", "head:-1"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        wire.parse_address(text)


def test_refusals_are_said_once_a_minute_per_host() -> None:
    counters = wire.Counters()
    said = [
        counters.refuse("malformed", host, now_s)
        for host, now_s in [("a:1", 0), ("a:2", 59), ("b:1", 59), ("a:3", 61)]
    ]
    assert said == [True, False, True, True]
    assert counters.refused["malformed"] == 4
    for number in range(5000):
        counters.refuse("oversized", f"host {number}:1", 100.0)
    assert len(counters._said) <= 1024


@pytest.mark.parametrize("turns", range(8))
def test_who_is_accepted_while_the_server_closes_is_closed_too(turns: int) -> None:
    """Else the socket stays open when the loop has ended, which this test would be told as a warning."""

    async def play() -> None:
        server = await Hub().serve()
        peers = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(5)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.close()
        for peer in peers:
            with peer, suppress(ConnectionError):
                assert peer.recv(1) == b""

    wire.run(play())  # asyncio's own loop before 3.12.9 forgets what it accepts while it closes
    gc.collect()


@pytest.mark.parametrize("turns", range(16))
def test_a_client_that_is_closed_as_it_connects_ends(turns: int) -> None:
    async def play() -> None:
        server = await Hub().serve()
        one = client(server.port)
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(one.close(), 5)
        await server.close()

    asyncio.run(play())
    gc.collect()
