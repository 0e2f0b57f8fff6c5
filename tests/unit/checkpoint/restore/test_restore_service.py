"""The service: what can be had, from the cheapest source that gives it, whoever asks and however often."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from keepstep.checkpoint.memory.cached_states import CachedStates
from keepstep.checkpoint.memory.incoming import Incoming, Room
from keepstep.checkpoint.memory.slots import Key, Record
from keepstep.checkpoint.restore import restore_service as module
from keepstep.checkpoint.restore.restore_service import (
    Bring,
    Denied,
    Offered,
    RestoreClient,
    RestoreServer,
    RestoreService,
    restore_address,
)
from keepstep.core import local_socket
from keepstep.core.errors import CheckpointError

OLD, NEW = Key(0, 5), Key(1, 9)


class Source:
    """Has some keys; what is in ``broken`` it does not give."""

    def __init__(self, where: str, *keys: Key, broken: tuple[Key, ...] = ()) -> None:
        self.where, self._keys, self.broken = where, frozenset(keys), broken
        self.brought: list[tuple[Key, int]] = []

    def keys(self, rank: int) -> frozenset[Key]:
        return self._keys

    def bring(self, key: Key, rank: int, room: Room) -> str:
        if key not in self._keys:
            raise CheckpointError(f"step {key.step} is not there")
        if key in self.broken:
            raise OSError(5, "broken")
        self.brought.append((key, rank))
        return self.where


class Node:
    """A service without a cache behind it."""

    def __init__(self, *sources: Source) -> None:
        self.sources = sources
        self.service = RestoreService([0, 1], sources, cast("CachedStates", self))

    def held(self, rank: int) -> frozenset[Key]:
        return frozenset(key for source in self.sources for key, to in source.brought if to == rank)

    @contextmanager
    def filling(self, rank: int, slots: int, record: Record) -> Iterator[Incoming]:
        pytest.fail("nobody asks")
        yield


@pytest.fixture
def address() -> str:
    return restore_address(f"keepstep-test-{os.getpid()}-{secrets.token_hex(4)}")


@pytest.fixture
def served(address: str) -> Iterator[Node]:
    node = Node(Source("the backup on node-b", NEW, broken=(NEW,)), Source("storage /ckpt", OLD, NEW))
    server = RestoreServer(address, node.service)
    server.start()
    yield node
    server.stop()


def test_sources_are_offered_the_cheapest_first(served: Node, address: str) -> None:
    offered = RestoreClient(address).offers(1)
    assert [(source.where, source.keys) for source in offered.sources] == [
        ("the backup on node-b", (NEW.pack(),)),
        ("storage /ckpt", (NEW.pack(), OLD.pack())),
    ]
    assert offered.keys == {OLD, NEW}
    assert offered.incarnation == 1


def test_the_next_source_serves_when_one_cannot_and_that_is_told(served: Node, address: str) -> None:
    brought = RestoreClient(address).bring(0, NEW, 2)
    assert brought.where == "storage /ckpt"
    assert brought.passed == ("the backup on node-b: OSError [Errno 5] broken",)


def test_what_was_brought_already_is_not_brought_again(served: Node, address: str) -> None:
    threads = [threading.Thread(target=RestoreClient(address).bring, args=(0, OLD, 2)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served.sources[1].brought == [(OLD, 0)]
    RestoreClient(address).bring(1, OLD, 2)
    assert served.sources[1].brought == [(OLD, 0), (OLD, 1)]


def test_what_nobody_has_is_denied_with_every_reason(served: Node, address: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        RestoreClient(address).bring(0, Key(3, 1), 2)
    assert str(caught.value) == (
        "the backup on node-b: step 1 is not there; storage /ckpt: step 1 is not there"
    )


def test_ranks_of_other_nodes_are_turned_away(served: Node, address: str) -> None:
    with pytest.raises(CheckpointError, match="rank 7 does not run on this node"):
        RestoreClient(address).offers(7)


def test_a_source_that_fails_is_a_trouble_and_no_empty_source() -> None:
    source = Source("storage s3://bucket", OLD)
    source.keys = lambda rank: (_ for _ in ()).throw(OSError(110, "timed out"))  # type: ignore[method-assign]
    node = Node(source)
    answer = module._answers.decode(node.service.answer(b'{"type":"Offers","rank":0}'))
    assert isinstance(answer, Offered)
    assert answer.sources == ()
    assert answer.troubles == ("storage s3://bucket: TimeoutError [Errno 110] timed out",)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\xff", b"[" * 5000, b'{"type":"Bring","rank":0,"key":0,"slots":1}',
     b'{"type":"Bring","rank":0,"key":1,"slots":99}', b'{"type":"Offers","rank":0,"more":1}'],
)  # fmt: skip
def test_other_bytes_are_denied(data: bytes) -> None:
    assert isinstance(module._answers.decode(Node().service.answer(data)), Denied)


def test_a_new_agent_takes_the_place_of_the_old_one(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BIND_AGAIN_S", 0.01)
    first, second = (RestoreServer(address, Node(Source(name, OLD)).service) for name in ("first", "second"))
    first.start()
    assert RestoreClient(address).offers(0).sources[0].where == "first"
    second.start()
    first.stop()
    assert RestoreClient(address).offers(0).sources[0].where == "second"
    second.stop()


def test_without_an_agent_that_is_said(address: str) -> None:
    with pytest.raises(CheckpointError, match="the agent of this node does not answer"):
        RestoreClient(address, patience_s=0.0).offers(0)


def test_an_agent_that_dies_over_each_request_is_not_asked_for_ever(address: str) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{address}")
    listener.listen()
    asked: list[bytes] = []

    def agent() -> None:
        for _ in range(3):
            connection, _ = listener.accept()
            asked.append(connection.recv(1000))
            connection.close()

    thread = threading.Thread(target=agent)
    thread.start()
    with pytest.raises(CheckpointError, match=r"does not answer .it ended"):
        RestoreClient(address).bring(0, OLD, 2)
    thread.join()
    listener.close()
    assert len(asked) == 3
    assert module._requests.decode(asked[0]) == Bring(0, OLD.pack(), 2)


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense",
        b'{"type":"Brought","where":""}',
        b'{"type":"Offered","sources":[["x",[0]]],"incarnation":0}',
    ],
)
def test_an_answer_that_cannot_be_read_is_an_error(address: str, data: bytes) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{address}")
    listener.listen()

    def agent() -> None:
        connection, _ = listener.accept()
        connection.recv(1000)
        connection.send(data)
        connection.close()

    thread = threading.Thread(target=agent)
    thread.start()
    with pytest.raises(CheckpointError, match="answer"):
        RestoreClient(address).offers(0)
    thread.join()
    listener.close()


def test_a_service_of_another_user_is_not_asked(
    served: Node, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "_peer", lambda connection: (1, os.getuid() + 1))
    with pytest.raises(CheckpointError, match="belongs to another user"):
        RestoreClient(address).offers(0)
