"""Hostile bytes on the sockets between agents: refused; the server goes on; no memory for what is merely claimed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.effort import many
from tests.unit.checkpoint.conftest import Served, serving
from tests.unit.checkpoint.memory.test_transfer import KEY, RUN, fetch, giving, room_in
from tests.unit.checkpoint.sealed_slots import seal_state, stands

from keepstep.checkpoint.memory.slot import backup_of
from keepstep.checkpoint.peers.fetch import Fetch
from keepstep.core.errors import CheckpointError
from keepstep.core.summary import Endpoint
from keepstep.wire.blocking import BlockingServer
from keepstep.wire.channel import ClientChannel, Ends, ServerChannel, encode
from keepstep.wire.transfer import Following, Have, Lacks, Piece, SendHeader, SendRange, Want

pytestmark = pytest.mark.xdist_group("transfer_fuzz")  # its servers are started once
STATE = {"w": torch.arange(2000, dtype=torch.float32)}
COUNT = st.integers(0, 1 << 56)
FUZZ = settings(
    max_examples=many(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

asked = st.one_of(
    st.builds(Want, st.integers(0, (1 << 20) - 1), st.integers(1, (1 << 62) - 1)),
    st.just(Want(0, KEY.pack())),
    st.just(SendHeader()),
    st.builds(SendRange, COUNT, st.integers(1, 64 << 20)),
    st.builds(SendRange, st.integers(0, 8000), st.integers(1, 8000)),
)
answered = st.one_of(
    st.builds(Have, COUNT, COUNT, COUNT, COUNT, COUNT, st.integers(-1, (1 << 64) - 1)),
    st.builds(
        Have, st.just(7), st.just(0), st.integers(0, 1 << 20), st.integers(0, 1 << 40), COUNT, st.just(5)
    ),
    st.builds(
        Have,
        st.just(7),
        st.just(0),
        st.integers(0, 9000),
        st.integers(0, 9000),
        st.integers(0, 9),
        st.just(5),
    ),
    st.builds(Lacks, st.text(max_size=100)),
    st.builds(Piece, st.binary(min_size=1, max_size=20_000)),
    st.builds(Following, COUNT, st.integers(1, 64 << 20)),
    st.just(Following(0, 8000)),
)


@pytest.fixture(scope="module")
def server() -> Iterator[BlockingServer]:
    with serving() as served:
        seal_state(served.address, 0, STATE, KEY)
        with giving(served.address) as made:
            yield made


def dialled(server: BlockingServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.endpoints[0].port))
    connection.settimeout(10)
    return connection


def drained(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
    except OSError:
        pass


def still_serves(server: BlockingServer) -> None:
    with serving() as other:
        fetch(server, other)
        assert KEY in stands(other.address, backup_of(0))


@FUZZ
@given(st.binary(max_size=2000))
def test_bytes_without_a_proof(server: BlockingServer, data: bytes) -> None:
    with dialled(server) as connection:
        connection.sendall(data)
        drained(connection)


@FUZZ
@given(st.lists(st.one_of(asked, st.binary(min_size=1, max_size=300)), max_size=8))
def test_a_peer_with_the_secret_that_asks_anything(server: BlockingServer, messages: list[object]) -> None:
    with dialled(server) as connection:
        host, port = connection.getsockname()
        channel = ClientChannel(RUN, "peer", Ends(f"{host}:{port}", f"127.0.0.1:{server.endpoints[0].port}"))
        connection.sendall(channel.open())
        while not channel.established:
            _, answer = channel.receive(connection.recv(4096))
            connection.sendall(answer)
        try:
            for message in messages:
                body = message if isinstance(message, bytes) else encode(message)  # type: ignore[arg-type]
                connection.sendall(channel.send_encoded(body))
        except OSError:
            pass
        drained(connection)


def test_afterwards_it_serves(server: BlockingServer) -> None:
    still_serves(server)
    for role in ("agent", "launcher", "client"):
        with dialled(server) as connection:
            host, port = connection.getsockname()
            ends = Ends(f"{host}:{port}", f"127.0.0.1:{server.endpoints[0].port}")
            connection.sendall(ClientChannel(RUN, role, ends).open())  # type: ignore[arg-type]
            assert b"unknown role" in connection.recv(4096)


@contextmanager
def lying(answers: list[object]) -> Iterator[tuple[Endpoint, ...]]:
    """A server with the secret that answers whatever is asked with these, over and over, then bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def guest(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5)
            ends = [f"{host}:{port}" for host, port in (connection.getsockname(), connection.getpeername())]
            channel = ServerChannel(RUN, Ends(*ends), roles={"peer"})
            try:
                while not channel.established:
                    _, answer = channel.receive(connection.recv(4096))
                    connection.sendall(answer)
                for message in answers:
                    body = message if isinstance(message, bytes) else encode(message)  # type: ignore[arg-type]
                    connection.sendall(channel.send_encoded(body))
                connection.sendall(bytes(10_000))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
            except OSError:
                pass

    def run() -> None:
        while not done.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=guest, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield (Endpoint("127.0.0.1", listener.getsockname()[1]),)
    finally:
        done.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with serving(limit_bytes=8 << 20) as made:
        yield made


@FUZZ
@given(st.lists(st.one_of(answered, st.binary(min_size=1, max_size=300)), min_size=1, max_size=6))
def test_a_node_with_the_secret_that_answers_anything(small: Served, answers: list[object]) -> None:
    with lying(answers) as endpoints, room_in(small.address) as room:
        one = Fetch(KEY, 0, lambda: endpoints, RUN, patience_s=0.0)
        with pytest.raises(CheckpointError):
            one.run(room)
    assert small.cache.used_bytes <= 8 << 20
    assert stands(small.address, backup_of(0)) == {}
