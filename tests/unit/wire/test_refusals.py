"""Everything that listens refuses the same peers, for the same reasons, and still answers an honest one afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from keepstep import wire
from keepstep.agent.services.path_probes import echo_server
from keepstep.checkpoint.peers.state_server import state_server
from keepstep.core.errors import CheckpointError
from keepstep.launch.check.check_host import CheckHost
from keepstep.launch.controller.elections import Elections
from keepstep.wire import blocking, channel, server
from keepstep.wire.channel import HANDSHAKE_LIMIT, LIMITS, SEAL_BYTES, Proof
from keepstep.wire.checking import Arrived
from keepstep.wire.counters import Counters
from keepstep.wire.framing import frame
from keepstep.wire.transfer import Ping, Want

KEY = wire.RunKey(b"s" * 32, "job-a")


@dataclass(frozen=True)
class Listening:
    """What an attack needs to know: where to connect, what an honest peer asks, and what was refused."""

    port: int
    role: wire.Role
    question: wire.Message
    counters: Counters


@asynccontextmanager
async def controller() -> AsyncIterator[Listening]:
    callbacks = wire.ServerCallbacks(
        message=lambda connection, message: connection.send(wire.Welcome(1)),
        opened=lambda connection: None,
        closed=lambda connection, reason: None,
    )
    one = await wire.serve("127.0.0.1", 0, KEY, callbacks)
    yield Listening(one.port, "agent", wire.Hello("agent", "n", 0, 1), one.counters)
    await one.close()


@asynccontextmanager
async def viewers() -> AsyncIterator[Listening]:
    callbacks = wire.ServerCallbacks(
        message=lambda connection, message: connection.send(wire.Followed(1.0)),
        opened=lambda connection: None,
        closed=lambda connection, reason: None,
    )
    one = await wire.serve("127.0.0.1", 0, KEY, callbacks)
    yield Listening(one.port, "viewer", wire.Follow(), one.counters)
    await one.close()


@asynccontextmanager
async def elections() -> AsyncIterator[Listening]:
    one = Elections(
        wire.Seat(1, "node-0", 100, "127.0.0.1", 0),
        tls=(None, None),
        member_is_connected=lambda: True,
        changed=lambda: None,
        led=lambda: None,
    )
    seat = await one.open(KEY)
    assert one._server is not None
    yield Listening(seat.port, "elector", wire.Where(), one._server.counters)
    await one.close()


@asynccontextmanager
async def checks() -> AsyncIterator[Listening]:
    one = await wire.serve("127.0.0.1", 0, KEY, CheckHost(2).callbacks, roles=wire.TO_CHECK)
    yield Listening(one.port, "checker", Arrived("node-0", 1, 3), one.counters)
    await one.close()


def _nothing_here(*_: object) -> Any:
    raise CheckpointError("there is nothing here")


@asynccontextmanager
async def agents(
    one: blocking.BlockingServer, role: wire.Role, question: wire.Message
) -> AsyncIterator[Listening]:
    one.listen(["127.0.0.1"])
    yield Listening(one.endpoints[0].port, role, question, one.counters)
    one.close()


USERS: dict[str, Callable[[], AbstractAsyncContextManager[Listening]]] = {
    "controller": controller,
    "viewers": viewers,
    "elections": elections,
    "checks": checks,
    "states": lambda: agents(state_server(KEY, _nothing_here), "peer", Want(0, 1)),
    "probes": lambda: agents(echo_server(KEY), "prober", Ping(0)),
}


class Peer:
    """A client that may misbehave: it sends any bytes, at any time."""

    def __init__(self, there: Listening, key: wire.RunKey = KEY) -> None:
        self._there, self._key = there, key
        self.sent = b""

    async def __aenter__(self) -> Peer:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._there.port)
        ends = wire.Ends.of(self._writer.get_extra_info("socket"))
        self.channel = wire.ClientChannel(self._key, self._there.role, ends)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def send(self, data: bytes) -> None:
        self.sent += data
        with suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def receive(self) -> bytes:
        """What comes next; nothing once the other end has closed."""
        with suppress(ConnectionError):
            return await asyncio.wait_for(self._reader.read(HANDSHAKE_LIMIT), 60)
        return b""

    async def prove(self) -> None:
        await self.send(self.channel.open())
        while not self.channel.established:
            _, answer = self.channel.receive(await self.receive())
            await self.send(answer)

    async def ask(self) -> list[wire.Message]:
        await self.send(self.channel.send(self._there.question))
        return self.channel.receive(await self.receive())[0]

    async def is_shut_out(self) -> None:
        """The other end closes, and what it says before that is no message of a connection."""
        said = b""
        while data := await self.receive():
            said += data
        if said:
            with pytest.raises(wire.Violation):
                self.channel.receive(said)


async def wrong_secret(there: Listening) -> None:
    async with Peer(there, wire.RunKey(b"x" * 32, "job-a")) as thief:
        await thief.send(thief.channel.open())
        with pytest.raises(wire.Unproven):
            thief.channel.receive(await thief.receive())
        await thief.send(frame(channel.encode(Proof(thief.channel._code(b"client proof")))))  # type: ignore[arg-type]
        await thief.is_shut_out()


async def wrong_run(there: Listening) -> None:
    async with Peer(there, wire.RunKey(KEY.secret, "job-b")) as stranger:
        await stranger.send(stranger.channel.open())
        await stranger.send(stranger.channel.receive(await stranger.receive())[1])
        await stranger.is_shut_out()
        assert not stranger.channel.established


async def wrong_run_that_insists(there: Listening) -> None:
    async with Peer(there, wire.RunKey(KEY.secret, "job-b")) as stranger:
        await stranger.send(stranger.channel.open())
        stranger.channel.receive(await stranger.receive())
        await stranger.send(frame(channel.encode(Proof(stranger.channel._code(b"client proof")))))  # type: ignore[arg-type]
        await stranger.is_shut_out()


async def replay(there: Listening) -> None:
    async with Peer(there) as honest:
        await honest.prove()
        assert await honest.ask()
    async with Peer(there) as parrot:
        await parrot.send(honest.sent)
        await parrot.is_shut_out()


async def silence(there: Listening) -> None:
    async with Peer(there) as mute:
        await mute.is_shut_out()


async def silence_after_the_opening(there: Listening) -> None:
    async with Peer(there) as mute:
        await mute.send(mute.channel.open())
        await mute.receive()
        await mute.is_shut_out()


async def oversized_before_the_proof(there: Listening) -> None:
    async with Peer(there) as glutton:
        await glutton.send((HANDSHAKE_LIMIT + 1).to_bytes(4, "big"))
        await glutton.is_shut_out()


async def oversized_after_the_proof(there: Listening) -> None:
    async with Peer(there) as glutton:
        await glutton.prove()
        await glutton.send((LIMITS[there.role] + SEAL_BYTES + 1).to_bytes(4, "big"))
        await glutton.is_shut_out()


async def another_protocol(there: Listening) -> None:
    async with Peer(there) as other:
        await other.send(frame(b"GET / HTTP/1.1\r\n\r\n"))
        await other.is_shut_out()


async def leaving(there: Listening) -> None:
    async with Peer(there) as hasty:
        await hasty.send(hasty.channel.open())
        await hasty.receive()


ATTACKS: list[tuple[Callable[[Listening], Any], wire.Reason]] = [
    (wrong_secret, "unauthenticated"),
    (wrong_run, "another-job"),
    (wrong_run_that_insists, "unauthenticated"),
    (replay, "unauthenticated"),
    (silence, "handshake-timeout"),
    (silence_after_the_opening, "handshake-timeout"),
    (oversized_before_the_proof, "oversized"),
    (oversized_after_the_proof, "oversized"),
    (another_protocol, "malformed"),
    (leaving, "unauthenticated"),
]


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(("attack", "reason"), ATTACKS, ids=[one.__name__ for one, _ in ATTACKS])
def test_refused(
    user: str, attack: Callable[[Listening], Any], reason: wire.Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "handshake-timeout":
        monkeypatch.setattr(blocking, "HANDSHAKE_S", 0.2)
        monkeypatch.setattr(server, "ServerLimits", partial(server.ServerLimits, handshake_s=0.2))
    if attack is replay:  # only the nonce tells the two connections apart
        for module in (channel, server):
            monkeypatch.setattr(module, "end_name", lambda _: "127.0.0.1:1")

    async def play() -> None:
        async with USERS[user]() as there:
            await attack(there)
            while not sum(there.counters.refused.values()):
                await asyncio.sleep(0.005)
            assert {why: count for why, count in there.counters.refused.items() if count} == {reason: 1}
            async with Peer(there) as honest:
                await honest.prove()
                assert len(await honest.ask()) == 1

    asyncio.run(play())
