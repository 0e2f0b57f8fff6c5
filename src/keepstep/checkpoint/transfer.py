"""A rank's sealed state from one node to another: the agent that wants it connects to the one that has it, and asks.

Both prove that they hold the run's secret, as to the controller (`keepstep.wire`). Header and checksums come in sealed
frames; the storages' bytes come between frames, out of the slot by ``sendfile`` and straight into the other slot, over
several connections. They count once every checksum was verified. What has come stays when connections break: a new one,
also to another process of the same node, goes on with what is missing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import ssl
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack

from keepstep.checkpoint import _native as native  # pyright: ignore[reportMissingModuleSource]
from keepstep.checkpoint.cache import Slot
from keepstep.checkpoint.header import MOST_HEADER_BYTES
from keepstep.checkpoint.incoming import Incoming, Room
from keepstep.checkpoint.manifest import key_text
from keepstep.checkpoint.slots import Key, Record
from keepstep.core.errors import CheckpointError
from keepstep.core.summary import Endpoint
from keepstep.wire.address import end_host, end_name, notice_dead_host
from keepstep.wire.channel import ClientChannel, Ends, ServerChannel
from keepstep.wire.counters import Counters
from keepstep.wire.framing import LENGTH_BYTES
from keepstep.wire.messages import Message
from keepstep.wire.transfer import (
    PIECE_BYTES,
    Following,
    Have,
    Kept,
    Lacks,
    Piece,
    SendHeader,
    SendRange,
    Want,
)
from keepstep.wire.violation import Violation

log = logging.getLogger(__name__)

CONNECTIONS = 2  # of one transfer, at least; one to each address of the other node
MOST_ENDPOINTS = 4
RANGE_BYTES = 8 << 20
_FIRST_WAIT_S = 0.05  # before another connection
_AHEAD = 2  # ranges asked for before they come
_SENT_AT_ONCE = 4 << 20
_HANDSHAKE_S = 5.0
_CONNECT_S = 5.0
_SILENCE_S = 20.0  # of a peer in the middle of something
_IDLE_S = 120.0  # of a peer that may ask again
_MOST_GUESTS = 64  # connections, proven and not, each
_PEER = frozenset({"peer"})

Reading = Callable[[Key, int], AbstractContextManager[tuple[Slot, Record]]]
"""Gives the slot that holds a rank's state, and its record; it stays as it is while the context is open."""


class Rate:
    """Shares ``bytes_per_s`` (0: no limit) among threads that send."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._guard = threading.Lock()
        self._free_s = 0.0  # when what was let through so far has had its time

    @property
    def at_once(self) -> int:
        """Bytes to send between two calls of `wait`: at most a tenth of a second's worth."""
        if self.bytes_per_s <= 0:
            return _SENT_AT_ONCE
        return max(1024, min(_SENT_AT_ONCE, int(self.bytes_per_s / 10)))

    def delay_s(self, nbytes: int, now_s: float) -> float:
        """How long to wait before sending so much."""
        if self.bytes_per_s <= 0:
            return 0.0
        with self._guard:
            begin_s = max(self._free_s, now_s)
            self._free_s = begin_s + nbytes / self.bytes_per_s
            return begin_s - now_s

    def wait(self, nbytes: int) -> None:
        """Wait for as long."""
        delay_s = self.delay_s(nbytes, time.monotonic())
        if delay_s > 0:
            time.sleep(delay_s)


class _Connection:
    """A blocking connection: frames, and bytes between them. OSError: it broke or was silent for too long."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._channel: ClientChannel | ServerChannel | None = None
        notice_dead_host(connection)

    def patience(self, seconds: float) -> None:
        """Give up a single read or write after so long."""
        value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, value)

    def prove(self, channel: ClientChannel | ServerChannel) -> None:
        """The handshake, within 5 s. Raises Violation."""
        self._channel = channel
        end_s = time.monotonic() + _HANDSHAKE_S
        if isinstance(channel, ClientChannel):
            self._socket.sendall(channel.open())
        while not channel.established:
            _, answer = channel.receive(self._frame(end_s))
            if answer:
                self._socket.sendall(answer)
        self.patience(_SILENCE_S)

    def ends(self) -> Ends:
        return Ends(end_name(self._socket.getsockname()), end_name(self._socket.getpeername()))

    def receive(self) -> Message:
        """The next message. Raises Violation."""
        assert self._channel
        messages, _ = self._channel.receive(self._frame())
        return messages[0]

    def send(self, message: Message) -> None:
        assert self._channel
        self._socket.sendall(self._channel.send(message))

    def receive_into(self, target: memoryview) -> int:
        """Fill ``target``; how many bytes came. Fewer: the connection broke."""
        flags = 0 if isinstance(self._socket, ssl.SSLSocket) else socket.MSG_WAITALL
        got = 0
        with contextlib.suppress(OSError):
            while got < len(target):
                count = self._socket.recv_into(target[got:], 0, flags)
                if not count:
                    break
                got += count
        return got

    def send_slot(self, slot: Slot, offset: int, nbytes: int, rate: Rate) -> None:
        """Bytes of a slot, as they are in the kernel where there is no TLS."""
        behind = offset + nbytes
        while offset < behind:
            count = min(behind - offset, rate.at_once)
            rate.wait(count)
            if isinstance(self._socket, ssl.SSLSocket):
                with memoryview(slot.memory) as view, view[offset : offset + count] as part:
                    self._socket.sendall(part)
                offset += count
            else:
                sent = 0
                while sent < count:
                    step = os.sendfile(self._socket.fileno(), slot.fileno(), offset + sent, count - sent)
                    if not step:
                        raise OSError("the slot ended early")
                    sent += step
                offset += count

    def refuse(self, violation: Violation) -> None:
        if isinstance(self._channel, ServerChannel) and (denial := self._channel.denial(violation)):
            with contextlib.suppress(OSError):
                self._socket.sendall(denial)

    def shut(self) -> None:
        """Wake whoever reads or writes; may be called from any thread."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # of TLS, too, without unwrapping it

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _frame(self, end_s: float | None = None) -> bytes:
        assert self._channel
        head = self._exactly(LENGTH_BYTES, end_s)
        length = int.from_bytes(head, "big")
        if length > self._channel.frame_limit:
            raise Violation("oversized", f"a frame of {length} bytes of {self._channel.frame_limit} allowed")
        return head + self._exactly(length, end_s)

    def _exactly(self, count: int, end_s: float | None) -> bytes:
        found = bytearray()
        while len(found) < count:
            if end_s is not None and time.monotonic() > end_s:
                raise Violation("handshake-timeout", f"no proof within {_HANDSHAKE_S:g} s")
            data = self._socket.recv(min(count - len(found), 1 << 20))
            if not data:
                raise ConnectionError("the other side closed the connection")
            found += data
        return bytes(found)


class StateServer:
    """Gives states to the agents of other nodes. Threads of its own, at most 64 peers at a time."""

    def __init__(
        self,
        secret: bytes,
        reading: Reading,
        *,
        tls: ssl.SSLContext | None = None,
        rate: Rate | None = None,
        kept: Callable[[Key, int], None] = lambda key, rank: None,
    ) -> None:
        """``kept``: is told, in a peer's thread, that a state stands sealed on another node as well."""
        self.counters = Counters()
        self._secret, self._reading, self._tls = secret, reading, tls
        self._rate, self._kept = rate or Rate(0), kept
        self._guard = threading.Lock()
        self._listeners: dict[str, socket.socket] = {}
        self._unproven: OrderedDict[int, _Connection] = OrderedDict()
        self._proven: dict[int, _Connection] = {}
        self._numbers = 0
        self._closed = False

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where it listens."""
        return tuple(Endpoint(address, one.getsockname()[1]) for address, one in self._listeners.items())

    def listen(self, addresses: Iterable[str]) -> None:
        """Listen on these addresses, too, four in all. Raises OSError: on one of them that is not possible."""
        for address in addresses:
            if address in self._listeners or len(self._listeners) >= MOST_ENDPOINTS:
                continue
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, 0), family=family, backlog=128)
            self._listeners[address] = listener
            threading.Thread(
                target=self._accept, args=(listener,), name="keepstep-states", daemon=True
            ).start()

    def close(self) -> None:
        """End all transfers; threads end by themselves."""
        with self._guard:
            self._closed = True
            for listener in self._listeners.values():
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)
                listener.close()
            for guest in (*self._unproven.values(), *self._proven.values()):
                guest.shut()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # out of descriptors: others will end
                continue
            threading.Thread(
                target=self._guest, args=(connection,), name="keepstep-states", daemon=True
            ).start()

    def _guest(self, plain: socket.socket) -> None:
        connection = _Connection(plain)
        number = self._enter(connection)
        peer = "?"
        try:
            connection.patience(_HANDSHAKE_S)
            peer = connection.ends().remote
            if self._tls is not None:
                plain = self._tls.wrap_socket(plain, server_side=True)
                connection = _Connection(plain)
                connection.patience(_HANDSHAKE_S)
                with self._guard:
                    self._unproven[number] = connection
            connection.prove(ServerChannel(self._secret, connection.ends(), roles=_PEER))
            if self._prove(number, connection):
                connection.patience(_IDLE_S)
                self._serve(connection)
        except Violation as violation:
            connection.refuse(violation)
            if self.counters.refuse(violation.reason, end_host(peer), time.monotonic()):
                log.warning("refused %s (%s): %s", peer, violation.reason, violation)
        except OSError as error:
            log.debug("%s has gone: %s", peer, error)
        except Exception:
            log.exception("a transfer to %s ends", peer)
        finally:
            with self._guard:
                self._unproven.pop(number, None)
                self._proven.pop(number, None)
            connection.close()

    def _enter(self, connection: _Connection) -> int:
        with self._guard:
            self._numbers += 1
            self.counters.connections += 1
            self._unproven[self._numbers] = connection
            if len(self._unproven) > _MOST_GUESTS or self._closed:
                self._unproven.popitem(last=False)[1].shut()
            return self._numbers

    def _prove(self, number: int, connection: _Connection) -> bool:
        with self._guard:
            self._unproven.pop(number, None)
            if self._closed or len(self._proven) >= _MOST_GUESTS:
                return False
            self._proven[number] = connection
            return True

    def _serve(self, connection: _Connection) -> None:
        with ExitStack() as stack:
            slot: Slot | None = None
            wanted: Want | None = None
            record = Record(0, 0, 0, 0, 0, 0)
            while True:
                message = connection.receive()
                if isinstance(message, Want):
                    stack.close()
                    wanted, slot = message, None
                    try:
                        key = Key.unpack(message.key)
                        assert key
                        slot, record = stack.enter_context(self._reading(key, message.rank))
                    except CheckpointError as error:
                        connection.send(Lacks(str(error)[:500]))
                        continue
                    connection.send(Have(*record))
                elif slot is None or wanted is None:
                    raise Violation("malformed", "a request for parts of nothing")
                elif isinstance(message, SendHeader):
                    _send_header(connection, slot, record)
                elif isinstance(message, SendRange):
                    if message.offset + message.nbytes > record.data_bytes:
                        raise Violation("malformed", f"bytes beyond the {record.data_bytes} that there are")
                    connection.send(Following(message.offset, message.nbytes))
                    connection.send_slot(
                        slot, native.DATA_OFFSET + message.offset, message.nbytes, self._rate
                    )
                else:
                    self._kept(record.key, wanted.rank)


def _send_header(connection: _Connection, slot: Slot, record: Record) -> None:
    begin = native.slot_bytes(record.data_bytes, 0, 0)
    end = native.slot_bytes(record.data_bytes, record.header_bytes, record.storages)
    for at in range(begin, end, PIECE_BYTES):
        connection.send(Piece(bytes(slot.memory[at : min(at + PIECE_BYTES, end)])))


class Cancelled(CheckpointError):
    """A transfer that is not wanted any more."""


class Fetch:
    """One transfer. ``where`` gives the endpoints of the node that has the state, and is asked at every connection."""

    def __init__(
        self,
        key: Key,
        rank: int,
        where: Callable[[], Sequence[Endpoint]],
        secret: bytes,
        *,
        tls: ssl.SSLContext | None = None,
        patience_s: float = 15.0,
        threads: int = 2,
    ) -> None:
        """``patience_s``: gives up when no byte has come for so long. ``threads`` verify."""
        self._key, self._rank, self._where, self._secret = key, rank, where, secret
        self._tls, self._patience_s, self._threads = tls, patience_s, threads
        self._changed = threading.Condition()
        self._connections: set[_Connection] = set()
        self._bringers: set[_Connection] = set()
        self._missing: deque[tuple[int, int]] = deque()  # offset and bytes
        self._left = 0  # bytes that have not come
        self._receiving = 0  # threads that may write into the slot
        self._moved_s = time.monotonic()
        self._failure: CheckpointError | None = None
        self._record: Record | None = None
        self._attempts = 0
        self.resumed = 0
        """How often a connection was made to go on with what was missing."""

    def run(self, room: Room) -> None:
        """Have the state sealed in the slot that ``room`` gives; several threads work meanwhile.

        Raises:
            CheckpointError: the node lacks it, does not answer, or it came damaged; there is no room for it.
        """
        try:
            first = self._patiently()
            record = self._record
            assert first is not None
            assert record is not None
            with room(record) as incoming:
                first = self._take_header(first, incoming, record)
                self._take(first, incoming, record)
                incoming.seal(threads=self._threads)
            self._say_kept()
        finally:
            self.stop()
            for connection in list(self._connections):
                self._leave(connection)

    def stop(self, failure: CheckpointError | None = None) -> None:
        """End it from any thread: `run` raises `Cancelled` unless it is done."""
        with self._changed:
            self._failure = self._failure or failure or Cancelled("not wanted any more")
            for connection in self._connections:
                connection.shut()
            self._changed.notify_all()

    def _patiently(self, *, ranges: bool = False) -> _Connection | None:
        """A connection, tried again until the patience is over; None: for ``ranges`` none is needed any more."""
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
                if ranges and self._left == 0:
                    return None
            wait_s = min(2 * wait_s, 1.0)

    def _broke(self, error: Exception) -> None:
        """A connection did; CheckpointError: nothing has come for too long."""
        log.info("%s of rank %d: a connection broke: %s", key_text(self._key), self._rank, error)
        if time.monotonic() - self._moved_s > self._patience_s:
            raise CheckpointError(
                f"{key_text(self._key)} of rank {self._rank} does not come: {error}"
            ) from None

    def _ask(self) -> _Connection:
        """A proven connection to who has the state. CheckpointError: it lacks it. OSError, Violation: no connection."""
        endpoints = [one for one in self._where()[:MOST_ENDPOINTS] if is_usable(one)]
        if not endpoints:
            raise ConnectionError("the node that has it does not say where it listens")
        with self._changed:
            endpoint = endpoints[self._attempts % len(endpoints)]
            self._attempts += 1
        plain = socket.create_connection((endpoint.address, endpoint.port), timeout=_CONNECT_S)
        connection = _Connection(plain)
        try:
            plain.settimeout(None)
            connection.patience(_HANDSHAKE_S)
            if self._tls is not None:
                connection = _Connection(self._tls.wrap_socket(plain))
                connection.patience(_HANDSHAKE_S)
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                self._connections.add(connection)
            connection.prove(ClientChannel(self._secret, "peer", connection.ends()))
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
        record = Record(
            answer.step,
            answer.incarnation,
            answer.data_bytes,
            answer.header_bytes,
            answer.storages,
            answer.header_checksum,
        )
        if record.key != self._key or record.header_bytes > MOST_HEADER_BYTES:
            raise Violation("malformed", "a record of another state, or of none")
        with self._changed:
            if self._record is None:
                self._record, self._left = record, record.data_bytes
            elif record != self._record:
                raise CheckpointError(f"{key_text(self._key)} of rank {self._rank} is another one by now")

    def _take_header(self, connection: _Connection, incoming: Incoming, record: Record) -> _Connection:
        """Header and checksums; the connection that brought them."""
        while True:
            try:
                self._receive_header(connection, incoming, record)
                self._bringers.add(connection)
                return connection
            except (OSError, Violation) as error:
                self._leave(connection)
                self._broke(error)
            time.sleep(_FIRST_WAIT_S)
            again = self._patiently()
            assert again is not None
            connection = again
            self.resumed += 1

    @staticmethod
    def _receive_header(connection: _Connection, incoming: Incoming, record: Record) -> None:
        at = native.slot_bytes(record.data_bytes, 0, 0) - native.DATA_OFFSET
        connection.send(SendHeader())
        while at < len(incoming.body):
            piece = connection.receive()
            if not isinstance(piece, Piece) or len(piece.data) > len(incoming.body) - at:
                raise Violation("malformed", "more header than was announced, or something else")
            incoming.body[at : at + len(piece.data)] = piece.data
            at += len(piece.data)

    def _take(self, first: _Connection, incoming: Incoming, record: Record) -> None:
        total = record.data_bytes
        self._missing = deque((at, min(RANGE_BYTES, total - at)) for at in range(0, total, RANGE_BYTES))
        count = min(len(self._missing), max(CONNECTIONS, len(self._where()[:MOST_ENDPOINTS])))
        for number in range(count):
            threading.Thread(
                target=self._work,
                args=(incoming.body, None if number else first),
                name="keepstep-fetch",
                daemon=True,
            ).start()
        with self._changed:
            self._changed.wait_for(lambda: not self._receiving and (self._failure or not self._left))
            if self._left:
                assert self._failure
                raise self._failure

    def _work(self, body: memoryview, connection: _Connection | None) -> None:
        """Take ranges until all have come, over as many connections as it takes."""
        again = False
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._missing or self._failure or not self._left)
                    if self._failure or not self._left:
                        return
                if connection is None:
                    connection = self._patiently(ranges=True)
                    if connection is None:
                        return
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
        except Exception as error:  # would else be waited for for ever
            log.exception("a transfer ends")
            self.stop(CheckpointError(f"the transfer failed: {type(error).__name__}: {error}"))

    def _ranges(self, connection: _Connection, body: memoryview) -> Exception | None:
        """Until no more is missing, or the connection breaks (why): what it did not bring is missing again."""
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
                    self._bringers.add(connection)
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

    def _say_kept(self) -> None:
        """Over a connection that brought something; the others may be in the middle of their handshake."""
        with self._changed:
            connections = [one for one in self._connections if one in self._bringers]
        for connection in connections[:1]:
            with contextlib.suppress(OSError):
                connection.send(Kept())

    def _leave(self, connection: _Connection) -> None:
        with self._changed:
            self._connections.discard(connection)
        connection.close()


def is_usable(endpoint: Endpoint) -> bool:
    """A numeric address and a port: names are never looked up."""
    try:
        ipaddress.ip_address(endpoint.address.partition("%")[0])
    except ValueError:
        return False
    return endpoint.transport == "tcp" and 0 < endpoint.port < 1 << 16
