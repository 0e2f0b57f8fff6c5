"""Authenticated connections for threads: a server with one thread per peer, and raw bytes between frames.

Handshake and frames are those of `channel`; this module only moves bytes.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from keepstep.core.summary import Endpoint
from keepstep.wire.address import notice_dead_host
from keepstep.wire.channel import HANDSHAKE_S, ClientChannel, Ends, Role, ServerChannel
from keepstep.wire.counters import Counters
from keepstep.wire.framing import LENGTH_BYTES
from keepstep.wire.messages import MOST_NODE_ENDPOINTS, Message
from keepstep.wire.secret import RunKey
from keepstep.wire.violation import Violation, left_without_proof

logger = logging.getLogger("keepstep.wire")

_SILENCE_S = 20.0  # how long a peer may be silent in the middle of an exchange
_MOST_PEERS = 64  # connections of one server: this many with proof, and as many without


class BlockingConnection:
    """One end of a TCP connection.

    All calls raise OSError when the connection breaks or the peer is silent for too long, and Violation when the
    peer breaks the protocol.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._channel: ClientChannel | ServerChannel | None = None
        self._patience_s: float | None = None
        notice_dead_host(connection)

    def patience(self, seconds: float) -> None:
        """Give up a single read or write after this time."""
        self._patience_s = seconds
        if isinstance(self.socket, ssl.SSLSocket):  # which would read on whatever the kernel says
            self.socket.settimeout(seconds)
            return
        value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, option, value)

    def encrypt(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        """Speak TLS from now on."""
        # `shut` must be able to wake this thread during the TLS handshake, so the socket is replaced before it.
        wrapped = context.wrap_socket(self.socket, server_side=server_side, do_handshake_on_connect=False)
        self.socket = wrapped
        wrapped.settimeout(self._patience_s)
        wrapped.do_handshake()

    def ends(self) -> Ends:
        """The addresses of both ends."""
        return Ends.of(self.socket)

    def prove(self, channel: ClientChannel | ServerChannel) -> None:
        """Do the handshake, within ``HANDSHAKE_S``."""
        self._channel = channel
        end_s = time.monotonic() + HANDSHAKE_S
        if isinstance(channel, ClientChannel):
            self.socket.sendall(channel.open())
        while not channel.established:
            _, answer = self._frame(channel, end_s)
            if answer:
                self.socket.sendall(answer)
        self.patience(_SILENCE_S)

    def receive(self) -> Message:
        """The next message."""
        assert self._channel
        messages, _ = self._frame(self._channel)
        return messages[0]

    def send(self, message: Message) -> None:
        """Send a message."""
        assert self._channel
        self.socket.sendall(self._channel.send(message))

    def receive_into(self, target: memoryview) -> int:
        """Fill ``target`` with bytes that come outside the frames; fewer than it holds: the connection broke."""
        flags = 0 if isinstance(self.socket, ssl.SSLSocket) else socket.MSG_WAITALL
        got = 0
        with contextlib.suppress(OSError):
            while got < len(target):
                count = self.socket.recv_into(target[got:], 0, flags)
                if not count:
                    break
                got += count
        return got

    def refuse(self, violation: Violation) -> None:
        """Tell a client that has not proved itself yet why it is refused."""
        if isinstance(self._channel, ServerChannel) and (denial := self._channel.denial(violation)):
            with contextlib.suppress(OSError):
                self.socket.sendall(denial)

    def shut(self) -> None:
        """Wake the thread that reads or writes; may be called from any thread."""
        with contextlib.suppress(OSError):
            # A TLS socket's own `shutdown` would unwrap it first.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the descriptor."""
        with contextlib.suppress(OSError):
            self.socket.close()

    def _frame(
        self, channel: ClientChannel | ServerChannel, end_s: float | None = None
    ) -> tuple[list[Message], bytes]:
        """Read one frame and no byte more; what the channel makes of it."""
        head = self._exactly(LENGTH_BYTES, end_s)
        channel.receive(head)  # refuses a frame that is too long before it is read
        return channel.receive(self._exactly(int.from_bytes(head, "big"), end_s))

    def _exactly(self, count: int, end_s: float | None) -> bytes:
        """Read this many bytes. ``end_s``: when the handshake must be done, None: it is."""
        found = bytearray()
        while len(found) < count:
            late = end_s is not None and time.monotonic() > end_s
            try:
                data = b"" if late else self.socket.recv(min(count - len(found), 1 << 20))
            except (BlockingIOError, TimeoutError):  # nothing has come for as long as `patience` allows
                if end_s is None:
                    raise
                late, data = True, b""
            if late:
                raise Violation("handshake-timeout", f"no proof within {HANDSHAKE_S:g} s")
            if not data:
                raise ConnectionError("the other side closed the connection")
            found += data
        return bytes(found)


class BlockingServer:
    """Takes connections of one role, at most 64 peers at a time, each in a thread of its own.

    ``serve`` talks to one peer that has proved itself, until it returns or raises. ``purpose`` is written to the log
    after "no" where an address cannot be listened on.
    """

    def __init__(
        self,
        key: RunKey,
        role: Role,
        serve: Callable[[BlockingConnection], None],
        *,
        purpose: str,
        idle_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``idle_s``: how long a peer may be silent between two requests."""
        self.counters = Counters()
        self._key, self._role, self._serve, self._tls = key, role, serve, tls
        self._purpose, self._idle_s = purpose, idle_s
        self._guard = threading.Lock()
        self._listeners: dict[str, socket.socket] = {}
        self._failed: set[str] = set()
        self._unproven: OrderedDict[int, BlockingConnection] = OrderedDict()
        self._proven: dict[int, BlockingConnection] = {}
        self._closed = False

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints where the server listens."""
        with self._guard:
            return tuple(Endpoint(where, one.getsockname()[1]) for where, one in self._listeners.items())

    def listen(self, addresses: Iterable[str]) -> bool:
        """Also listen on these numeric addresses, four in all; True if there is a new one. Never waits.

        The log says once for each address that it cannot be listened on.
        """
        before = len(self._listeners)
        for address in addresses:
            if self._closed or address in self._listeners or len(self._listeners) >= MOST_NODE_ENDPOINTS:
                continue
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                listener = socket.create_server((address, 0), family=family, backlog=128)
                self._in_thread(self._accept, listener)
            except (OSError, RuntimeError) as error:  # no address of this node, or no more threads
                if address not in self._failed:
                    logger.info("no %s on %s: %s", self._purpose, address, error)
                self._failed.add(address)
                continue
            with self._guard:
                self._listeners[address] = listener
        return len(self._listeners) > before

    def close(self) -> None:
        """Listen no more and break all connections; their threads end by themselves."""
        with self._guard:
            self._closed = True
            for listener in self._listeners.values():
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)
                listener.close()
            self._listeners.clear()
            for connection in (*self._unproven.values(), *self._proven.values()):
                connection.shut()

    @staticmethod
    def _in_thread(work: Callable[[socket.socket], None], end: socket.socket) -> None:
        """Raises RuntimeError, and closes ``end``, when there can be no more threads."""
        try:
            threading.Thread(target=work, args=(end,), name="keepstep-server", daemon=True).start()
        except RuntimeError:
            end.close()
            raise

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listener.accept()
                self._in_thread(self._meet, connection)
                continue
            except (OSError, RuntimeError):
                if self._closed:
                    return
            time.sleep(0.1)  # out of descriptors or threads until other connections end

    def _meet(self, plain: socket.socket) -> None:
        connection = BlockingConnection(plain)
        number = self._enter(connection)
        peer = "?"
        try:
            connection.patience(HANDSHAKE_S)
            peer = connection.ends().remote
            if self._tls is not None:
                connection.encrypt(self._tls, server_side=True)
            connection.prove(ServerChannel(self._key, connection.ends(), roles={self._role}))
            if self._prove(number, connection):
                connection.patience(self._idle_s)
                self._serve(connection)
        except Violation as violation:
            connection.refuse(violation)
            self._refused(violation, peer)
        except OSError as error:
            if self._closed or number not in self._unproven:
                logger.debug("%s has gone: %s", peer, error)
            else:
                self._refused(left_without_proof(), peer)
        except Exception:
            logger.exception("the connection of %s ends", peer)
        finally:
            with self._guard:
                self._unproven.pop(number, None)
                self._proven.pop(number, None)
            connection.close()

    def _refused(self, violation: Violation, peer: str) -> None:
        with self._guard:
            is_news = self.counters.refuse(violation.reason, peer, time.monotonic())
        if is_news:
            logger.warning("refused %s (%s): %s", peer, violation.reason, violation)

    def _enter(self, connection: BlockingConnection) -> int:
        """Count a connection without proof and return its number; the oldest is closed if there are too many."""
        with self._guard:
            self.counters.connections += 1
            number = self.counters.connections
            self._unproven[number] = connection
            if len(self._unproven) > _MOST_PEERS or self._closed:
                self._unproven.popitem(last=False)[1].shut()
            return number

    def _prove(self, number: int, connection: BlockingConnection) -> bool:
        """Count a connection as proven; False if there is no room for it."""
        with self._guard:
            self._unproven.pop(number, None)
            if self._closed or len(self._proven) >= _MOST_PEERS:
                return False
            self._proven[number] = connection
            return True
