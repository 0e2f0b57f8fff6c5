"""The agent's restore service: workers ask what states there are elsewhere, and have one brought into the cache.

The address of its socket follows from the cache's, so that a new agent is found where the old one was. A message is
JSON, bounded and checked on both sides.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeVar

import msgspec

from keepstep.checkpoint.memory.cached_states import CachedStates
from keepstep.checkpoint.memory.incoming import StateSource
from keepstep.checkpoint.memory.slot import MOST_RANKS, SLOTS_PER_RANK
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.storage.source import MOST_OFFERED, StorageSource
from keepstep.core.errors import CheckpointError
from keepstep.core.local_socket import accept, connect, listen

log = logging.getLogger(__name__)

MOST_MESSAGE_BYTES = 1 << 16
MOST_CONNECTIONS = 1024
_MOST_SOURCES = 8
_MOST_LINES = 8
_MOST_LINE = 400
_PATIENCE_S = 30.0
_AGAIN_S = 0.1
_MOST_DEATHS = 3
_BIND_AGAIN_S = 0.2

_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
_Packed = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
_Slots = Annotated[int, msgspec.Meta(ge=1, le=SLOTS_PER_RANK)]
_Line = Annotated[str, msgspec.Meta(max_length=_MOST_LINE)]
_Lines = Annotated[tuple[_Line, ...], msgspec.Meta(max_length=_MOST_LINES)]


class Offers(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Asks which states can be had for a rank."""

    rank: _Rank


class Bring(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Asks for a state in an empty slot of the rank, which is to have ``slots`` slots. ``key`` is packed."""

    rank: _Rank
    key: _Packed
    slots: _Slots


class SourceKeys(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A source, and the packed keys of the states that it has."""

    where: _Line
    keys: Annotated[tuple[_Packed, ...], msgspec.Meta(max_length=MOST_OFFERED)]


class Offered(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answer to `Offers`: the sources, the cheapest first.

    Attributes:
        sources: what each has.
        incarnation: the highest of anything that is there, whole or not; -1: nothing is.
        refused: why something that is there cannot be had.
        troubles: sources of which nothing can be told now.
    """

    sources: Annotated[tuple[SourceKeys, ...], msgspec.Meta(max_length=_MOST_SOURCES)]
    incarnation: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 15)]
    refused: _Lines = ()
    troubles: _Lines = ()

    @property
    def keys(self) -> frozenset[Key]:
        """All states that some source has."""
        return frozenset(filter(None, (Key.unpack(one) for source in self.sources for one in source.keys)))


class Brought(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answer to `Bring`: the state is sealed in a slot of the rank.

    ``where``: the source that gave it. ``passed``: sources that did not, and why.
    """

    where: _Line
    passed: _Lines = ()


class Denied(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answer to a request that was refused or has failed; the reason is for the job's operator."""

    reason: Annotated[str, msgspec.Meta(max_length=_MOST_LINES * _MOST_LINE)]


_requests = msgspec.json.Decoder(Offers | Bring)
_answers = msgspec.json.Decoder(Offered | Brought | Denied)

Wanted = TypeVar("Wanted", Offered, Brought)


def restore_address(cache: str) -> str:
    """The address of the restore service, from that of the cache."""
    return f"{cache}-restore"


class RestoreService:
    """Answers requests, called from any thread. The only I/O is that of the sources, the cheapest first."""

    def __init__(self, ranks: Collection[int], sources: Sequence[StateSource], states: CachedStates) -> None:
        self._sources, self._states = tuple(sources), states
        self._one_at_a_time = {rank: threading.Lock() for rank in ranks}
        self._brought: dict[int, tuple[Key, Brought]] = {}

    def answer(self, data: bytes) -> bytes:
        """The answer to a message, whatever the message is."""
        try:
            request = _requests.decode(data)
            if request.rank not in self._one_at_a_time:
                raise CheckpointError(f"rank {request.rank} does not run on this node")
            answer = self._offers(request) if isinstance(request, Offers) else self._bring(request)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            answer = Denied(f"not a request for a restore: {error}"[:_MOST_LINE])
        except CheckpointError as error:
            answer = Denied(str(error)[: _MOST_LINES * _MOST_LINE])
        return msgspec.json.encode(answer)

    def _offers(self, request: Offers) -> Offered:
        sources: list[SourceKeys] = []
        refused: list[str] = []
        troubles: list[str] = []
        incarnation = -1
        for source in self._sources:
            try:
                if isinstance(source, StorageSource):
                    keys, lines, newest = source.look(request.rank)
                    refused.extend(f"{source.where}: {line}" for line in lines)
                    incarnation = max(incarnation, newest)
                else:
                    keys = source.keys(request.rank)
            except Exception as error:  # stores and networks raise errors of any kind
                troubles.append(_line(error, source.where))
                continue
            chosen = sorted(keys, reverse=True)[:MOST_OFFERED]
            incarnation = max([incarnation, *(key.incarnation for key in chosen)])
            sources.append(SourceKeys(source.where[:_MOST_LINE], tuple(key.pack() for key in chosen)))
        return Offered(tuple(sources), incarnation, _bounded(refused), _bounded(troubles))

    def _bring(self, request: Bring) -> Brought:
        key = Key.unpack(request.key)
        assert key
        with self._one_at_a_time[request.rank]:
            brought = self._brought.get(request.rank)
            if brought and brought[0] == key and key in self._states.held(request.rank):
                return brought[1]  # a worker and the one that took its place have asked for the same
            passed: list[str] = []
            room = partial(self._states.filling, request.rank, request.slots)
            for source in self._sources:
                try:
                    where = source.bring(key, request.rank, room)
                except Exception as error:  # stores and networks raise errors of any kind
                    if not isinstance(error, CheckpointError):
                        log.warning("rank %d: %s: %s", request.rank, source.where, error, exc_info=True)
                    passed.append(_line(error, source.where))
                    continue
                answer = Brought(where[:_MOST_LINE], _bounded(passed))
                log.info("rank %d: step %d from %s", request.rank, key.step, where)
                self._brought[request.rank] = (key, answer)
                return answer
        raise CheckpointError("; ".join(_bounded(passed)) or "there is no source besides the node's cache")


class RestoreServer:
    """Answers at a socket, in a thread for each connection: bringing a state may take minutes."""

    def __init__(self, address: str, service: RestoreService) -> None:
        self._address, self._service = address, service
        self._stopped = threading.Event()
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Begin to serve as soon as the agent before this one has left the address."""
        threading.Thread(target=self._run, name="keepstep-restore", daemon=True).start()

    def stop(self) -> None:
        """Take no more requests; those that are being answered go on until the process ends."""
        self._stopped.set()
        if self._listener:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()

    def _run(self) -> None:
        self._listener = listener = self._listen()
        while listener and not self._stopped.is_set():
            try:
                accepted = accept(listener)
            except OSError as error:
                if not self._stopped.wait(_AGAIN_S):  # the process may be out of descriptors for a while
                    log.warning("restore service: %s", error)
                continue
            if accepted is None:
                continue
            connection, _ = accepted
            if self._places.acquire(blocking=False):
                threading.Thread(
                    target=self._serve, args=(connection,), name="keepstep-restore", daemon=True
                ).start()
            else:
                connection.close()
        if listener:
            listener.close()

    def _listen(self) -> socket.socket | None:
        while not self._stopped.is_set():
            try:
                return listen(self._address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    log.warning(
                        "the restore service is closed, states come from this node's cache only: %s", error
                    )
                    return None
            self._stopped.wait(_BIND_AGAIN_S)
        return None

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_PATIENCE_S)
                while data := connection.recv(MOST_MESSAGE_BYTES):
                    connection.send(self._service.answer(data))
        except OSError:
            pass
        except Exception:
            log.exception("restore service")
        finally:
            self._places.release()


@dataclass(frozen=True, slots=True)
class RestoreClient:
    """A worker's client of the restore service; its calls wait for an agent that is not there at the moment."""

    address: str
    patience_s: float = 60.0

    def offers(self, rank: int) -> Offered:
        """States that can be had for a rank. Raises CheckpointError where the agent does not answer, or cannot say."""
        return self._ask(Offers(rank), Offered)

    def bring(self, rank: int, key: Key, slots: int) -> Brought:
        """Have a state brought into the cache. Raises CheckpointError: no source gave it, and why."""
        return self._ask(Bring(rank, key.pack(), slots), Brought)

    def _ask(self, request: Offers | Bring, wanted: type[Wanted]) -> Wanted:
        deadline_s = time.monotonic() + self.patience_s
        deaths = 0
        while True:
            try:
                data, reached = self._exchange(msgspec.json.encode(request))
            except OSError as error:
                data, reached, why = b"", False, str(error)
            else:
                why = "it ended"
            if data:
                break
            if reached:  # the agent died over the request, and the next one has as long to come
                deaths += 1
                deadline_s = time.monotonic() + self.patience_s
            if deaths == _MOST_DEATHS or time.monotonic() > deadline_s:
                raise CheckpointError(
                    f"the agent of this node does not answer ({why}): see agent.log in the run folder"
                )
            time.sleep(_AGAIN_S)
        try:
            answer = _answers.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CheckpointError(f"the agent's answer cannot be read: {error}") from None
        if isinstance(answer, Denied):
            raise CheckpointError(answer.reason)
        if not isinstance(answer, wanted):
            raise CheckpointError("the agent of this node gave an answer that was not asked for")
        return answer

    def _exchange(self, request: bytes) -> tuple[bytes, bool]:
        """The answer, empty when the agent ended meanwhile, and whether an agent was reached."""
        with connect(self.address, "restore service", _PATIENCE_S) as connection:
            connection.send(request)
            connection.settimeout(None)  # a state may take long; an agent that dies closes the connection
            try:
                return connection.recv(MOST_MESSAGE_BYTES), True
            except ConnectionError:
                return b"", True


def _line(error: Exception, where: str) -> str:
    text = (str(error).splitlines() or [""])[0]
    told = text if isinstance(error, CheckpointError) else f"{type(error).__name__} {text}".strip()
    return (told if told.startswith(where) else f"{where}: {told}")[:_MOST_LINE]


def _bounded(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(line[:_MOST_LINE] for line in lines[:_MOST_LINES])
