"""Both ends of the socket on which a node's launcher gives its workers and agent the descriptors of its cache."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec

from keepstep.checkpoint.header import MOST_BYTES
from keepstep.checkpoint.memory.cache import Cache
from keepstep.checkpoint.memory.slot import MOST_OWNERS, MOST_RANKS, SLOTS_PER_RANK
from keepstep.core.errors import CheckpointError
from keepstep.core.local_socket import LocalServer, connect

ADDRESS = "KEEPSTEP_CACHE"
"""Environment variable of the workers with the address of the cache."""

NO_CACHE = "KEEPSTEP_NO_CACHE"
"""Environment variable of the workers that says why there is no cache, where none could be made."""

STORAGE_TROUBLE = "storage"
"""What a `Claim` is about that says what keeps steps from storage."""

PUT_OFF = "put off"
"""What a `Claim` is about that a rank makes when a step that the script asked for has to be left to a later save."""

_MOST_MESSAGE_BYTES = 4096
_PATIENCE_S = 30.0
_MOST_CLAIMED = 1000
_MOST_LINE = 1000

_Owner = Annotated[int, msgspec.Meta(ge=0, lt=MOST_OWNERS)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=SLOTS_PER_RANK)]


class Open(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Asks for the slots of a rank as they are."""

    rank: _Owner


class Reserve(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Asks for ``slots`` slots of at least ``nbytes`` each for a rank; those in ``keep`` stay, whatever their size."""

    rank: _Owner
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MOST_BYTES)]
    slots: Annotated[int, msgspec.Meta(ge=1, le=SLOTS_PER_RANK)]
    keep: Annotated[tuple[_Index, ...], msgspec.Meta(max_length=SLOTS_PER_RANK)] = ()


class GiveUp(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Gives back the slots with the backups of another node's rank, which nobody reads or writes any more."""

    rank: Annotated[int, msgspec.Meta(ge=MOST_RANKS, lt=MOST_OWNERS)]


class Claim(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Asks whether this is the first to say something about ``topic`` in this job, so that it is said once.

    ``line``: what the launcher is to say then; "": the asker says it itself.
    """

    topic: Annotated[str, msgspec.Meta(max_length=100)]
    line: Annotated[str, msgspec.Meta(max_length=_MOST_LINE)] = ""


class Claimed(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Claim`."""

    first: bool


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Answer that comes with the descriptors of the board and of the rank's slots, in this order.

    Attributes:
        limit_bytes: the most that all slots of the node may take together.
        backed: whether the rank has the additional slots that backups need.
    """

    limit_bytes: int
    backed: bool = False


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Answer to a request that changed nothing; the reason is for the job's operator."""

    reason: str


_requests = msgspec.json.Decoder(Open | Reserve | GiveUp | Claim)
_answers = msgspec.json.Decoder(Granted | Refused)
_claimed = msgspec.json.Decoder(Claimed)


class CacheServer(LocalServer):
    """Hands out a cache's descriptors; lives on the launcher's event loop. Closing it leaves the cache open."""

    def __init__(self, cache: Cache, say: Callable[[str], object] = lambda _: None) -> None:
        """``say``: says a line to the job's user."""
        super().__init__(f"keepstep-cache-{secrets.token_hex(16)}", self._serve, _MOST_MESSAGE_BYTES)
        self._cache = cache
        self._say = say
        self._claimed: set[str] = set()

    def claimed(self, topic: str) -> bool:
        """Whether something was said about ``topic``."""
        return topic in self._claimed

    def claim(self, topic: str, line: str = "") -> bool:
        """Whether nobody has claimed ``topic`` before; then ``line`` is said, if it is not empty."""
        if topic in self._claimed or len(self._claimed) >= _MOST_CLAIMED:
            return False
        self._claimed.add(topic)
        if line:
            self._say(line)
        return True

    def _serve(self, connection: socket.socket, _process: int, data: bytes) -> None:
        if data:
            answer, descriptors = self._answer(data)
            socket.send_fds(connection, [msgspec.json.encode(answer)], descriptors)

    def _answer(self, data: bytes) -> tuple[Granted | Refused | Claimed, list[int]]:
        try:
            request = _requests.decode(data)
            if isinstance(request, Claim):
                return Claimed(self.claim(request.topic, request.line)), []
            if isinstance(request, Reserve):
                self._cache.reserve(request.rank, request.nbytes, request.slots, request.keep)
            elif isinstance(request, GiveUp):
                self._cache.give_up(request.rank)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return Refused(f"not a request to the cache: {error}"), []
        except CheckpointError as error:
            return Refused(str(error)), []
        granted = Granted(self._cache.limit_bytes, self._cache.backed(request.rank))
        return granted, [self._cache.board, *self._cache.slots(request.rank)]


class Answer(NamedTuple):
    """What `ask` returns: descriptors, which the caller closes, and the figures of `Granted`."""

    board: int
    slots: list[int]
    limit_bytes: int
    backed: bool

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in (self.board, *self.slots):
            os.close(descriptor)


def ask(address: str, request: Open | Reserve | GiveUp) -> Answer:
    """Ask the cache at ``address``. CheckpointError: it refuses, is not there, or is not of this user."""
    try:
        with connect(address, "cache", _PATIENCE_S) as connection:
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
    return Answer(descriptors[0], list(descriptors[1:]), answer.limit_bytes, answer.backed)


def claim(address: str, topic: str, line: str = "") -> bool:
    """Whether nobody of this node has claimed ``topic`` in this job; True where the cache does not answer.

    ``line``: what the launcher says if so, cut where it is too long; "": nothing.
    """
    try:
        with connect(address, "cache", _PATIENCE_S) as connection:
            connection.send(msgspec.json.encode(Claim(topic, line[:_MOST_LINE])))
            return _claimed.decode(connection.recv(_MOST_MESSAGE_BYTES)).first
    except (OSError, CheckpointError, msgspec.MsgspecError):
        return True
