"""Cuts a byte stream into frames: a length of 4 bytes (big endian), then as many bytes."""

from __future__ import annotations

from keepstep.wire.violation import Violation

LENGTH_BYTES = 4


def frame(body: bytes) -> bytes:
    """The frame of ``body``: its length, then itself."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class FrameBuffer:
    """Takes bytes as they come and returns whole frames. Holds at most one unfinished frame of ``limit`` bytes.

    ``limit`` may be changed between two frames; it is small until the peer has proved itself.
    """

    __slots__ = ("_at", "_pending", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._pending: bytes | bytearray = b""
        self._at = 0

    def __len__(self) -> int:
        return len(self._pending) - self._at

    def feed(self, data: bytes) -> None:
        """Add received bytes. Before the next call, ``take`` must have returned None."""
        if self._pending:
            self._pending += data  # `_keep` has made it a bytearray
        else:
            self._pending = data

    def take(self) -> bytes | bytearray | None:
        """The body of the next whole frame, or None if more bytes are needed.

        Raises:
            Violation: the frame is empty or longer than ``limit``. This is known from its length field alone.
        """
        pending, at = self._pending, self._at
        begin = at + LENGTH_BYTES
        if len(pending) < begin:
            return self._keep()
        length = int.from_bytes(pending[at:begin], "big")
        if length > self.limit:
            raise Violation("oversized", f"a frame of {length} bytes where at most {self.limit} are allowed")
        if length == 0:
            raise Violation("malformed", "an empty frame")
        end = begin + length
        if len(pending) < end:
            return self._keep()
        if end == len(pending):
            self._pending, self._at = b"", 0
        else:
            self._at = end
        return pending[begin:end]

    def clear(self) -> None:
        """Drop all bytes."""
        self._pending, self._at = b"", 0

    def _keep(self) -> None:
        if self._at or not isinstance(self._pending, bytearray):
            self._pending = bytearray(self._pending[self._at :])
            self._at = 0
