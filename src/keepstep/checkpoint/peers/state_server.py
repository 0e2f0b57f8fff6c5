"""Gives the sealed states of this node to the agents of others that ask for them.

Header and checksums go in sealed frames; the storages' bytes go between frames, out of the slot by ``sendfile``.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from keepstep.checkpoint import native
from keepstep.checkpoint.memory.slot import Slot
from keepstep.checkpoint.memory.slots import Key, Record, slot_bytes
from keepstep.core.errors import CheckpointError
from keepstep.wire.blocking import BlockingConnection, BlockingServer
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

_IDLE_S = 120.0
_SENT_AT_ONCE = 4 << 20

Reading = Callable[[Key, int], AbstractContextManager[tuple[Slot, Record]]]
"""Gives the slot that holds a rank's state, and its record; it stays as it is while the context is open."""


class Rate:
    """Shares ``bytes_per_s`` (0: no limit) among threads that send."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._guard = threading.Lock()
        self._free_s = 0.0  # when everything let through so far will have been sent at this rate

    @property
    def at_once(self) -> int:
        """Bytes to send between two calls of `wait`: at most a tenth of a second's worth."""
        if self.bytes_per_s <= 0:
            return _SENT_AT_ONCE
        return max(1024, min(_SENT_AT_ONCE, int(self.bytes_per_s / 10)))

    def delay_s(self, nbytes: int, now_s: float) -> float:
        """How long to wait before sending ``nbytes``, which count as sent from now on."""
        if self.bytes_per_s <= 0:
            return 0.0
        with self._guard:
            begin_s = max(self._free_s, now_s)
            self._free_s = begin_s + nbytes / self.bytes_per_s
            return begin_s - now_s

    def wait(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may be sent."""
        delay_s = self.delay_s(nbytes, time.monotonic())
        if delay_s > 0:
            time.sleep(delay_s)


def state_server(
    run: RunKey, reading: Reading, *, tls: ssl.SSLContext | None = None, rate: Rate | None = None
) -> BlockingServer:
    """A server that gives states to the agents of other nodes, once it listens. ``rate`` limits all peers together."""
    serve = partial(_serve, reading=reading, rate=rate or Rate(0))
    return BlockingServer(run, "peer", serve, purpose="states are given", idle_s=_IDLE_S, tls=tls)


def _serve(connection: BlockingConnection, reading: Reading, rate: Rate) -> None:
    """Answer the requests of one agent."""
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
                    slot, record = stack.enter_context(reading(key, message.rank))
                except CheckpointError as error:
                    connection.send(Lacks(str(error)[:500]))
                    continue
                connection.send(Have(*record))
            elif slot is None:
                raise Violation("malformed", "a request for parts of nothing")
            elif isinstance(message, SendHeader):
                end = slot_bytes(record)
                for at in range(record.header_at, end, PIECE_BYTES):
                    connection.send(Piece(bytes(slot.memory[at : min(at + PIECE_BYTES, end)])))
            elif isinstance(message, SendRange):
                if message.offset + message.nbytes > record.data_bytes:
                    raise Violation("malformed", f"bytes beyond the {record.data_bytes} that there are")
                connection.send(Following(message.offset, message.nbytes))
                send_slot(connection, slot, native.DATA_OFFSET + message.offset, message.nbytes, rate)


def send_slot(connection: BlockingConnection, slot: Slot, offset: int, nbytes: int, rate: Rate) -> None:
    """Send bytes of a slot outside the frames; without TLS the kernel copies them."""
    behind = offset + nbytes
    while offset < behind:
        count = min(behind - offset, rate.at_once)
        rate.wait(count)
        if isinstance(connection.socket, ssl.SSLSocket):
            with memoryview(slot.memory) as view, view[offset : offset + count] as part:
                connection.socket.sendall(part)
            offset += count
            continue
        end = offset + count
        while offset < end:
            sent = os.sendfile(connection.socket.fileno(), slot.fileno(), offset, end - offset)
            if not sent:
                raise OSError("the slot ended early")
            offset += sent
