"""Which connections are shut: those that appeared while a group was made, and no others."""

from __future__ import annotations

import os
import resource
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from keepstep.worker.group_connections import GroupSockets

PATIENCE_S = 60


def listening(stack: ExitStack) -> socket.socket:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    listener.settimeout(PATIENCE_S)
    return listener


class Connections:
    """Pairs over a listening socket of their own."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.listener = listening(stack)

    def make(self) -> tuple[socket.socket, socket.socket]:
        ours = self.stack.enter_context(socket.create_connection(self.listener.getsockname()))
        theirs = self.stack.enter_context(self.listener.accept()[0])
        ours.settimeout(PATIENCE_S)
        theirs.settimeout(PATIENCE_S)
        return ours, theirs


@pytest.fixture
def connections() -> Iterator[Connections]:
    with ExitStack() as stack:
        yield Connections(stack)


def is_open(pair: tuple[socket.socket, socket.socket]) -> bool:
    """Nothing was sent: who can read is at the end."""
    return not select.select(pair, (), (), 0)[0]


def test_only_what_appeared_meanwhile_is_shut(connections: Connections) -> None:
    sockets = GroupSockets()
    before = connections.make()
    with sockets.making():
        group = connections.make()
        with sockets.making():
            inner = connections.make()
    after = connections.make()
    sockets.shut()
    assert [is_open(pair) for pair in (before, group, inner, after)] == [True, False, False, True]
    sockets.shut()


def test_a_listening_socket_and_pipes_stay(connections: Connections) -> None:
    sockets = GroupSockets()
    with sockets.making(), ExitStack() as stack:
        listener = listening(stack)
        left, right = socket.socketpair()
        stack.enter_context(left)
        stack.enter_context(right)
        sockets.shut()
        assert is_open((left, right))
        with socket.create_connection(listener.getsockname()):
            listener.accept()[0].close()


def test_whoever_is_blocked_in_making_a_group_is_freed(connections: Connections) -> None:
    sockets, heard, ready = GroupSockets(), list[bytes](), threading.Event()

    def block() -> None:
        with sockets.making():
            pair = connections.make()
            ready.set()
            heard.append(pair[0].recv(1))

    thread = threading.Thread(target=block, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    sockets.shut()
    thread.join(PATIENCE_S)
    assert heard == [b""]


def test_a_descriptor_that_another_has_by_now_stays_open(connections: Connections) -> None:
    sockets = GroupSockets()
    with sockets.making():
        group = connections.make()
    number = group[0].fileno()
    other = connections.make()
    os.dup2(other[0].fileno(), number)  # closes the group's
    sockets.shut()
    assert group[1].recv(1) == b""
    assert is_open(other)


def test_no_write_fails_until_all_have_left(connections: Connections) -> None:
    sockets = GroupSockets()
    with sockets.making():
        ours, theirs = connections.make()
    theirs.sendall(b"unread")
    sockets.shut()
    sockets.shut()
    ours.close()
    for _ in range(3):  # a reset would be heard by the second
        theirs.sendall(b"more")
    sockets.let_go()
    with pytest.raises((ConnectionResetError, BrokenPipeError)):  # noqa: PT012
        for _ in range(3):
            theirs.sendall(b"more")


def test_with_few_descriptors_left_all_are_shut_and_not_all_are_kept(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    sockets = GroupSockets()
    with sockets.making():
        pairs = [connections.make() for _ in range(4)]
    before = set(os.listdir("/proc/self/fd"))
    sockets.shut()
    assert not any(map(is_open, pairs))
    assert len(set(os.listdir("/proc/self/fd")) - before) == 8 // 4
    sockets.let_go()
    assert set(os.listdir("/proc/self/fd")) == before
