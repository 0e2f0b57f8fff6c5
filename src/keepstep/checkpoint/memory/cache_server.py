"""Hands the descriptors of a node's cache to workers and agent, over a Unix socket, and asks for them.

Only processes of the cache's own user are answered.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from typing import Annotated, NamedTuple

import msgspec

from keepstep.checkpoint.header import MOST_BYTES
from keepstep.checkpoint.memory.cache import Cache
from keepstep.checkpoint.memory.slot import MOST_OWNERS, MOST_RANKS, SLOTS_PER_RANK
from keepstep.core.errors import CheckpointError

ADDRESS = "KEEPSTEP_CACHE"  # environment of the workers: name of the socket
NO_CACHE = "KEEPSTEP_NO_CACHE"  # environment of the workers where no cache could be made: why
_MOST_MESSAGE_BYTES = 4096
_MOST_CONNECTIONS = 4096
_PATIENCE_S = 30.0

_Owner = Annotated[int, msgspec.Meta(ge=0, lt=MOST_OWNERS)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=SLOTS_PER_RANK)]


class Open(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The slots of a rank as they are."""

    rank: _Owner


class Reserve(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Give the rank ``slots`` slots of at least ``nbytes`` each; those in ``keep`` stay as they are, whatever size."""

    rank: _Owner
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MOST_BYTES)]
    slots: Annotated[int, msgspec.Meta(ge=1, le=SLOTS_PER_RANK)]
    keep: Annotated[tuple[_Index, ...], msgspec.Meta(max_length=SLOTS_PER_RANK)] = ()


class GiveUp(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Take back the slots of a rank of another node; nobody reads or writes them."""

    rank: Annotated[int, msgspec.Meta(ge=MOST_RANKS, lt=MOST_OWNERS)]


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Comes with the descriptors of the board and of the rank's slots, in this order. Bytes, of the whole node.

    ``backed``: the rank has the slots more that backups take.
    """

    used_bytes: int
    limit_bytes: int
    backed: bool = False


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Nothing was changed; the reason is for the job's operator."""

    reason: str


_requests = msgspec.json.Decoder(Open | Reserve | GiveUp)
_answers = msgspec.json.Decoder(Granted | Refused)


class CacheServer:
    """Hands out a cache's descriptors; lives on the launcher's event loop."""

    def __init__(self, cache: Cache) -> None:
        self.address = f"keepstep-cache-{secrets.token_hex(16)}"
        self._cache = cache
        self._connections: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(128)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stop serving; the cache is the owner's to close."""
        for connection in (*self._connections, self._listener):
            self._loop.remove_reader(connection)
            connection.close()
        self._connections.clear()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._connections) >= _MOST_CONNECTIONS or peer_uid(connection) != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        self._loop.add_reader(connection, self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_MOST_MESSAGE_BYTES)
            if data:
                answer, descriptors = self._answer(data)
                socket.send_fds(connection, [msgspec.json.encode(answer)], descriptors)
                return
        except OSError:
            pass
        self._loop.remove_reader(connection)
        self._connections.discard(connection)
        connection.close()

    def _answer(self, data: bytes) -> tuple[Granted | Refused, list[int]]:
        try:
            request = _requests.decode(data)
            if isinstance(request, Reserve):
                self._cache.reserve(request.rank, request.nbytes, request.slots, request.keep)
            elif isinstance(request, GiveUp):
                self._cache.give_up(request.rank)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return Refused(f"not a request to the cache: {error}"), []
        except CheckpointError as error:
            return Refused(str(error)), []
        granted = Granted(self._cache.used_bytes, self._cache.limit_bytes, self._cache.backed(request.rank))
        return granted, [self._cache.board, *self._cache.slots(request.rank)]


class Answer(NamedTuple):
    """What a client got: descriptors, which it closes, and the node's figures."""

    board: int
    slots: list[int]
    used_bytes: int
    limit_bytes: int
    backed: bool

    def close(self) -> None:
        """Close all of it."""
        for descriptor in (self.board, *self.slots):
            os.close(descriptor)


def ask(address: str, request: Open | Reserve | GiveUp) -> Answer:
    """Ask the cache at ``address`` (the value of `ADDRESS`).

    Raises:
        CheckpointError: it refused, is not there, or is not of this user.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            connection.connect(f"\0{address}")
            if peer_uid(connection) != os.getuid():
                raise CheckpointError(f"the cache {address} belongs to another user")
            connection.send(msgspec.json.encode(request))
            data, descriptors, _, _ = socket.recv_fds(connection, _MOST_MESSAGE_BYTES, 1 + SLOTS_PER_RANK)
        except OSError as error:
            raise CheckpointError(
                f"the cache of this node does not answer ({error}): is `keepstep run` still there?"
            ) from None
    try:
        answer = _answers.decode(data)
        if isinstance(answer, Refused):
            raise CheckpointError(answer.reason)
        if not descriptors:
            raise CheckpointError("the cache of this node sent no descriptors")
    except (CheckpointError, msgspec.MsgspecError) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise CheckpointError(str(error)) from None
    return Answer(descriptors[0], list(descriptors[1:]), answer.used_bytes, answer.limit_bytes, answer.backed)


def peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", raw)[1]
