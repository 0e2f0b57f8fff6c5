"""Gives the sealed states of this node to the agents of others that ask for them.

Who asks proves that it holds the secret and belongs to this run, as to the controller (`keepstep.wire`). Header and
checksums go in sealed frames; the storages' bytes go between frames, out of the slot by ``sendfile``.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack

from keepstep.checkpoint import native
from keepstep.checkpoint.memory.slot import Slot
from keepstep.checkpoint.memory.slots import Key, Record, slot_bytes
from keepstep.checkpoint.peers.peer_connection import HANDSHAKE_S, MOST_ENDPOINTS, PeerConnection, Rate
from keepstep.core.errors import CheckpointError
from keepstep.core.summary import Endpoint
from keepstep.wire.address import end_host
from keepstep.wire.channel import ServerChannel
from keepstep.wire.counters import Counters
from keepstep.wire.secret import RunKey
from keepstep.wire.transfer import (
    PIECE_BYTES,
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

_IDLE_S = 120.0  # of a peer that may ask again
_MOST_GUESTS = 64  # connections, proven and not, each
_PEER = frozenset({"peer"})

Reading = Callable[[Key, int], AbstractContextManager[tuple[Slot, Record]]]
"""Gives the slot that holds a rank's state, and its record; it stays as it is while the context is open."""


class StateServer:
    """Gives states to the agents of other nodes. Threads of its own, at most 64 peers at a time."""

    def __init__(
        self,
        run: RunKey,
        reading: Reading,
        *,
        tls: ssl.SSLContext | None = None,
        rate: Rate | None = None,
    ) -> None:
        self.counters = Counters()
        self._run, self._reading, self._tls = run, reading, tls
        self._rate = rate or Rate(0)
        self._guard = threading.Lock()
        self._listeners: dict[str, socket.socket] = {}
        self._unproven: OrderedDict[int, PeerConnection] = OrderedDict()
        self._proven: dict[int, PeerConnection] = {}
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
        connection = PeerConnection(plain)
        number = self._enter(connection)
        peer = "?"
        try:
            connection.patience(HANDSHAKE_S)
            peer = connection.ends().remote
            if self._tls is not None:
                plain = self._tls.wrap_socket(plain, server_side=True)
                connection = PeerConnection(plain)
                connection.patience(HANDSHAKE_S)
                with self._guard:
                    self._unproven[number] = connection
            connection.prove(ServerChannel(self._run, connection.ends(), roles=_PEER))
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

    def _enter(self, connection: PeerConnection) -> int:
        with self._guard:
            self._numbers += 1
            self.counters.connections += 1
            self._unproven[self._numbers] = connection
            if len(self._unproven) > _MOST_GUESTS or self._closed:
                self._unproven.popitem(last=False)[1].shut()
            return self._numbers

    def _prove(self, number: int, connection: PeerConnection) -> bool:
        with self._guard:
            self._unproven.pop(number, None)
            if self._closed or len(self._proven) >= _MOST_GUESTS:
                return False
            self._proven[number] = connection
            return True

    def _serve(self, connection: PeerConnection) -> None:
        with ExitStack() as stack:
            slot: Slot | None = None
            record = Record(0, 0, 0, 0, 0, 0)
            while True:
                message = connection.receive()
                if isinstance(message, Want):
                    stack.close()
                    slot = None
                    try:
                        key = Key.unpack(message.key)
                        assert key
                        slot, record = stack.enter_context(self._reading(key, message.rank))
                    except CheckpointError as error:
                        connection.send(Lacks(str(error)[:500]))
                        continue
                    connection.send(Have(*record))
                elif slot is None:
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


def _send_header(connection: PeerConnection, slot: Slot, record: Record) -> None:
    end = slot_bytes(record)
    for at in range(record.header_at, end, PIECE_BYTES):
        connection.send(Piece(bytes(slot.memory[at : min(at + PIECE_BYTES, end)])))
