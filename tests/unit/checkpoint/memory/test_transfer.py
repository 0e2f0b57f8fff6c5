"""A state goes from one node's cache to another's whole or not at all, whatever happens to the connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from tests.certificates import certificates
from tests.unit.checkpoint.conftest import Served, serving
from tests.unit.checkpoint.sealed_slots import seal_state, stands

from keepstep.checkpoint.memory.cache_server import Reserve, ask
from keepstep.checkpoint.memory.cached_states import CachedStates
from keepstep.checkpoint.memory.incoming import Incoming
from keepstep.checkpoint.memory.slot import Board, Slot, backup_of
from keepstep.checkpoint.memory.slots import Key, Record, slot_bytes
from keepstep.checkpoint.peers import fetch as fetching
from keepstep.checkpoint.peers import state_server as states_module
from keepstep.checkpoint.peers.fetch import Cancelled, Fetch
from keepstep.checkpoint.peers.state_server import Rate, state_server
from keepstep.core.errors import CheckpointError
from keepstep.core.summary import Endpoint
from keepstep.wire import blocking
from keepstep.wire.blocking import BlockingConnection, BlockingServer
from keepstep.wire.messages import MOST_NODE_ENDPOINTS
from keepstep.wire.secret import RunKey
from keepstep.wire.tls import client_context, server_context

RUN = RunKey(bytes(range(32)), "job-a")
KEY = Key(0, 7)
STATE = {"w": torch.arange(300_000, dtype=torch.float32), "b": torch.ones(1001, dtype=torch.int8), "step": 7}


@pytest.fixture(autouse=True)
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "RANGE_BYTES", 100_000)


@pytest.fixture
def other() -> Iterator[Served]:
    with serving() as made:
        yield made


@contextmanager
def giving(address: str, **options: object) -> Iterator[BlockingServer]:
    states = CachedStates(address, [0])
    server = state_server(RUN, states.reading, **options)  # type: ignore[arg-type]
    server.listen(["127.0.0.1"])
    try:
        yield server
    finally:
        server.close()
        deadline = time.monotonic() + 10
        while server._proven and time.monotonic() < deadline:
            time.sleep(0.01)
        states.close()


@contextmanager
def room_in(address: str, owner: int = backup_of(0)) -> Iterator[Callable[[Record], Incoming]]:
    with ExitStack() as stack:

        def room(record: Record) -> Incoming:
            answer = ask(address, Reserve(owner, slot_bytes(record), 1))
            board, slot = Board(answer.board), Slot(answer.slots[0], apart=True)
            stack.callback(board.close)
            stack.callback(slot.close)
            return Incoming(slot, board, owner, 0, record)

        yield room


def fetch(server: BlockingServer, other: Served, key: Key = KEY, **options: object) -> Fetch:
    one = Fetch(key, 0, lambda: server.endpoints, RUN, **options)  # type: ignore[arg-type]
    with room_in(other.address) as room:
        one.run(room)
    return one


def test_a_state_stands_on_the_other_node_byte_by_byte(served: Served, other: Served) -> None:
    data = seal_state(served.address, 0, STATE, KEY)
    with giving(served.address) as server:
        assert fetch(server, other).resumed == 0
    assert stands(other.address, backup_of(0)) == {KEY: data}


@pytest.mark.parametrize("state", [{"step": 1}, {"w": torch.zeros(0)}], ids=["plain", "empty tensor"])
def test_a_state_without_bytes(served: Served, other: Served, state: dict[str, object]) -> None:
    seal_state(served.address, 0, state, KEY)
    with giving(served.address) as server:
        fetch(server, other)
    assert stands(other.address, backup_of(0)) == {KEY: b""}


def test_through_tls(served: Served, other: Served, tmp_path: Path) -> None:
    paths = certificates(tmp_path)
    data = seal_state(served.address, 0, STATE, KEY)
    with giving(served.address, tls=server_context(paths)) as server:
        fetch(server, other, tls=client_context(paths))
    assert stands(other.address, backup_of(0)) == {KEY: data}


def test_who_does_not_hold_the_secret_gets_nothing(served: Served, other: Served) -> None:
    seal_state(served.address, 0, STATE, KEY)
    with giving(served.address) as server:
        stranger = Fetch(KEY, 0, lambda: server.endpoints, RunKey(bytes(32), "job-a"), patience_s=0.2)
        with (
            room_in(other.address) as room,
            pytest.raises(CheckpointError, match="does not hold this run's secret"),
        ):
            stranger.run(room)
        fetch(server, other)


def test_what_is_not_there_is_said(served: Served, other: Served) -> None:
    seal_state(served.address, 0, STATE, KEY)
    with giving(served.address) as server, pytest.raises(CheckpointError, match="not in the cache any more"):
        fetch(server, other, Key(0, 8))
    assert other.cache.used_bytes == 0


def test_nothing_is_allocated_beyond_the_limit(served: Served) -> None:
    seal_state(served.address, 0, STATE, KEY)
    with (
        serving(limit_bytes=1 << 20) as small,
        giving(served.address) as server,
        pytest.raises(CheckpointError, match=r"whose limit is 1\.00 MiB"),
    ):
        fetch(server, small)


def test_what_is_damaged_at_the_source_never_counts(served: Served, other: Served) -> None:
    seal_state(served.address, 0, STATE, KEY)
    answer = ask(served.address, Reserve(0, 1, 1))
    slot = Slot(answer.slots[0], apart=True)
    slot.memory[4096 + 5000] ^= 1
    with (
        giving(served.address) as server,
        pytest.raises(CheckpointError, match="1 of 2 storages came damaged"),
    ):
        fetch(server, other)
    assert stands(other.address, backup_of(0)) == {}
    slot.close()
    Board(answer.board).close()


class Cutter:
    """A relay in front of a server that cuts each connection after so many bytes, as long as it is told to."""

    def __init__(self, server: BlockingServer, after: int, times: int) -> None:
        self.server, self.after, self.times = server, after, times
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (Endpoint("127.0.0.1", self._listener.getsockname()[1]),)

    def _run(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self.server.endpoints[0].port))
            threading.Thread(target=self._pump, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, self.after), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, after: int | None) -> None:
        count = 0
        try:
            while data := source.recv(10_000):
                target.sendall(data)
                count += len(data)
                if after is not None and count > after and self.cuts < self.times:
                    self.cuts += 1
                    break
        except OSError:
            pass
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # also for who waits in the other pump
            end.close()


def test_a_connection_that_breaks_costs_only_what_was_under_way(
    served: Served, other: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses are relayed here, which the handshake refuses otherwise."""
    monkeypatch.setattr(blocking, "ServerChannel", _unbound(blocking.ServerChannel))
    data = seal_state(served.address, 0, STATE, KEY)
    sent: list[int] = []
    whole = states_module.send_slot

    def counted(to: BlockingConnection, slot: Slot, offset: int, nbytes: int, rate: Rate) -> None:
        sent.append(nbytes)
        whole(to, slot, offset, nbytes, rate)

    monkeypatch.setattr(states_module, "send_slot", counted)
    with giving(served.address) as server:
        cutter = Cutter(server, 250_000, 4)
        one = Fetch(KEY, 0, lambda: cutter.endpoints, RUN)
        with room_in(other.address) as room:
            one.run(room)
    assert cutter.cuts == 4
    assert one.resumed >= 3
    assert stands(other.address, backup_of(0)) == {KEY: data}
    assert sum(sent) < len(data) + 4 * 3 * fetching.RANGE_BYTES


def _unbound(channel: type) -> Callable[..., object]:
    return lambda *words, **named: channel(*words, check_addresses=False, **named)


def test_it_goes_on_with_a_new_process_of_the_source(served: Served, other: Served) -> None:
    data = seal_state(served.address, 0, STATE, KEY)
    slow = Rate(300_000)
    with ExitStack() as stack:
        servers = [stack.enter_context(giving(served.address, rate=slow))]
        one = Fetch(KEY, 0, lambda: servers[-1].endpoints, RUN)

        def replace() -> None:
            while one._left in (0, len(data)):
                time.sleep(0.01)
            servers.append(stack.enter_context(giving(served.address)))
            servers[0].close()

        replacing = threading.Thread(target=replace)
        replacing.start()
        with room_in(other.address) as room:
            one.run(room)
        replacing.join()
    assert one.resumed >= 1
    assert stands(other.address, backup_of(0)) == {KEY: data}


def test_another_state_under_the_same_name_is_not_mixed_in(served: Served, other: Served) -> None:
    seal_state(served.address, 0, STATE, KEY)
    with serving() as third:
        seal_state(third.address, 0, {**STATE, "b": torch.zeros(1001, dtype=torch.int8)}, KEY)
        with ExitStack() as stack:
            servers = [stack.enter_context(giving(served.address, rate=Rate(300_000)))]
            one = Fetch(KEY, 0, lambda: servers[-1].endpoints, RUN)

            def replace() -> None:
                while one._left in (0, one._record.data_bytes if one._record else 0):
                    time.sleep(0.01)
                servers.append(stack.enter_context(giving(third.address)))
                servers[0].close()

            replacing = threading.Thread(target=replace)
            replacing.start()
            with (
                room_in(other.address) as room,
                pytest.raises(CheckpointError, match="is another one by now"),
            ):
                one.run(room)
            replacing.join()
    assert stands(other.address, backup_of(0)) == {}


def test_a_transfer_that_is_not_wanted_any_more_ends(served: Served, other: Served) -> None:
    seal_state(served.address, 0, STATE, KEY)
    with giving(served.address, rate=Rate(100_000)) as server:
        one = Fetch(KEY, 0, lambda: server.endpoints, RUN)
        threading.Timer(0.3, one.stop).start()
        with room_in(other.address) as room, pytest.raises(Cancelled):
            one.run(room)
    assert stands(other.address, backup_of(0)) == {}


def test_every_address_of_the_source_is_used(
    served: Served, other: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = seal_state(served.address, 0, STATE, KEY)
    used: set[str] = set()
    connect = socket.create_connection

    def noted(address: tuple[str, int], timeout: float) -> socket.socket:
        used.add(address[0])
        return connect(address, timeout)

    monkeypatch.setattr(fetching.socket, "create_connection", noted)
    with giving(
        served.address, rate=Rate(1_000_000)
    ) as server:  # else one may bring all before the next connects
        server.listen(["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"])
        assert len(server.endpoints) == MOST_NODE_ENDPOINTS
        fetch(server, other)
        gone = Endpoint("127.0.0.1", 1)
        one = Fetch(KEY, 0, lambda: (gone, *server.endpoints), RUN)
        with room_in(other.address, backup_of(1)) as room:
            one.run(room)  # an address where nobody answers is passed over
    assert used == {"127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"}
    assert stands(other.address, backup_of(0)) == stands(other.address, backup_of(1)) == {KEY: data}


def test_a_pinned_slot_is_not_written_while_it_is_sent(served: Served) -> None:
    seal_state(served.address, 0, STATE, KEY)
    states = CachedStates(served.address, [0])
    slot = Slot(ask(served.address, Reserve(0, 1, 1)).slots[0], apart=True)
    with states.reading(KEY, 0), states.reading(KEY, 0):
        with states.reading(KEY, 0):
            pass
        assert not slot.lock()
    assert slot.lock()
    slot.close()
    states.close()


def test_the_rate_is_shared() -> None:
    rate = Rate(1000.0)
    assert rate.delay_s(500, 10.0) == 0.0
    assert rate.delay_s(500, 10.0) == pytest.approx(0.5)
    assert rate.delay_s(500, 10.25) == pytest.approx(0.75)
    assert rate.delay_s(500, 100.0) == 0.0
    assert Rate(0).delay_s(1 << 40, 0.0) == 0.0
