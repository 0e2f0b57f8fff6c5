"""Fetches a rank's sealed state from the agent of another node (`state_server`).

Bytes are received straight into the slot, over several connections; the slot is sealed once every checksum was
verified. When a connection breaks, the bytes received so far stay, and a new connection, also to another process of the
same node, goes on with those that are missing.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from keepstep.checkpoint import native
from keepstep.checkpoint.header import MOST_HEADER_BYTES
from keepstep.checkpoint.memory.incoming import Incoming, Room
from keepstep.checkpoint.memory.slots import Key, Record
from keepstep.checkpoint.storage.manifest import key_text
from keepstep.core.errors import CheckpointError
from keepstep.core.summary import Endpoint
from keepstep.wire.blocking import BlockingConnection
from keepstep.wire.channel import HANDSHAKE_S, ClientChannel
from keepstep.wire.messages import MOST_NODE_ENDPOINTS, Message
from keepstep.wire.secret import RunKey
from keepstep.wire.transfer import (
    Following,
    Have,
    Lacks,
    Piece,
    SendHeader,
    SendRange,
    Want,
)
from keepstep.wire.violation import Violation

log = logging.getLogger(__name__)

CONNECTIONS = 2  # connections of one transfer; more when the other node has more addresses
RANGE_BYTES = 8 << 20
_VERIFYING = 2  # threads that verify checksums
_FIRST_WAIT_S = 0.05  # pause before another connection is tried, doubled each time
_AHEAD = 2  # ranges that are requested before the first of them has arrived
_CONNECT_S = 5.0


class Cancelled(CheckpointError):
    """The transfer was stopped because it is not wanted any more."""


class Fetch:
    """One transfer. ``where`` gives the endpoints of the node that has the state; it is called for each connection."""

    def __init__(
        self,
        key: Key,
        rank: int,
        where: Callable[[], Sequence[Endpoint]],
        run: RunKey,
        *,
        tls: ssl.SSLContext | None = None,
        patience_s: float = 15.0,
    ) -> None:
        """The transfer fails when no byte arrives for ``patience_s``."""
        self._key, self._rank, self._where, self._run_key = key, rank, where, run
        self._what = f"{key_text(key)} of rank {rank}"
        self._tls, self._patience_s = tls, patience_s
        self._changed = threading.Condition()
        self._connections: set[BlockingConnection] = set()
        self._missing: deque[tuple[int, int]] = deque()  # offset and size of ranges that nobody has requested
        self._left = 0  # bytes of data that have not arrived
        self._receiving = 0  # threads that may write into the slot
        self._moved_s = time.monotonic()
        self._failure: CheckpointError | None = None
        self._record: Record | None = None
        self._attempts = 0
        self.resumed = 0
        """How many connections replaced one that broke."""

    def run(self, room: Room) -> None:
        """Fetch the state into the slot that ``room`` gives, and seal it; several threads work meanwhile.

        Raises:
            CheckpointError: the node lacks the state or does not answer, the state arrived damaged, or there is no
                room for it.
        """
        try:
            first = self._patiently()
            record = self._record
            assert record is not None
            with room(record) as incoming:
                first = self._take_header(first, incoming, record)
                self._take(first, incoming, record)
                incoming.seal(threads=_VERIFYING)
        finally:
            self.stop()
            for connection in list(self._connections):
                self._leave(connection)

    def stop(self, failure: CheckpointError | None = None) -> None:
        """End the transfer, from any thread: `run` raises ``failure`` or `Cancelled`, unless it is done."""
        with self._changed:
            self._failure = self._failure or failure or Cancelled("not wanted any more")
            for connection in self._connections:
                connection.shut()
            self._changed.notify_all()

    def _patiently(self) -> BlockingConnection:
        """A connection, tried again until ``patience_s`` is over or the transfer is stopped (CheckpointError)."""
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                return self._ask()
            except (OSError, Violation) as error:
                self._broke(error)
            with self._changed:
                self._changed.wait(wait_s)
                if self._failure is not None:
                    raise self._failure
            wait_s = min(2 * wait_s, 1.0)

    def _broke(self, error: Exception) -> None:
        """Note that a connection broke. Raises CheckpointError when no byte has arrived for too long."""
        log.info("%s: a connection broke: %s", self._what, error)
        if time.monotonic() - self._moved_s > self._patience_s:
            raise CheckpointError(f"{self._what} does not come: {error}") from None

    def _ask(self) -> BlockingConnection:
        """Connect to the node that has the state, and ask for it; CheckpointError when it lacks the state.

        Raises OSError and Violation when there is no connection, or the peer has no proof.
        """
        endpoints = [one for one in self._where()[:MOST_NODE_ENDPOINTS] if is_usable(one)]
        if not endpoints:
            raise ConnectionError("the node that has it does not say where it listens")
        with self._changed:
            endpoint = endpoints[self._attempts % len(endpoints)]
            self._attempts += 1
        plain = socket.create_connection((endpoint.address, endpoint.port), timeout=_CONNECT_S)
        connection = BlockingConnection(plain)
        try:
            plain.settimeout(None)
            connection.patience(HANDSHAKE_S)
            if self._tls is not None:
                connection.encrypt(self._tls, server_side=False)
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                self._connections.add(connection)
            connection.prove(ClientChannel(self._run_key, "peer", connection.ends()))
            connection.send(Want(self._rank, self._key.pack()))
            self._announced(connection.receive())
        except BaseException:
            self._leave(connection)
            raise
        return connection

    def _announced(self, answer: Message) -> None:
        if isinstance(answer, Lacks):
            raise CheckpointError(answer.reason)
        if not isinstance(answer, Have) or not 0 <= answer.header_checksum < 1 << 64:
            raise Violation("malformed", "an answer to another question")
        record = Record(*msgspec.structs.astuple(answer))
        if record.key != self._key or record.header_bytes > MOST_HEADER_BYTES:
            raise Violation("malformed", "a record of another state, or of none")
        with self._changed:
            if self._record is None:
                self._record, self._left = record, record.data_bytes
            elif record != self._record:
                raise CheckpointError(f"{self._what} is another one by now")

    def _take_header(
        self, connection: BlockingConnection, incoming: Incoming, record: Record
    ) -> BlockingConnection:
        """Receive header and checksums. Returns the connection that brought them."""
        while True:
            at = record.header_at - native.DATA_OFFSET
            try:
                connection.send(SendHeader())
                while at < len(incoming.body):
                    piece = connection.receive()
                    if not isinstance(piece, Piece) or len(piece.data) > len(incoming.body) - at:
                        raise Violation("malformed", "more header than was announced, or something else")
                    incoming.body[at : at + len(piece.data)] = piece.data
                    at += len(piece.data)
                return connection
            except (OSError, Violation) as error:
                self._leave(connection)
                self._broke(error)
            time.sleep(_FIRST_WAIT_S)
            connection = self._patiently()
            self.resumed += 1

    def _take(self, first: BlockingConnection, incoming: Incoming, record: Record) -> None:
        total = record.data_bytes
        self._missing = deque((at, min(RANGE_BYTES, total - at)) for at in range(0, total, RANGE_BYTES))
        count = min(len(self._missing), max(CONNECTIONS, len(self._where()[:MOST_NODE_ENDPOINTS])))
        body = incoming.body
        for one in [first, *[None] * count][:count]:
            threading.Thread(target=self._work, args=(body, one), name="keepstep-fetch", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: not self._receiving and (self._failure or not self._left))
            if self._left:
                assert self._failure
                raise self._failure

    def _work(self, body: memoryview, connection: BlockingConnection | None) -> None:
        """Receive ranges until all have arrived, replacing connections that break."""
        again = False
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._missing or self._failure or not self._left)
                    if self._failure or not self._left:
                        return
                if connection is None:
                    connection = self._patiently()
                    self.resumed += again
                again = True
                error = self._ranges(connection, body)
                if error is not None:
                    self._leave(connection)
                    connection = None
                    self._broke(error)
                    time.sleep(_FIRST_WAIT_S)
        except CheckpointError as error:
            self.stop(error)
        except Exception as error:  # any other end of this thread would leave `run` waiting for ever
            log.exception("a transfer ends")
            self.stop(CheckpointError(f"the transfer failed: {type(error).__name__}: {error}"))

    def _ranges(self, connection: BlockingConnection, body: memoryview) -> Exception | None:
        """Receive ranges until none is missing (returns None), or the connection breaks (returns the error).

        Ranges that a broken connection did not bring are missing again.
        """
        asked: deque[tuple[int, int]] = deque()
        with self._changed:
            if self._failure:
                return self._failure
            self._receiving += 1
        try:
            while True:
                with self._changed:
                    count = min(_AHEAD - len(asked), len(self._missing))
                    new = [self._missing.popleft() for _ in range(count)]
                asked.extend(new)
                for offset, nbytes in new:
                    connection.send(SendRange(offset, nbytes))
                if not asked:
                    return None
                offset, nbytes = asked[0]
                if connection.receive() != Following(offset, nbytes):
                    raise Violation("malformed", "another range than the one asked for")
                got = connection.receive_into(body[offset : offset + nbytes])
                asked.popleft()
                with self._changed:
                    self._left -= got
                    self._moved_s = time.monotonic() if got else self._moved_s
                if got < nbytes:
                    asked.appendleft((offset + got, nbytes - got))
                    raise ConnectionError(f"{nbytes - got} bytes of a range did not come")
        except (OSError, Violation) as error:
            return error
        finally:
            with self._changed:
                self._missing.extendleft(reversed(asked))
                self._receiving -= 1
                self._changed.notify_all()

    def _leave(self, connection: BlockingConnection) -> None:
        with self._changed:
            self._connections.discard(connection)
        connection.close()


def is_usable(endpoint: Endpoint) -> bool:
    """Whether an endpoint is a numeric address with a port; names are never looked up."""
    try:
        ipaddress.ip_address(endpoint.address.partition("%")[0])
    except ValueError:
        return False
    return endpoint.transport == "tcp" and 0 < endpoint.port < 1 << 16
