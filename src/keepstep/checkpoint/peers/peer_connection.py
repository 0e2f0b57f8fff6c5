"""A connection between the agents of two nodes: blocking, frames, and bytes between them."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
import time

from keepstep.checkpoint.memory.slot import Slot
from keepstep.wire.address import end_name, notice_dead_host
from keepstep.wire.channel import ClientChannel, Ends, ServerChannel
from keepstep.wire.framing import LENGTH_BYTES
from keepstep.wire.messages import Message
from keepstep.wire.violation import Violation

MOST_ENDPOINTS = 4
HANDSHAKE_S = 5.0
_SENT_AT_ONCE = 4 << 20
_SILENCE_S = 20.0  # of a peer in the middle of something


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


class PeerConnection:
    """OSError: it broke or was silent for too long."""

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
        end_s = time.monotonic() + HANDSHAKE_S
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
                raise Violation("handshake-timeout", f"no proof within {HANDSHAKE_S:g} s")
            data = self._socket.recv(min(count - len(found), 1 << 20))
            if not data:
                raise ConnectionError("the other side closed the connection")
            found += data
        return bytes(found)
