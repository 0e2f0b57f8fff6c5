"""Sockets between processes of one user: who is heard, who is turned away, and when an address is free again."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket

import pytest

from keepstep.core import local_socket
from keepstep.core.errors import CheckpointError
from keepstep.core.local_socket import LocalServer, accept, connect, listen


@pytest.fixture
def address() -> str:
    return f"keepstep-test-{secrets.token_hex(8)}"


def test_messages_come_with_the_process_that_sent_them_and_an_end_is_told(address: str) -> None:
    heard: list[tuple[int, bytes]] = []

    def received(connection: socket.socket, process: int, message: bytes) -> None:
        heard.append((process, message))
        if message == b"bad":
            raise OSError

    async def main() -> None:
        server = LocalServer(address, received, 100)
        first, second = (connect(address, "test", 5.0) for _ in range(2))
        first.send(b"a")
        first.close()
        second.send(b"bad")
        assert await asyncio.to_thread(second.recv, 1) == b"", "an error ends the connection"
        while len(heard) < 3:
            await asyncio.sleep(0.01)
        second.close()
        server.close()

    asyncio.run(main())
    pid = os.getpid()
    assert sorted(heard) == [(pid, b""), (pid, b"a"), (pid, b"bad")]


def test_more_connections_than_allowed_are_closed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_socket, "_MOST_CONNECTIONS", 1)

    async def main() -> None:
        server = LocalServer(address, lambda *_: None, 100)
        first, second = (connect(address, "test", 5.0) for _ in range(2))
        assert await asyncio.to_thread(second.recv, 1) == b""
        server.close()
        assert await asyncio.to_thread(first.recv, 1) == b""
        for one in (first, second):
            one.close()

    asyncio.run(main())


def test_an_address_is_taken_until_its_listener_ends(address: str) -> None:
    listener = listen(address)
    with pytest.raises(OSError, match="in use"):
        listen(address)
    listener.close()
    listen(address).close()


def test_another_user_is_turned_away_on_both_sides(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = listen(address)
    client = connect(address, "cache", 5.0)
    monkeypatch.setattr(local_socket, "_peer", lambda connection: (1, os.getuid() + 1))
    assert accept(listener) is None
    assert client.recv(1) == b""
    with pytest.raises(CheckpointError, match=f"the cache {address} belongs to another user"):
        connect(address, "cache", 5.0)
    for one in (client, listener):
        one.close()
