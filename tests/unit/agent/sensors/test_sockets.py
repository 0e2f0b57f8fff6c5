from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest

from keepstep.agent.sensors.processes import identify
from keepstep.agent.sensors.sockets import SocketSensor, connections


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection from 127.0.0.1 to 127.0.0.2: two addresses, one host."""
    try:
        next(connections(), None)
    except OSError as error:
        pytest.skip(f"this kernel tells nothing of its sockets: {error}")
    with socket.create_server(("127.0.0.2", 0)) as listener:
        one = socket.create_connection(listener.getsockname(), source_address=("127.0.0.1", 0))
        other, _ = listener.accept()
        with one, other:
            yield one, other


def send(one: socket.socket, other: socket.socket, count: int) -> None:
    for _ in range(count):
        one.sendall(b"x" * 65536)
        left = 65536
        while left:
            left -= len(other.recv(left))


def test_bytes_are_counted_before_and_after_a_moment(pair: tuple[socket.socket, socket.socket]) -> None:
    me = identify(os.getpid())
    assert me is not None
    sensor = SocketSensor()
    sensor.look(1.0, [me])
    send(*pair, 2)
    sensor.look(2.0, [me])
    send(*pair, 1)
    sensor.look(3.0, [me])  # the onset is within this look: it counts for neither
    send(*pair, 3)
    deadline = time.monotonic() + 10
    sensor.look(4.0, [me])
    while True:
        (there,) = [one for one in sensor.traffic(2.5, "n0") if one.source == "127.0.0.1"]
        if there.after_bytes >= 3 * 65536 or time.monotonic() > deadline:
            break
        sensor.look(5.0, [me])  # an acknowledgement may be late
    assert (there.node, there.target) == ("n0", "127.0.0.2")
    assert there.before_bytes == 2 * 65536
    assert there.after_bytes == 3 * 65536
    assert there.before_s == 1.0


def test_the_busiest_paths_and_every_own_address_are_told(pair: tuple[socket.socket, socket.socket]) -> None:
    me = identify(os.getpid())
    assert me is not None
    sensor = SocketSensor()
    for now_s in (1.0, 2.0):
        sensor.look(now_s, [me])
    sources = {one.source for one in sensor.traffic(0.0, "n0", most=0)}
    assert sources == {one.source for one in sensor.traffic(0.0, "n0")} >= {"127.0.0.1", "127.0.0.2"}


def test_connections_of_others_do_not_count(pair: tuple[socket.socket, socket.socket]) -> None:
    sensor = SocketSensor()
    sensor.look(1.0, [])
    send(*pair, 2)
    sensor.look(2.0, [])
    assert sensor.traffic(0.0, "n0") == ()


def test_a_connection_made_between_looks_counts_from_the_next(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    me = identify(os.getpid())
    assert me is not None
    sensor = SocketSensor()
    sensor.look(1.0, [])
    send(*pair, 2)
    sensor = SocketSensor()
    sensor.look(1.0, [me])
    sensor.look(2.0, [me])
    assert sum(one.after_bytes for one in sensor.traffic(0.0, "n0")) == 0


def test_what_lies_unread_at_two_looks_is_told(pair: tuple[socket.socket, socket.socket]) -> None:
    me = identify(os.getpid())
    assert me is not None
    sensor = SocketSensor()
    one, other = pair
    one.sendall(b"x" * 1000)
    sensor.look(1.0, [me])
    assert sensor.unread_bytes(me.pid) == 0
    one.sendall(b"x" * 500)
    sensor.look(2.0, [me])
    assert sensor.unread_bytes(me.pid) == 1000
    assert sensor.addresses() == ({"127.0.0.1", "127.0.0.2"}, {"127.0.0.1", "127.0.0.2"})
    other.recv(2000)
    sensor.look(3.0, [me])
    assert sensor.unread_bytes(me.pid) == 0


def test_a_kernel_that_tells_nothing_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(**_: object) -> Iterator[object]:
        asked.append(1)
        raise OSError("Protocol not supported")
        yield

    monkeypatch.setattr("keepstep.agent.sensors.sockets.connections", refuse)
    sensor = SocketSensor()
    sensor.look(1.0, [])
    sensor.look(2.0, [])
    assert len(asked) == 1
    assert sensor.traffic(0.0, "n0") == ()


def test_a_dear_sample_is_followed_by_a_pause_of_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    sensor, spent_s = SocketSensor(), iter([0.0, 0.001, 0.001, 0.011, 0.011, 1.011])
    monkeypatch.setattr("keepstep.agent.sensors.sockets.time.thread_time", lambda: next(spent_s))
    due: list[bool] = []
    for now_s, later_s in ((10.0, 0.25), (20.0, 1.5), (30.0, 2.9)):
        sensor.look(now_s, ())
        due += [sensor.is_due(now_s + later_s), sensor.is_due(now_s + 3.1)]
    assert due == [True, True, False, True, False, True]
